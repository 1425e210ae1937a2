"""Which kernels make a product on a GPU: Hopper's own where they take the operands, Triton's elsewhere.

`octile doctor` shows the choice, and `octile.kernels.cuda.products.serves` says the reason.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octile.kernels.cuda import products

Block = Sequence[int]


def matmul(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    accumulate: bool,
) -> None:
    """a[M, K] · b[N, K]ᵀ into out [M, N], or added to it in FP32. Any sizes and strides."""
    if products.serves(a, a_block, b, b_block) is None:
        return products.matmul(out, a, a_scale, a_block, b, b_scale, b_block, accumulate)
    from octile.kernels.triton import matmul  # late: a machine without a GPU has no Triton

    matmul.launch(out, a, a_scale, a_block, b, b_scale, b_block, accumulate)


def grouped(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    offs: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of group g of a[T, K] times b[g]ᵀ of b[G, N, K] → [T, N]; rows past offs[-1] are zero, or stay as out's."""
    arguments = (a, a_scale, a_block, b, b_scale, b_block, offs, out_dtype, out)
    if products.serves(a, a_block, b, b_block, b.shape[0]) is None:
        return products.grouped(*arguments)
    from octile.kernels.triton import grouped

    return grouped.launch(*arguments)


def masked(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    counts: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """a[g] · b[g]ᵀ for the first counts[g] rows: a[G, M, K], b[G, N, K] → [G, M, N]; other rows hold anything."""
    arguments = (a, a_scale, a_block, b, b_scale, b_block, counts, out_dtype, out)
    if products.serves(a, a_block, b, b_block, b.shape[0]) is None:
        return products.masked(*arguments)
    from octile.kernels.triton import grouped

    return grouped.launch_masked(*arguments)


def wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Block,
    x: Tensor,
    x_scale: Tensor,
    x_block: Block,
    offs: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """dy[rows of g]ᵀ · x[rows of g] of dy[T, N] and x[T, K] → [G, N, K]; a group without rows gives zeros."""
    arguments = (dy, dy_scale, dy_block, x, x_scale, x_block, offs, out_dtype, out, accumulate)
    if products.serves_wgrad(dy, dy_block, x, x_block, offs.shape[0]) is None:
        return products.wgrad(*arguments)
    from octile.kernels.triton import grouped

    return grouped.launch_wgrad(*arguments)
