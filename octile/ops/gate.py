"""An expert gate's product in FP32: y = x · wᵀ, dx = dy · w, dw = dyᵀ · x.

Which experts a token goes to must not depend on roundings to 8 or 16 bits. But a GPU makes an FP32 product without its
tensor cores, some fifteen times as slowly as one in BF16. They multiply BF16 exactly and sum in FP32, and an FP32
number is the sum of three BF16 numbers, 8 bits each. So there the FP32 operand is taken apart, its parts are multiplied
in one product, and the results are added:

    x · wᵀ = x · w₁ᵀ + x · w₂ᵀ + x · w₃ᵀ        w = w₁ + w₂ + w₃ exactly

Where both operands are FP32, products of parts that together lie 24 bits below the first are left out. Sums are in FP32
and in no particular order, so the results are near to the reference and not its bits.

Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (arXiv 1904.06376).  Shapes: T tokens, D model, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES

PARTS = 3


@operator()
def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ.

    Args:
        x: [T, D], float32, bfloat16 or float16; on a GPU bfloat16 is fast.
        weight: [E, D], of one of these dtypes.

    Returns:
        [T, E] float32.

    Raises:
        TypeError: x or weight is of another dtype.
        ValueError: they are no matrices, or do not fit together.
    """
    _check(x, weight)
    with without_autocast(x.device):
        return F.linear(x.float(), weight.float())


@gate_logits.register_fake
def _(x, weight):
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


@gate_logits.register_kernel("cuda")
def _(x, weight):
    _check(x, weight)
    if x.dtype != torch.bfloat16:
        with without_autocast(x.device):
            return F.linear(x.float(), weight.float())
    parts = parts_of(weight)
    products_TPE = torch.mm(x, parts.flatten(0, 1).mT, out_dtype=torch.float32).unflatten(1, parts.shape[:2])
    return products_TPE.sum(1)


@operator()
def gate_logits_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight.

    Args:
        dy: [T, E] float32.
        x, weight: as in `gate_logits`.

    Returns:
        dx [T, D] in x's dtype, dweight [E, D] float32.

    Raises:
        TypeError: a tensor is of another dtype.
        ValueError: they do not fit together.
    """
    _check_backward(dy, x, weight)
    return _backward(dy, x, weight)


def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(dy.device):
        return (dy @ weight.float()).to(x.dtype), dy.mT @ x.float()


@gate_logits_backward.register_fake
def _(dy, x, weight):
    return x.new_empty(x.shape), x.new_empty(weight.shape, dtype=torch.float32)


@gate_logits_backward.register_kernel("cuda")
def _(dy, x, weight):
    _check_backward(dy, x, weight)
    if x.dtype != torch.bfloat16:
        return _backward(dy, x, weight)
    of_dy, of_w = parts_of(dy), parts_of(weight)
    pairs = [(i, j) for i in range(len(of_dy)) for j in range(len(of_w)) if i + j < PARTS]
    dx = torch.cat([of_dy[i] for i, _ in pairs], dim=1) @ torch.cat([of_w[j] for _, j in pairs])
    products_PED = torch.mm(torch.cat([*of_dy], dim=1).mT, x, out_dtype=torch.float32).unflatten(0, (PARTS, -1))
    return dx, products_PED.sum(0)


def parts_of(t: Tensor) -> Tensor:
    """BF16 tensors [P, *t.shape] whose sum is t: one of a BF16 tensor, three of an FP32 one."""
    if t.dtype == torch.bfloat16:
        return t[None]
    rest, parts = t.float(), []
    for _ in range(PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts)


def _check(x: Tensor, weight: Tensor) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")
        if t.dim() != 2:
            raise ValueError(f"{name} must be a matrix, not {tuple(t.shape)}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} must end in the D = {weight.shape[1]} of weight {tuple(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x lies on {x.device} but weight on {weight.device}")


def _check_backward(dy: Tensor, x: Tensor, weight: Tensor) -> None:
    _check(x, weight)
    if dy.dtype != torch.float32:
        raise TypeError(f"dy must be float32, not {dy.dtype}")
    if dy.shape != (len(x), len(weight)):
        raise ValueError(f"dy must be {(len(x), len(weight))}, not {tuple(dy.shape)}")
    if dy.device != x.device:
        raise ValueError(f"x lies on {x.device} but dy on {dy.device}")
