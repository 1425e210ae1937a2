"""The three products of a layer on operands that are cast already, dense or of all experts at once.

Shapes: T tokens, K inputs, N outputs, G experts; offs int32 [G] is the end of each expert's rows, None: a dense layer.
"""

import torch
from torch import Tensor

from octile.scaled import ScaledTensor, grouped_matmul_nt, grouped_wgrad, matmul_nt


def nt(a: ScaledTensor, b: ScaledTensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a[T, K] · bᵀ, b[N, K] or [G, N, K], in dtype."""
    product_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # FP16 could overflow on the way
    y = matmul_nt(a, b, product_dtype) if offs is None else grouped_matmul_nt(a, b, offs, product_dtype)
    # to its own dtype it would be a second result to the compiler of torch 2.11, which then loses its gradient
    return y if y.dtype == dtype else y.to(dtype)


def nt_sum(pairs: list[tuple[ScaledTensor, ScaledTensor]], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ a · bᵀ in dtype: what layers that read one input give back to it. Experts have one pair."""
    (a, b), *more = pairs
    total = nt(a, b, offs, dtype if dtype == torch.bfloat16 else torch.float32)
    for a, b in more:
        matmul_nt(a, b, out=total, accumulate=True)
    return total.to(dtype)


def wgrad(
    dy: ScaledTensor, x: ScaledTensor, offs: Tensor | None, dtype: torch.dtype, main_grad: Tensor | None
) -> Tensor | None:
    """The weight's gradient, summed in FP32, in dtype, or None where it was added to main_grad.

    Args:
        dy [T, N], x [T, K]: cast along the tokens.
        main_grad: float32 of the weight's shape, or None.
    """
    if main_grad is None or not (offs is None or main_grad.is_contiguous()):
        # FP16 could overflow before it is unscaled; of BF16 the product's own store rounds the sum once
        sum_dtype = torch.bfloat16 if main_grad is None and dtype == torch.bfloat16 else torch.float32
        dw = matmul_nt(dy.mT, x.mT, sum_dtype) if offs is None else grouped_wgrad(dy, x, offs, sum_dtype)
        return into_main_grad(dw, dtype, main_grad)
    if offs is None:
        matmul_nt(dy.mT, x.mT, out=main_grad, accumulate=True)
    else:
        grouped_wgrad(dy, x, offs, out=main_grad, accumulate=True)
    return None


def into_main_grad(dw: Tensor, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """dw in dtype, or None where it was added to main_grad."""
    if main_grad is None:
        return dw.to(dtype)
    main_grad.add_(dw)
    return None
