"""Backends of the operators on a GPU: Hopper's own kernels where they take the operands, Triton's elsewhere.

`octile doctor` prints the choice; `octile.kernels.cuda.gemm.request.why_unsupported` and
`octile.kernels.cuda.quantize.launcher.why_unsupported` give the reason.

Each GEMM takes the check of its arguments. It is called with a … out, unless a GEMM of the same launch key was launched
before: all that it reads is part of that key (`octile.kernels.cuda.gemm.launch_cache`). Arguments of quantizations are
checked already, and are those of the operators of the same names, with dtypes in the place of formats.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.kernels.cuda.gemm import launch_cache, request
from octile.kernels.cuda.quantize import launcher

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
    if request.why_unsupported(a, a_block, b, b_block) is None:
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
    if request.why_unsupported(a, a_block, b, b_block, b.shape[0]) is None:
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
    if request.why_unsupported(a, a_block, b, b_block, b.shape[0]) is None:
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
    if request.why_unsupported_wgrad(dy, dy_block, x, x_block, offs.shape[0]) is None:
        return request.wgrad(*arguments, accumulate, look=look)
    from octile.kernels.triton import grouped

    return grouped.launch_wgrad(*arguments, accumulate)


def quantize(
    x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor]:
    known = (TILE,) if dtype == torch.uint8 else (TILE, COLUMN_TILE, BLOCK)
    if (block_rows, block_cols) in known and not launcher.why_unsupported(x, out=dtype):
        return launcher.quantize(x, block_rows, block_cols, dtype, power_of_2)
    from octile.kernels.triton import quantize  # late, here and below: a machine without a GPU has no Triton

    return quantize.launch(x, block_rows, block_cols, dtype, power_of_2)


def quantize_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not launcher.why_unsupported(x):
        return launcher.quantize_with_scale(x, scale, dtype)
    from octile.kernels.triton import quantize

    return quantize.launch_with_scale(x, scale, dtype)


def dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    k = launcher.columns(data)
    known = (block_rows, block_cols) in (TILE, COLUMN_TILE, BLOCK) or (block_rows >= data.shape[-2] and block_cols >= k)
    if (
        known
        and data.is_contiguous()
        and launcher.reads_scale(scale, block_cols)
        and not launcher.why_unsupported(data)
    ):
        return launcher.dequantize(data, scale, block_rows, block_cols, out_dtype)
    from octile.kernels.triton import quantize

    return quantize.launch_dequantize(data, scale, block_rows, block_cols, out_dtype)


def quantize_rows_and_columns(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launcher.why_unsupported(x):
        return launcher.rows_and_columns(x, dtype, power_of_2)
    from octile.kernels.triton import transpose

    return transpose.launch_rows_and_columns(x, dtype, power_of_2)


def requantize_transposed(
    data: Tensor, scale: Tensor, dtype: torch.dtype, power_of_2: bool, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    if (
        launcher.reads_tile_scales(scale)
        and (rows is None or rows.is_contiguous())
        and not launcher.why_unsupported(data)
    ):
        return launcher.requantize(data, scale, dtype, power_of_2, rows)
    from octile.kernels.triton import transpose

    return transpose.launch_requantize(data, scale, dtype, power_of_2, rows)


def quantize_and_transpose(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not launcher.why_unsupported(x):
        return launcher.quantize_and_transpose(x, dtype, power_of_2)
    from octile.kernels.triton import transpose

    return transpose.launch_block(x, dtype, power_of_2)


def swiglu_quantize(
    gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not launcher.why_unsupported(gate, up):
        return launcher.swiglu(gate, up, dtype, power_of_2, weight)[:2]
    from octile.kernels.triton import swiglu

    return swiglu.launch(gate, up, dtype, power_of_2, weight)


def swiglu_quantize_and_save(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    saved_dtype: torch.dtype,
    saved_power_of_2: bool,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launcher.why_unsupported(gate, up):
        return launcher.swiglu(gate, up, dtype, power_of_2, weight, saved_dtype, saved_power_of_2)
    from octile.kernels.triton import swiglu

    return swiglu.launch_and_save(gate, up, dtype, power_of_2, saved_dtype, saved_power_of_2, weight)


def swiglu_backward_quantize(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    power_of_2: bool,
    h_dtype: torch.dtype,
    h_power_of_2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (dh, gate, up, gate_scale, up_scale, weight, dtype, power_of_2, h_dtype, h_power_of_2)
    if not launcher.why_unsupported(dh, gate, up):
        return launcher.swiglu_backward(*arguments)
    from octile.kernels.triton import swiglu

    return swiglu.launch_backward(*arguments)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, power_of_2: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.shape[1] <= launcher.MAX_COLUMNS and launcher.is_vector(weight) and not launcher.why_unsupported(x):
        return launcher.rms_norm(x, weight, eps, dtype, power_of_2, values)
    from octile.kernels.triton import norm

    return norm.launch(x, weight, eps, dtype, power_of_2, values)
