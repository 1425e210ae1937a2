"""Casts that also turn the matrix, in one read of it.

Hopper's FP8 tensor cores want both operands contiguous along the summed side. A training step sums over both sides of
each matrix: y = x · wᵀ and dw = dyᵀ · x read x along its channels and along its tokens, w is read along K and, for
dx = dy · w, along N. So what is cast once along its rows is wanted along its columns as well, and the cast that has
the numbers in registers anyway writes both.

    quantize_rows_and_columns   an output's gradient: 1×128 for dgrad, turned 1×128 for wgrad
    requantize_transposed       a layer's input, kept in FP8 for the backward pass: 1×128 → turned 1×128
    quantize_and_transpose      a weight: 128×128, and the same numbers turned

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2 and §3.5.2, which asks for such a transposition in hardware.
Shapes: [..., M, K] → [..., K, M]. A turned matrix has rows of M bytes, padded in memory to a multiple of 16.
"""

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.kernels import backends
from octile.kernels.memory_layout import new_quantized_transposed, new_scale, new_transposed
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, check_scale, columns, dequantize, quantize

FORMATS = ("e4m3", "e5m2", "int8")


@operator()
def quantize_rows_and_columns(x: Tensor, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantises in 1×128 tiles, and in 128×1 tiles whose result is turned: each with scales of its own.

    Args:
        x: [..., M, K], float32, bfloat16 or float16, any M and K.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: round each scale up to a power of two.

    Returns:
        data [..., M, K] and scale [..., M, ⌈K/128⌉], bit for bit `quantize(x, 1, 128, …)`; data_t [..., K, M] and
        scale_t [..., K, ⌈M/128⌉], bit for bit the transposes of `quantize(x, 128, 1, …)`.

    Raises:
        TypeError: x is of another dtype.
        ValueError: x is no matrix, or fmt none of these.
    """
    _check(x, fmt)
    data, scale = quantize(x, *TILE, fmt, power_of_2)
    turned, scale_t = quantize(x, *COLUMN_TILE, fmt, power_of_2)
    return data, scale, new_transposed(x, data.dtype).copy_(turned.mT), scale_t.mT


@quantize_rows_and_columns.register_fake
def _(x, fmt, power_of_2):
    dtype = DATA_DTYPES[fmt]
    return x.new_empty(x.shape, dtype=dtype), new_scale(x, *TILE), *new_quantized_transposed(x, dtype)


@quantize_rows_and_columns.register_kernel("cuda")
def _(x, fmt, power_of_2):
    _check(x, fmt)
    return backends.run("quantize_rows_and_columns", x, DATA_DTYPES[fmt], power_of_2)


@operator()
def requantize_transposed(
    data: Tensor, scale: Tensor, power_of_2: bool, fmt: str | None = None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Turns a matrix in 1×128 tiles into its transpose in 1×128 tiles: the values, in FP32, are quantised again.

    Where both quantisations have power-of-two scales the values are only shifted: bits are lost only where a value
    falls below the normal range of its new tile, or where the new format has fewer of them.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K], or uint8 [..., M, 3K/2]: E5M6.
        scale: float32 [..., M, ⌈K/128⌉].
        power_of_2: round each new scale up to a power of two.
        fmt: "e4m3", "e5m2" or "int8"; data's own if not given.
        rows: int32 [R], of a matrix [M, K]: which rows, in which order; all of them if not given.

    Returns:
        data_t [..., K, M] in the format's dtype and scale_t [..., K, ⌈M/128⌉]: bit for bit the transposes of
        `quantize(dequantize(data, scale, 1, 128, torch.float32)[rows], 128, 1, …)`. With rows, R takes M's place.

    Raises:
        TypeError: data, scale or rows is of another dtype.
        ValueError: data is no matrix, the scale or rows does not fit it, or fmt is none of these.
    """
    _check_tiles(data, scale, fmt, rows)
    values = dequantize(data, scale, *TILE, torch.float32)
    values = values if rows is None else values.index_select(0, rows)
    turned, scale_t = quantize(values, *COLUMN_TILE, fmt or _format(data), power_of_2)
    return new_transposed(values, turned.dtype).copy_(turned.mT), scale_t.mT


@requantize_transposed.register_fake
def _(data, scale, power_of_2, fmt=None, rows=None):
    *batch, m, _ = data.shape
    like = data.new_empty(*batch, m if rows is None else rows.shape[0], columns(data), dtype=torch.uint8)
    return new_quantized_transposed(like, DATA_DTYPES[fmt or _format(data)])


@requantize_transposed.register_kernel("cuda")
def _(data, scale, power_of_2, fmt=None, rows=None):
    _check_tiles(data, scale, fmt, rows)
    return backends.run("requantize_transposed", data, scale, DATA_DTYPES[fmt or _format(data)], power_of_2, rows)


@operator()
def quantize_and_transpose(x: Tensor, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises in 128×128 blocks and also gives the same numbers turned; the turned scale is `scale.mT`.

    Args, Raises: as `quantize_rows_and_columns`.

    Returns:
        data [..., M, K] and scale [..., ⌈M/128⌉, ⌈K/128⌉], bit for bit `quantize(x, 128, 128, …)`, and
        data_t [..., K, M], the transpose of data.
    """
    _check(x, fmt)
    data, scale = quantize(x, *BLOCK, fmt, power_of_2)
    return data, scale, new_transposed(x, data.dtype).copy_(data.mT)


@quantize_and_transpose.register_fake
def _(x, fmt, power_of_2):
    dtype = DATA_DTYPES[fmt]
    return x.new_empty(x.shape, dtype=dtype), new_scale(x, *BLOCK), new_transposed(x, dtype)


@quantize_and_transpose.register_kernel("cuda")
def _(x, fmt, power_of_2):
    _check(x, fmt)
    return backends.run("quantize_and_transpose", x, DATA_DTYPES[fmt], power_of_2)


def _check(x: Tensor, fmt: str) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix [..., M, K], not {tuple(x.shape)}")
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8' where the result is turned, not {fmt!r}")


def _check_tiles(data: Tensor, scale: Tensor, fmt: str | None, rows: Tensor | None) -> None:
    if data.dtype not in DATA_DTYPES.values():
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2, int8 or uint8 (E5M6), not {data.dtype}")
    if data.dim() < 2:
        raise ValueError(f"data must be a matrix [..., M, K], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)
    if (fmt or _format(data)) not in FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8' where the result is turned, not {fmt!r}")
    if rows is None:
        return
    if rows.dtype != torch.int32:
        raise TypeError(f"rows must be int32, not {rows.dtype}")
    if rows.dim() != 1 or data.dim() != 2:
        raise ValueError(f"rows must be [R] for a matrix [M, K], not {tuple(rows.shape)} for {tuple(data.shape)}")
    if rows.device != data.device:
        raise ValueError(f"data lies on {data.device} but rows on {rows.device}")


def _format(data: Tensor) -> str:
    return next(fmt for fmt, dtype in DATA_DTYPES.items() if dtype == data.dtype)
