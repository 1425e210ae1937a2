"""One AdamW step of one tensor, in FP32 whatever the moments are stored in, in one pass over memory.

    m ← β₁·m + (1 − β₁)·g               v ← β₂·v + (1 − β₂)·g²
    w ← w·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)

Everything is rounded to FP32 after each operation, but the two moments are each made by one fused multiply-add,
m + (1 − β₁)·(g − m) and β₂·v + ((1 − β₂)·g)·g, as torch's fused step on a CPU has them: with β₁ above ½, and where its
processor has such an instruction, the bits are the same. The moments that are stored are rounded once more, to nearest
even, and the weight's step is made with those that are not.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101).
"""

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES


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
) -> None:
    """Updates weight and moments in place.

    Args:
        weight: float32, contiguous, any shape.
        gradient: of this shape, float32, bfloat16 or float16.
        exp_avg, exp_avg_sq: m and v, of this shape, contiguous, each of one of these dtypes.
        corrections: float32 [3]: lr / (1 − β₁ᵗ), √(1 − β₂ᵗ) and 1 − lr·λ. They depend on the step, which a GPU counts
            itself, and on the learning rate, which a captured graph reads at each replay.

    Raises:
        TypeError: a tensor is of another dtype.
        ValueError: shapes or devices do not fit together, or what is written is not contiguous.
    """
    _check(weight, gradient, exp_avg, exp_avg_sq, corrections)
    step_size, root, decay = corrections.unbind()
    g, m, v = gradient.float(), exp_avg.float(), exp_avg_sq.float()
    m = _fma(g - m, torch.full_like(g, 1 - beta1), m)
    v = _fma(g * (1 - beta2), g, v * beta2)
    sqrt = v.double().sqrt().float()  # torch's own of FP32 is not always rounded to nearest on a CPU
    weight.copy_(weight * decay - m * step_size / (sqrt / root + eps))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in FP32, rounded once: in FP64 the product is exact, and a sum lies at a tie in one of 2²⁹ cases."""
    return (a.double() * b.double() + c.double()).float()


@adamw.register_fake
def _(weight, gradient, exp_avg, exp_avg_sq, corrections, beta1, beta2, eps):
    return None


@adamw.register_kernel("cuda")
def _(weight, gradient, exp_avg, exp_avg_sq, corrections, beta1, beta2, eps):
    from octile.kernels.triton import adamw as kernel  # late: a machine without a GPU has no Triton

    _check(weight, gradient, exp_avg, exp_avg_sq, corrections)
    kernel.launch(weight, gradient.contiguous(), exp_avg, exp_avg_sq, corrections, beta1, beta2, eps)


def _check(weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, corrections: Tensor) -> None:
    if weight.dtype != torch.float32:
        raise TypeError(f"weight must be float32, not {weight.dtype}")
    if corrections.dtype != torch.float32 or corrections.shape != (3,):
        raise ValueError(f"corrections must be float32 [3], not {corrections.dtype} {list(corrections.shape)}")
    others = {"gradient": gradient, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, t in others.items():
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")
        if t.shape != weight.shape:
            raise ValueError(f"{name} must be {tuple(weight.shape)} as weight, not {tuple(t.shape)}")
    for name, t in (others | {"corrections": corrections}).items():
        if t.device != weight.device:
            raise ValueError(f"weight lies on {weight.device} but {name} on {t.device}")
    for name, t in (("weight", weight), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not of strides {t.stride()}")
