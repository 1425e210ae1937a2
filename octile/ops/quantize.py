"""Block quantisation: x ≈ data · scale, one scale a block.

Values that lie close together are of similar size, so a format with few exponent bits covers a small block:

    amax = max |x| over the block        scale = amax / max(format)        data = round(x / scale)

A 1×128 block is a tile of one token's activations, 128×128 a piece of a weight, 128×1 a tile along the tokens for the
weight gradient.  Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.

Shapes: [..., M, K]; with blocks of R×C the scale is [..., ⌈M/R⌉, ⌈K/C⌉].  Blocks at the edge are smaller.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from octile import formats
from octile.kernels import backends, cpu
from octile.kernels.memory_layout import new_scale
from octile.ops.operator import operator

SMALLEST_SCALE = 2.0**-126  # the smallest normal FP32: x / scale stays exact for it
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DATA_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e5m6": torch.uint8, "int8": torch.int8}


@operator()
def quantize(x: Tensor, block_rows: int, block_cols: int, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantises matrices, one FP32 scale a block. This form is the specification.

    Args:
        x: [..., M, K], float32, bfloat16 or float16, any M and K.
        block_rows, block_cols: extent R×C of a block, each at least 1.
        fmt: name of the format: "e4m3", "e5m2", "int8", or "e5m6" (K even: two values in three bytes).
        power_of_2: round each scale up to a power of two, so that requantising only shifts.

    Returns:
        data [..., M, K] in the format's dtype (e5m6: uint8 [..., M, 3K/2]) and scale [..., ⌈M/R⌉, ⌈K/C⌉] float32,
        with x ≈ data · scale. A block of zeros has scale 1. A NaN or an Inf makes its whole block NaN: it is never
        hidden. The scales of 1×C tiles are stored column by column, padded to 16 bytes, as products read them.

    Raises:
        TypeError: x is of another dtype.
        ValueError: x is no matrix, a block extent is below 1, or the format is unknown or does not fit K.
    """
    _check(x, block_rows, block_cols, fmt)
    return _quantize(x, block_rows, block_cols, fmt, power_of_2)


def _quantize(x: Tensor, block_rows: int, block_cols: int, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor]:
    blocks = split_into_blocks(x.float(), block_rows, block_cols)
    amax = blocks.abs().amax(dim=(-3, -1))
    scale = (amax / formats.by_name[fmt].max).clamp_(min=SMALLEST_SCALE)  # clamp keeps NaN
    if power_of_2:
        scale = round_up_to_power_of_2(scale)
    scale = torch.where(amax == 0, 1.0, scale)
    data = _cast(blocks / scale[..., :, None, :, None], x.shape, fmt)
    return data, new_scale(x, block_rows, block_cols).copy_(scale)


@quantize.register_fake
def _(x, block_rows, block_cols, fmt, power_of_2):
    return _empty_data(x, fmt), new_scale(x, block_rows, block_cols)


@quantize.register_kernel("cuda")
def _(x, block_rows, block_cols, fmt, power_of_2):
    _check(x, block_rows, block_cols, fmt)
    return backends.run("quantize", x, block_rows, block_cols, DATA_DTYPES[fmt], power_of_2)


@operator()
def quantize_with_scale(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Quantises with one scale that is already known; what is too large saturates, Inf too, and NaN stays NaN.

    Args:
        x: [..., M, K], float32, bfloat16 or float16.
        scale: [1] float32, on x's device.
        fmt: "e4m3" or "e5m2" (INT8 has no NaN to show, so it is refused).

    Returns:
        data [..., M, K] in the format's dtype.

    Raises:
        TypeError, ValueError: x, scale or fmt is none of these.
    """
    _check_with_scale(x, scale, fmt)
    return _cast(split_into_blocks(x.float() / scale, 1, 1), x.shape, fmt)


@quantize_with_scale.register_fake
def _(x, scale, fmt):
    return _empty_data(x, fmt)


@quantize_with_scale.register_kernel("cuda")
def _(x, scale, fmt):
    _check_with_scale(x, scale, fmt)
    return backends.run("quantize_with_scale", x, scale, DATA_DTYPES[fmt])


@operator()
def dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    """The values data · scale, [..., M, K] in out_dtype; the inverse of `quantize` up to rounding.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K], or uint8 [..., M, 3K/2]: E5M6.
        scale: [..., ⌈M/R⌉, ⌈K/C⌉] float32.
        block_rows, block_cols: extent R×C of a block.

        out_dtype: float32, bfloat16 or float16.

    Raises:
        TypeError: data, scale or out_dtype is none of these dtypes.
        ValueError: the scale does not fit the data in such blocks.
    """
    _check_dequantize(data, scale, block_rows, block_cols, out_dtype)
    return _dequantize(data, scale, block_rows, block_cols, out_dtype)


def _dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    values = split_into_blocks(decode(data), block_rows, block_cols)
    values *= scale[..., :, None, :, None]
    m, k = data.shape[-2], columns(data)
    return _out_of_blocks(values, m, k).to(out_dtype)


@dequantize.register_fake
def _(data, scale, block_rows, block_cols, out_dtype):
    return data.new_empty(*data.shape[:-1], columns(data), dtype=out_dtype)


@dequantize.register_kernel("cuda")
def _(data, scale, block_rows, block_cols, out_dtype):
    _check_dequantize(data, scale, block_rows, block_cols, out_dtype)
    return backends.run("dequantize", data, scale, block_rows, block_cols, out_dtype)


def decode(data: Tensor) -> Tensor:
    """The 8- or 12-bit numbers as float32, without their scale; always a new tensor."""
    if data.dtype == torch.uint8 and data.device.type == "cpu":
        return cpu.decode_e5m6(data)
    if data.dtype == torch.uint8:
        return formats.E5M6.decode(formats.unpack12(data, columns(data)))
    if data.dtype == torch.float8_e4m3fn and data.device.type == "cpu":
        return cpu.decode_e4m3(data)
    return data.to(torch.float32)


def columns(data: Tensor) -> int:
    """K, the number of values in a row of data."""
    return _values(data.shape, data.dtype)[-1]


def _values(shape: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of what data of this shape holds."""
    return (*shape[:-1], shape[-1] // 3 * 2) if dtype == torch.uint8 else shape


def _check(x: Tensor, block_rows: int, block_cols: int, fmt: str) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix [..., M, K], not {tuple(x.shape)}")
    if min(block_rows, block_cols) < 1:
        raise ValueError(f"block must be at least 1×1, not {block_rows}×{block_cols}")
    if fmt not in DATA_DTYPES:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2', 'e5m6' or 'int8', not {fmt!r}")
    if fmt == "e5m6" and x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns to be packed as E5M6, not {x.shape[-1]}")


def _check_with_scale(x: Tensor, scale: Tensor, fmt: str) -> None:
    _check(x, 1, 1, fmt)
    if fmt not in ("e4m3", "e5m2"):
        raise ValueError(f"fmt must be 'e4m3' or 'e5m2' where the scale is given, not {fmt!r}")
    if scale.dtype != torch.float32 or scale.shape != (1,):
        raise ValueError(f"scale must be float32 [1], not {scale.dtype} {list(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"x lies on {x.device} but its scale on {scale.device}")


def _check_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> None:
    if data.dtype not in DATA_DTYPES.values():
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2, int8 or uint8 (E5M6), not {data.dtype}")
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")
    if data.dim() < 2:
        raise ValueError(f"data must be a matrix [..., M, K], not {tuple(data.shape)}")
    check_scale("data", data, scale, block_rows, block_cols)


def check_scale(name: str, data: Tensor, scale: Tensor, block_rows: int, block_cols: int) -> None:
    """Refuses a scale that does not fit the data [..., M, K] in such blocks."""
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}'s scale must be float32, not {scale.dtype}")
    _check_scale_shape(name, data.shape, data.dtype, scale.shape, block_rows, block_cols)
    if scale.device != data.device:
        raise ValueError(f"{name} lies on {data.device} but its scale on {scale.device}")


@functools.lru_cache(4096)  # in front of every product, whose shapes come again and again
def _check_scale_shape(
    name: str, data: torch.Size, dtype: torch.dtype, scale: torch.Size, rows: int, cols: int
) -> None:
    if min(rows, cols) < 1:
        raise ValueError(f"{name}'s block must be at least 1×1, not {rows}×{cols}")
    *batch, m, k = shape = tuple(_values(data, dtype))
    fitting = (*batch, -(-m // rows), -(-k // cols))
    if scale != fitting:
        raise ValueError(f"{name}'s scale must be {fitting} for {shape} in blocks of {rows}×{cols}, not {tuple(scale)}")


def split_into_blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """[..., M, K] as [..., ⌈M/R⌉, R, ⌈K/C⌉, C], padded with zeros; a view where it can be."""
    *batch, m, k = x.shape
    if m % rows or k % cols:
        x = F.pad(x, (0, -k % cols, 0, -m % rows))
    return x.reshape(*batch, -(-m // rows), rows, -(-k // cols), cols)


def _out_of_blocks(blocks: Tensor, m: int, k: int) -> Tensor:
    return blocks.flatten(-2).flatten(-3, -2)[..., :m, :k].contiguous()


def _cast(blocks: Tensor, shape: torch.Size, fmt: str) -> Tensor:
    """Rounds scaled blocks to the format. Clamped first: not every cast to an 8-bit format saturates."""
    form = formats.by_name[fmt]
    scaled = _out_of_blocks(blocks.clamp_(-form.max, form.max), *shape[-2:])
    if fmt == "e5m6" and scaled.device.type == "cpu":
        return cpu.encode_e5m6(scaled)
    if fmt == "e5m6":
        return formats.pack12(formats.E5M6.encode(scaled))
    if fmt == "int8":
        return scaled.round_().nan_to_num_(0.0).to(torch.int8)  # the block's scale is NaN and says it
    return scaled.to(DATA_DTYPES[fmt])


def _empty_data(x: Tensor, fmt: str) -> Tensor:
    *batch, m, k = x.shape
    return x.new_empty(*batch, m, k // 2 * 3 if fmt == "e5m6" else k, dtype=DATA_DTYPES[fmt])


def round_up_to_power_of_2(x: Tensor) -> Tensor:
    """The normal power of two at or above each number, float32, not negative. NaN and Inf stay.

    Adding an all-ones mantissa carries into the exponent unless x is a power of two already.
    """
    rounded = ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)
