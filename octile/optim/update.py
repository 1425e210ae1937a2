"""The arithmetic of an AdamW step over many tensors, in FP32 whatever the dtype of the moments.

    m ← β₁·m + (1 − β₁)·g               v ← β₂·v + (1 − β₂)·g²
    w ← w·(1 − lr·λ) − lr · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)

On a GPU one kernel per tensor reads and writes everything once, with BF16 moments as stored (`octile.ops.adamw`).

On a CPU torch's fused kernel does the arithmetic. It needs FP32, so BF16 moments are converted in batches: small
tensors are packed into a batch and large ones are split, so that the converted values stay in the cache. On two cores a
step takes a fifth of the time that it takes in one large batch. If the processor has a fused multiply-add, CPU and GPU
give the same bits.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from octile.ops.adamw import adamw

CPU_BATCH = 2**18  # elements: their FP32 moments, 2 MiB, stay in a core's cache


def adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skip: Tensor | None = None,
) -> None:
    """Update weights and moments in place; each list has an entry per parameter.

    Args:
        weights: float32, contiguous, any shape.
        gradients: the same shapes, any floating-point dtype.
        exp_avgs, exp_avg_sqs: m and v, contiguous, of any floating-point dtype; rounded to nearest even.
        steps: t, float32 [], including this step.
        lr: a number, or a tensor [] on the weights' device.
        skip: bool [] on the weights' device: if true, nothing changes.
    """
    every = list(zip(weights, gradients, exp_avgs, exp_avg_sqs, steps, strict=True))
    on_gpus: list[tuple[Tensor, ...]] = [tensors for tensors in every if tensors[0].is_cuda]
    update_each_(on_gpus, lr, betas, eps, weight_decay, skip)
    flat: list[tuple[Tensor, ...]] = [
        (w.detach().view(-1), g.detach().reshape(-1), m.view(-1), v.view(-1), step)
        for w, g, m, v, step in every
        if not w.is_cuda
    ]
    for batch in _batches(flat):
        w, g, m, v, t = (list(tensors) for tensors in zip(*batch, strict=True))
        m32, v32 = _as_float32(m), _as_float32(v)
        torch._fused_adamw_(
            w,
            _as_float32(g),
            m32,
            v32,
            [],
            t,
            lr=float(lr),
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            found_inf=None if skip is None else skip.float(),
        )
        for stored, updated in ((m, m32), (v, v32)):
            if stored is not updated:
                torch._foreach_copy_(stored, updated)


def update_each_(
    every: list[tuple[Tensor, ...]],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skip: Tensor | None = None,
) -> None:
    """Update one parameter after the other, as on a GPU: (weight, gradient, m, v, t), in place."""
    for *tensors, corrections in _with_corrections(every, lr, betas, weight_decay):
        adamw(*(t.detach() for t in tensors), corrections, *betas, eps, skip)


def _with_corrections(
    every: list[tuple[Tensor, ...]], lr: float | Tensor, betas: tuple[float, float], weight_decay: float
) -> Iterator[tuple[Tensor, ...]]:
    """Yield each parameter's tensors with the bias corrections of its step, computed on the step's device."""
    for device in dict.fromkeys(step.device for *_, step in every):
        there = [tensors for tensors in every if tensors[-1].device == device]
        step_N = torch.stack([step for *_, step in there]).double()
        bias1_N, bias2_N = (1 - beta**step_N for beta in betas)
        decay_N = torch.ones_like(bias1_N) - (lr.double() if isinstance(lr, Tensor) else lr) * weight_decay
        corrections_N3 = torch.stack((lr / bias1_N, bias2_N.sqrt(), decay_N), dim=1).float()
        for (*tensors, _), corrections in zip(there, corrections_N3.unbind(), strict=True):
            yield *tensors, corrections


def _as_float32(tensors: list[Tensor]) -> list[Tensor]:
    """The list itself where all are float32 already, otherwise copies."""
    if all(t.dtype == torch.float32 for t in tensors):
        return tensors
    copies = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _batches(flat: list[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Split and pack flat tensors into batches of at most CPU_BATCH elements."""
    batch: list[tuple[Tensor, ...]] = []
    filled = 0
    for *tensors, step in flat:
        for pieces in zip(*(t.split(CPU_BATCH) for t in tensors), strict=True):
            n = pieces[0].numel()
            if batch and filled + n > CPU_BATCH:
                yield batch
                batch, filled = [], 0
            batch.append((*pieces, step))
            filled += n
    if batch:
        yield batch
