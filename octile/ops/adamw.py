"""One AdamW step of one tensor, in one pass over memory, computed in FP32 for moments of any dtype.

    m ← β₁·m + (1 − β₁)·g               v ← β₂·v + (1 − β₂)·g²
    w ← w·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)

Each operation is rounded to FP32, except that each moment is one fused multiply-add, m + (1 − β₁)·(g − m) and
β₂·v + ((1 − β₂)·g)·g. So the bits are those of torch's fused AdamW on a CPU with FMA instructions, for β₁ above ½. The
update of the weight uses the moments in FP32; for storage they are rounded to nearest even.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101).
"""

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


@operator(writes=("weight", "exp_avg", "exp_avg_sq"))
def adamw(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    skip: Tensor | None = None,
) -> None:
    """Update weight and moments in place.

    Args:
        weight: float32, contiguous, any shape.
        gradient: float32, bfloat16 or float16, of weight's shape.
        exp_avg, exp_avg_sq: m and v, float32, bfloat16 or float16, contiguous, of weight's shape.
        corrections: float32 [3]: lr / (1 − β₁ᵗ), √(1 − β₂ᵗ) and 1 − lr·λ. A tensor, since a captured graph reads the
            step and the learning rate from the device at each replay.
        beta1, beta2, eps: β₁, β₂ and ε.
        skip: bool []: if true, nothing changes. A tensor, since a captured graph reads it at each replay.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or weight or a moment is not contiguous.
    """
    _check(weight, gradient, exp_avg, exp_avg_sq, corrections, skip)
    if skip is not None and skip:
        return
    step_size, root, decay = corrections.unbind()
    g, m, v = gradient.float(), exp_avg.float(), exp_avg_sq.float()
    m = _fma(g - m, torch.full_like(g, 1 - beta1), m)
    v = _fma(g * (1 - beta2), g, v * beta2)
    sqrt = v.double().sqrt().float()  # torch's FP32 sqrt on a CPU is not always correctly rounded
    weight.copy_(weight * decay - m * step_size / (sqrt / root + eps))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in FP32. Computed in FP64: the product is exact, and double rounding matters in one of 2²⁹ cases."""
    return (a.double() * b.double() + c.double()).float()


@adamw.register_fake
def _(weight, gradient, exp_avg, exp_avg_sq, corrections, beta1, beta2, eps, skip=None):
    return None


@adamw.register_kernel("cuda")
def _(weight, gradient, exp_avg, exp_avg_sq, corrections, beta1, beta2, eps, skip=None):
    from octile.kernels.triton import adamw as kernel  # late: a machine without a GPU has no Triton

    _check(weight, gradient, exp_avg, exp_avg_sq, corrections, skip)
    kernel.launch(weight, gradient.contiguous(), exp_avg, exp_avg_sq, corrections, beta1, beta2, eps, skip)


def _check(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, corrections: Tensor, skip: Tensor | None
) -> None:
    if weight.dtype != torch.float32:
        raise TypeError(f"weight must be float32, not {weight.dtype}")
    if corrections.dtype != torch.float32 or corrections.shape != (3,):
        raise ValueError(f"corrections must be float32 [3], not {corrections.dtype} {list(corrections.shape)}")
    if skip is not None:
        check_skip(skip)
        check_device("weight", weight, "skip", skip)
    others = {"gradient": gradient, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, t in others.items():
        check_input_dtype(name, t)
        if t.shape != weight.shape:
            raise ValueError(f"{name} must be {tuple(weight.shape)} as weight, not {tuple(t.shape)}")
    for name, t in (others | {"corrections": corrections}).items():
        check_device("weight", weight, name, t)
    for name, t in (("weight", weight), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, but has the strides {t.stride()}")


def check_skip(skip: Tensor) -> None:
    """Raise TypeError or ValueError if skip is not bool []."""
    if skip.dtype != torch.bool:
        raise TypeError(f"skip must be bool, not {skip.dtype}")
    if skip.dim():
        raise ValueError(f"skip must have the shape [], not {list(skip.shape)}")
