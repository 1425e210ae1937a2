"""One AdamW step over many tensors, in FP32 whatever the moments are stored in.

    m ← β₁·m + (1 − β₁)·g               v ← β₂·v + (1 − β₂)·g²
    w ← w·(1 − lr·λ) − lr · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)

The arithmetic is torch's fused kernel, one pass over memory. It wants FP32 everywhere, so moments stored in BF16 are
unfolded for it, a batch at a time: small tensors are packed into a batch, large ones are cut, and the unfolded numbers
never leave the cache (on two cores a step then takes a fifth of the time of one large batch).

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_BATCH = 2**18  # elements: their FP32 moments, 2 MiB, stay in a core's cache
CUDA_BATCH = 2**26  # enough to keep a GPU busy, 512 MiB of moments


def adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates weights and moments in place; one entry a parameter in each list.

    Args:
        weights: float32, contiguous, any shape.
        gradients: the same shapes, any floating-point dtype.
        exp_avgs, exp_avg_sqs: m and v, contiguous, of any floating-point dtype; rounded to nearest even.
        steps: t, float32 [], this step counted.
    """
    flat: list[tuple[Tensor, ...]] = [
        (w.detach().view(-1), g.detach().reshape(-1), m.view(-1), v.view(-1), step)
        for w, g, m, v, step in zip(weights, gradients, exp_avgs, exp_avg_sqs, steps, strict=True)
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
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        for stored, updated in ((m, m32), (v, v32)):
            if stored is not updated:
                torch._foreach_copy_(stored, updated)


def _as_float32(tensors: list[Tensor]) -> list[Tensor]:
    """The list itself where all are float32 already, otherwise copies."""
    if all(t.dtype == torch.float32 for t in tensors):
        return tensors
    copies = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _batches(flat: list[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Cuts and packs rows of flat tensors into batches of one device and at most its number of elements."""
    batch: list[tuple[Tensor, ...]] = []
    filled = 0
    for *tensors, step in flat:
        device = step.device
        size = CPU_BATCH if device.type == "cpu" else CUDA_BATCH
        for pieces in zip(*(t.split(size) for t in tensors), strict=True):
            n = pieces[0].numel()
            if batch and (filled + n > size or batch[0][-1].device != device):
                yield batch
                batch, filled = [], 0
            batch.append((*pieces, step))
            filled += n
    if batch:
        yield batch
