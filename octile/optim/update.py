"""The arithmetic of an AdamW step over many tensors, in FP32 whatever the dtype of the moments.

    m ← β₁·m + (1 − β₁)·g               v ← β₂·v + (1 − β₂)·g²
    w ← w·(1 − lr·λ) − lr · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)

A kernel reads and writes everything once, with BF16 moments as stored (`octile.ops.adamw`): on a GPU for all tensors
with the same dtypes, on a CPU for each tensor.

On a CPU without a C++ compiler torch's fused kernel does the arithmetic. It needs FP32, so BF16 moments are converted
in batches: small tensors are packed into a batch and large ones are split, so that the converted values stay in the
cache. Its bits are the same if the processor has a fused multiply-add, except for what is left of 16 values, which
torch computes in FP64.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels import cpu
from octile.ops.adamw import adamw
from octile.optim.storage import overwrite_

CPU_BATCH = 2**18  # elements: their FP32 moments, 2 MiB, stay in a core's cache


class UpdateGroup(NamedTuple):
    """Tensors that are updated with the same settings; each list has an entry per parameter.

    Attributes:
        weights: float32, contiguous, any shape.
        gradients: the same shapes, any floating-point dtype.
        exp_avgs, exp_avg_sqs: m and v, contiguous, of any floating-point dtype; rounded to nearest even.
        copies: the parameters of another dtype that become the rounded weights, contiguous; or none.
        steps: t, float32 [], including this step.
        lr: a number, or a tensor [] on the weights' device.
        betas, eps, weight_decay: β₁ and β₂, ε and λ.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    copies: list[Tensor]
    steps: list[Tensor]
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def adamw_(groups: Sequence[UpdateGroup], skip: Tensor | None = None, gradient_scale: Tensor | None = None) -> None:
    """Update weights and moments in place.

    Args:
        groups: the tensors; those of a group lie on one device.
        skip: bool [] on the weights' device: if true, nothing changes.
        gradient_scale: float32 [] on the weights' device: the factor of all gradients, which keep their values.
    """
    update_together_([group for group in groups if _has_kernel(group)], skip, gradient_scale)
    for group in groups:
        if not _has_kernel(group):
            _update_on_cpu_(group, skip, gradient_scale)


def _has_kernel(group: UpdateGroup) -> bool:
    return group.weights[0].is_cuda or cpu.can_update(*group.exp_avgs, *group.exp_avg_sqs)


def update_together_(
    groups: Sequence[UpdateGroup], skip: Tensor | None = None, gradient_scale: Tensor | None = None
) -> None:
    """Update all groups with the same betas and ε in one call of the operator, as on a GPU."""
    calls: dict[Any, list[UpdateGroup]] = {}
    for group in groups:
        key = group.weights[0].device, group.betas, group.eps, bool(group.copies)
        calls.setdefault(key, []).append(group)
    for (_, betas, eps, _), together in calls.items():
        lists = (
            [t.detach() for group in together for t in getattr(group, name)]
            for name in ("weights", "gradients", "exp_avgs", "exp_avg_sqs", "copies")
        )
        corrections = torch.cat([_corrections(group) for group in together])
        adamw(*lists, corrections, *betas, eps, skip, gradient_scale)


def _corrections(group: UpdateGroup) -> Tensor:
    """The bias corrections of each parameter's step and the factor of weight decay [N, 3], computed on its device."""
    step_N = torch.stack(group.steps).double()
    bias1_N, bias2_N = (1 - beta**step_N for beta in group.betas)
    lr = group.lr.double() if isinstance(group.lr, Tensor) else group.lr
    decay_N = torch.ones_like(bias1_N) - lr * group.weight_decay
    return torch.stack((group.lr / bias1_N, bias2_N.sqrt(), decay_N), dim=1).float()


def _update_on_cpu_(group: UpdateGroup, skip: Tensor | None, gradient_scale: Tensor | None) -> None:
    flat: list[tuple[Tensor, ...]] = [
        (w.detach().view(-1), g.detach().reshape(-1), m.view(-1), v.view(-1), step)
        for w, g, m, v, step in zip(*group[:4], group.steps, strict=True)
    ]
    for batch in _batches(flat):
        w, g, m, v, t = (list(tensors) for tensors in zip(*batch, strict=True))
        g32, m32, v32 = _as_float32(g), _as_float32(m), _as_float32(v)
        torch._fused_adamw_(
            w,
            g32 if gradient_scale is None else list(torch._foreach_mul(g32, gradient_scale)),
            m32,
            v32,
            [],
            t,
            lr=float(group.lr),
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay,
            eps=group.eps,
            amsgrad=False,
            maximize=False,
            found_inf=None if skip is None else skip.float(),
        )
        for stored, updated in ((m, m32), (v, v32)):
            if stored is not updated:
                torch._foreach_copy_(stored, updated)
    for weight, copy in zip(group.weights, group.copies or group.weights, strict=True):
        if copy is not weight:
            overwrite_(copy, weight, skip)


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
