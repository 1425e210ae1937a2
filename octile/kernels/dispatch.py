"""Which kernels make a product on a GPU: Hopper's own where they take the operands, Triton's elsewhere.

`octile doctor` shows the choice, and `octile.kernels.cuda.gemm.request.serves` says the reason.

Each function takes the check of its arguments. It is called with a … out, unless a product that looks the same was
launched before: all that it reads is part of that look (`octile.kernels.cuda.gemm.launch_cache`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import launch_cache, request

Block = Sequence[int]
Check = Callable[..., None]


def matmul(
    check: Check,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """a[M, K] · b[N, K]ᵀ → [M, N], or into out, which is returned, or added to it in FP32. Any sizes and strides."""
    look = launch_cache.look(("dense", accumulate), a, a_scale, a_block, b, b_scale, b_block, None, out_dtype, out)
    if (made := launch_cache.launched(look, a, out_dtype, out)) is not None:
        return made
    check(a, a_scale, a_block, b, b_scale, b_block, out_dtype, out)
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype) if out is None else out
    arguments = (out, a, a_scale, a_block, b, b_scale, b_block, accumulate)
    if request.serves(a, a_block, b, b_block) is None:
        request.matmul(*arguments, look=look)
        return out
    from octile.kernels.triton import matmul  # late: a machine without a GPU has no Triton

    matmul.launch(*arguments)
    return out


def grouped(
    check: Check,
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
    look = launch_cache.look("grouped", *arguments)
    if (made := launch_cache.launched(look, a, out_dtype, out)) is not None:
        return made
    check(*arguments)
    if request.serves(a, a_block, b, b_block, b.shape[0]) is None:
        return request.grouped(*arguments, look=look)
    from octile.kernels.triton import grouped

    return grouped.launch(*arguments)


def masked(
    check: Check,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    counts: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    expected_rows: int = 0,
) -> Tensor:
    """a[g] · b[g]ᵀ for the first counts[g] rows: a[G, M, K], b[G, N, K] → [G, M, N]; other rows hold anything.

    expected_rows of a group help to choose a kernel; 0: not known.
    """
    arguments = (a, a_scale, a_block, b, b_scale, b_block, counts, out_dtype, out)
    look = launch_cache.look(("masked", expected_rows), *arguments)
    if (made := launch_cache.launched(look, a, out_dtype, out)) is not None:
        return made
    check(*arguments)
    if request.serves(a, a_block, b, b_block, b.shape[0]) is None:
        return request.masked(*arguments, expected_rows, look=look)
    from octile.kernels.triton import grouped

    return grouped.launch_masked(*arguments)


def wgrad(
    check: Check,
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
    """dy[rows of g]ᵀ · x[rows of g] of dy[T, N] and x[T, K] → [G, N, K]; a group without rows gives zeros.

    With accumulate it is added to out in FP32.
    """
    arguments = (dy, dy_scale, dy_block, x, x_scale, x_block, offs, out_dtype, out)
    look = launch_cache.look(("wgrad", accumulate), *arguments)
    if (made := launch_cache.launched(look, dy, out_dtype, out)) is not None:
        return made
    check(*arguments)
    if request.serves_wgrad(dy, dy_block, x, x_block, offs.shape[0]) is None:
        return request.wgrad(*arguments, accumulate, look=look)
    from octile.kernels.triton import grouped

    return grouped.launch_wgrad(*arguments, accumulate)
