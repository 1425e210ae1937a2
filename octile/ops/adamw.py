"""One AdamW step of many tensors, in one pass over memory, computed in FP32 for moments of any dtype.

    m ← β₁·m + (1 − β₁)·g               v ← β₂·v + (1 − β₂)·g²
    w ← w·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)

Each operation is rounded to FP32, except that each moment is one fused multiply-add, m + (1 − β₁)·(g − m) and
β₂·v + ((1 − β₂)·g)·g. So the bits are those of torch's fused AdamW on a CPU with FMA instructions, for β₁ above ½. The
update of the weight uses the moments in FP32; for storage they are rounded to nearest even.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101).
"""

import torch
from torch import Tensor

from octile.kernels import cpu
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


@operator(writes=("weights", "exp_avgs", "exp_avg_sqs", "copies"))
def adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    corrections: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    skip: Tensor | None = None,
    gradient_scale: Tensor | None = None,
) -> None:
    """Update weights and moments in place. Each list has an entry per tensor; entries have any shape.

    Args:
        weights: float32, contiguous.
        gradients: float32, bfloat16 or float16, of the weights' shapes.
        exp_avgs, exp_avg_sqs: m and v, float32, bfloat16 or float16, contiguous, of the weights' shapes.
        copies: none, or for each weight a float32, bfloat16 or float16 tensor, contiguous, of its shape, which becomes
            the new weight rounded to nearest.
        corrections: float32 [N, 3], contiguous: of each of N tensors lr / (1 − β₁ᵗ), √(1 − β₂ᵗ) and 1 − lr·λ. A tensor,
            since a captured graph reads the step and the learning rate from the device at each replay.
        beta1, beta2, eps: β₁, β₂ and ε.
        skip: bool []: if true, nothing changes. A tensor, since a captured graph reads it at each replay.
        gradient_scale: float32 []: the factor of all gradients, as for clipping. The gradients keep their values.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: lists, shapes or devices do not fit together, or a tensor that is written is not contiguous.
    """
    _check(weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, skip, gradient_scale)
    if skip is not None and skip:
        return
    for i, (weight, gradient, exp_avg, exp_avg_sq) in enumerate(
        zip(weights, gradients, exp_avgs, exp_avg_sqs, strict=True)
    ):
        step_size, root, decay = corrections[i].unbind()
        g, m, v = gradient.float(), exp_avg.float(), exp_avg_sq.float()
        if gradient_scale is not None:
            g = g * gradient_scale
        m = _fma(g - m, torch.full_like(g, 1 - beta1), m)
        v = _fma(g * (1 - beta2), g, v * beta2)
        sqrt = v.double().sqrt().float()  # torch's FP32 sqrt on a CPU is not always correctly rounded
        weight.copy_(weight * decay - m * step_size / (sqrt / root + eps))
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        if copies:
            copies[i].copy_(weight)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in FP32. Computed in FP64: the product is exact, and double rounding matters in one of 2²⁹ cases."""
    return (a.double() * b.double() + c.double()).float()


@adamw.register_fake
def _(
    weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, beta1, beta2, eps, skip=None, gradient_scale=None
):
    return None


@adamw.register_kernel("cpu")
def _(
    weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, beta1, beta2, eps, skip=None, gradient_scale=None
):
    arguments = weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, beta1, beta2, eps, skip, gradient_scale
    if not cpu.can_update(*exp_avgs, *exp_avg_sqs):
        return adamw.reference(*arguments)
    _check(weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, skip, gradient_scale)
    if skip is not None and skip:
        return None
    factor = 1.0 if gradient_scale is None else float(gradient_scale)
    rows = zip(weights, gradients, exp_avgs, exp_avg_sqs, corrections.tolist(), strict=True)
    for weight, gradient, exp_avg, exp_avg_sq, numbers in rows:
        settings = cpu.AdamWSettings(*numbers, 1 - beta1, 1 - beta2, beta2, eps, factor)
        cpu.adamw(weight, gradient, exp_avg, exp_avg_sq, settings)
    for copy, weight in zip(copies, weights, strict=False):  # there may be none
        copy.copy_(weight)
    return None


@adamw.register_kernel("cuda")
def _(
    weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, beta1, beta2, eps, skip=None, gradient_scale=None
):
    from octile.kernels.triton import adamw as kernel  # late: a machine without a GPU has no Triton

    _check(weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, skip, gradient_scale)
    gradients = [gradient.contiguous() for gradient in gradients]
    kernel.launch(
        weights, gradients, exp_avgs, exp_avg_sqs, copies, corrections, beta1, beta2, eps, skip, gradient_scale
    )


def _check(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    corrections: Tensor,
    skip: Tensor | None,
    gradient_scale: Tensor | None,
) -> None:
    lists = {"weights": weights, "gradients": gradients, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if copies:
        lists["copies"] = copies
    for name, tensors in lists.items():
        if len(tensors) != len(weights):
            raise ValueError(f"{name} must have {len(weights)} tensors as weights, not {len(tensors)}")
    if corrections.dtype != torch.float32 or corrections.shape != (len(weights), 3) or not corrections.is_contiguous():
        raise ValueError(
            f"corrections must be float32 [{len(weights)}, 3], contiguous, not {corrections.dtype} "
            f"{list(corrections.shape)} with the strides {corrections.stride()}"
        )
    if skip is not None:
        check_skip(skip)
        check_device("corrections", corrections, "skip", skip)
    if gradient_scale is not None:
        check_gradient_scale(gradient_scale)
        check_device("corrections", corrections, "gradient_scale", gradient_scale)
    for name, tensors in lists.items():
        for i, (t, weight) in enumerate(zip(tensors, weights, strict=True)):
            if name == "weights" and t.dtype != torch.float32:
                raise TypeError(f"weights[{i}] must be float32, not {t.dtype}")
            check_input_dtype(f"{name}[{i}]", t)
            if t.shape != weight.shape:
                raise ValueError(f"{name}[{i}] must be {tuple(weight.shape)} as weights[{i}], not {tuple(t.shape)}")
            check_device("corrections", corrections, f"{name}[{i}]", t)
            if name != "gradients" and not t.is_contiguous():
                raise ValueError(f"{name}[{i}] must be contiguous, but has the strides {t.stride()}")


def check_skip(skip: Tensor) -> None:
    """Raise TypeError or ValueError if skip is not bool []."""
    if skip.dtype != torch.bool:
        raise TypeError(f"skip must be bool, not {skip.dtype}")
    if skip.dim():
        raise ValueError(f"skip must have the shape [], not {list(skip.shape)}")


def check_gradient_scale(gradient_scale: Tensor) -> None:
    """Raise TypeError or ValueError if gradient_scale is not a tensor, float32 []."""
    if not isinstance(gradient_scale, Tensor):
        raise TypeError(f"gradient_scale must be a tensor, not {gradient_scale!r}")
    if gradient_scale.dtype != torch.float32 or gradient_scale.dim():
        raise ValueError(f"gradient_scale must be float32 [], not {gradient_scale.dtype} {list(gradient_scale.shape)}")
