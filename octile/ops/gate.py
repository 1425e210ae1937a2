"""The GEMMs of an expert gate in FP32: y = x · wᵀ, dx = dy · w, dw = dyᵀ · x.

The choice of experts must not depend on rounding to 8 or 16 bits. But a GPU computes an FP32 GEMM without its tensor
cores, about fifteen times slower than one in BF16. Tensor cores multiply BF16 exactly and sum in FP32, and an FP32
number is the sum of three BF16 numbers with 8 bits each. So the FP32 operand is split into three terms, which are
multiplied in one GEMM, and the results are added:

    x · wᵀ = x · w₁ᵀ + x · w₂ᵀ + x · w₃ᵀ        w = w₁ + w₂ + w₃ exactly

If both operands are FP32, products of terms that lie 24 bits or more below the first product are omitted. Sums are in
FP32 in unspecified order, so the results are close to the reference but not bit for bit.

Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (arXiv 1904.06376).  Shapes: T tokens, D model width, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype

TERMS = 3  # BF16 numbers that sum to one FP32 number


@operator()
def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits of a gate, x · weightᵀ.

    Args:
        x: [T, D], float32, bfloat16 or float16; on a GPU bfloat16 is fast.
        weight: [E, D], float32, bfloat16 or float16.

    Returns:
        logits [T, E] float32.

    Raises:
        TypeError: x or weight has another dtype.
        ValueError: x or weight is not a matrix, or shapes or devices do not fit together.
    """
    _check(x, weight)
    with without_autocast(x.device):
        return F.linear(x.float(), weight.float())


@gate_logits.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@gate_logits.register_kernel("cuda")
def _(x, weight):
    _check(x, weight)
    if x.dtype != torch.bfloat16:
        with without_autocast(x.device):
            return F.linear(x.float(), weight.float())
    terms = bfloat16_terms(weight)
    products_TPE = torch.mm(x, terms.flatten(0, 1).mT, out_dtype=torch.float32).unflatten(1, terms.shape[:2])
    return products_TPE.sum(1)


@operator()
def gate_logits_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight.

    Args:
        dy: [T, E] float32, the gradient of the logits.
        x, weight: as in `gate_logits`.

    Returns:
        dx [T, D] in x's dtype, dweight [E, D] float32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
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
    dy_terms, w_terms = bfloat16_terms(dy), bfloat16_terms(weight)
    pairs = [(i, j) for i in range(len(dy_terms)) for j in range(len(w_terms)) if i + j < TERMS]
    dx = torch.cat([dy_terms[i] for i, _ in pairs], dim=1) @ torch.cat([w_terms[j] for _, j in pairs])
    products_PED = torch.mm(torch.cat([*dy_terms], dim=1).mT, x, out_dtype=torch.float32).unflatten(0, (TERMS, -1))
    return dx, products_PED.sum(0)


def bfloat16_terms(t: Tensor) -> Tensor:
    """Split t into BF16 tensors [P, *t.shape] whose sum is t exactly: P is 1 for BF16 and 3 for FP32."""
    if t.dtype == torch.bfloat16:
        return t[None]
    rest, terms = t.float(), []
    for _ in range(TERMS):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return torch.stack(terms)


def _check(x: Tensor, weight: Tensor) -> None:
    for name, t in (("x", x), ("weight", weight)):
        check_input_dtype(name, t)
        if t.dim() != 2:
            raise ValueError(f"{name} must be a matrix, not {tuple(t.shape)}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} must end in the D = {weight.shape[1]} of weight {tuple(weight.shape)}")
    check_device("x", x, "weight", weight)


def _check_backward(dy: Tensor, x: Tensor, weight: Tensor) -> None:
    _check(x, weight)
    if dy.dtype != torch.float32:
        raise TypeError(f"dy must be float32, not {dy.dtype}")
    if dy.shape != (len(x), len(weight)):
        raise ValueError(f"dy must be {(len(x), len(weight))}, not {tuple(dy.shape)}")
    check_device("x", x, "dy", dy)
