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

from octile.kernels.storage import new_scale, new_transposed
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, check_scale, dequantize, quantize

FORMATS = ("e4m3", "e5m2", "int8")
TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)


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
    data, data_t = x.new_empty(x.shape, dtype=dtype), new_transposed(x, dtype)
    return data, new_scale(x, *TILE), data_t, new_scale(x, *COLUMN_TILE).mT


@quantize_rows_and_columns.register_kernel("cuda")
def _(x, fmt, power_of_2):
    from octile.kernels.triton import transpose  # late: a machine without a GPU has no Triton

    _check(x, fmt)
    return transpose.launch_rows_and_columns(x, DATA_DTYPES[fmt], power_of_2)


@operator()
def requantize_transposed(data: Tensor, scale: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Turns a matrix in 1×128 tiles into its transpose in 1×128 tiles: the values, in FP32, are quantised again.

    Where both quantisations have power-of-two scales the values are only shifted: bits are lost only where a value
    falls below the normal range of its new tile.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K].
        scale: float32 [..., M, ⌈K/128⌉].
        power_of_2: round each new scale up to a power of two.

    Returns:
        data_t [..., K, M] in data's dtype and scale_t [..., K, ⌈M/128⌉]: bit for bit the transposes of
        `quantize(dequantize(data, scale, 1, 128, torch.float32), 128, 1, …)`.

    Raises:
        TypeError: data or scale is of another dtype.
        ValueError: data is no matrix, or the scale does not fit it.
    """
    _check_tiles(data, scale)
    values = dequantize(data, scale, *TILE, torch.float32)
    turned, scale_t = quantize(values, *COLUMN_TILE, _format(data), power_of_2)
    return new_transposed(data, data.dtype).copy_(turned.mT), scale_t.mT


@requantize_transposed.register_fake
def _(data, scale, power_of_2):
    return new_transposed(data, data.dtype), new_scale(data, *COLUMN_TILE).mT


@requantize_transposed.register_kernel("cuda")
def _(data, scale, power_of_2):
    from octile.kernels.triton import transpose

    _check_tiles(data, scale)
    return transpose.launch_requantize(data, scale, power_of_2)


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
    from octile.kernels.triton import transpose

    _check(x, fmt)
    return transpose.launch_block(x, DATA_DTYPES[fmt], power_of_2)


def _check(x: Tensor, fmt: str) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix [..., M, K], not {tuple(x.shape)}")
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8' where the result is turned, not {fmt!r}")


def _check_tiles(data: Tensor, scale: Tensor) -> None:
    if data.dtype not in map(DATA_DTYPES.get, FORMATS):
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2 or int8, not {data.dtype}")
    if data.dim() < 2:
        raise ValueError(f"data must be a matrix [..., M, K], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)


def _format(data: Tensor) -> str:
    return next(fmt for fmt in FORMATS if DATA_DTYPES[fmt] == data.dtype)
