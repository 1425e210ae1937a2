"""Block quantization: x ≈ data · scale, with one scale per block.

The values of a small block have similar magnitudes, so a format with few exponent bits covers them:

    amax = max |x| over the block        scale = amax / max(format)        data = round(x / scale)

    1×128    tile of one token and 128 channels: activations and gradients, for fprop and dgrad
    128×1    tile of 128 tokens and one channel: activations and gradients, for wgrad
    128×128  block of a weight

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.

Shapes: x [..., M, K]; with blocks of R×C the scale is [..., ⌈M/R⌉, ⌈K/C⌉]. Blocks at the edge are smaller.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octile import formats
from octile.formats import STORAGE_DTYPES
from octile.kernels import backends, cpu
from octile.kernels.memory_layout import new_scale
from octile.ops.operator import operator

SMALLEST_SCALE = 2.0**-126  # the smallest normal FP32 number: for it, x / scale is exact
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@operator()
def quantize(x: Tensor, block_rows: int, block_cols: int, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize matrices with one FP32 scale per block.

    Args:
        x: [..., M, K], float32, bfloat16 or float16, any M and K.
        block_rows, block_cols: extent R×C of a block, each at least 1.
        fmt: name of the format: "e4m3", "e5m2", "int8" or "e5m6"; "e5m6" needs an even K (two values in three bytes).
        power_of_2: whether to round each scale up to a power of two, so that requantizing only shifts.

    Returns:
        data [..., M, K] in the format's dtype (e5m6: uint8 [..., M, 3K/2]) and scale [..., ⌈M/R⌉, ⌈K/C⌉] float32,
        with x ≈ data · scale. The scale of a block of zeros is 1. A NaN or an Inf makes its whole block NaN. The
        scales of 1×C tiles are contiguous along M and padded to 16 bytes, as GEMMs read them.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has fewer than two dimensions, a block extent is below 1, fmt is unknown, or K is odd for "e5m6".
    """
    _check(x, block_rows, block_cols, fmt)
    return quantize_rounding_scales(x, block_rows, block_cols, fmt, round_up_to_power_of_2 if power_of_2 else None)


def quantize_rounding_scales(
    x: Tensor, block_rows: int, block_cols: int, fmt: str, round_up: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize` does, with scales that are rounded by a function; None: they are not rounded."""
    blocks = split_into_blocks(x.float(), block_rows, block_cols)
    amax = blocks.abs().amax(dim=(-3, -1))
    scale = (amax / formats.by_name[fmt].max).clamp_(min=SMALLEST_SCALE)  # clamp keeps NaN
    if round_up is not None:
        scale = round_up(scale)
    scale = torch.where(amax == 0, 1.0, scale)
    data = _round(blocks / scale[..., :, None, :, None], x.shape, fmt)
    return data, new_scale(x, block_rows, block_cols).copy_(scale)


@quantize.register_fake
def _(x, block_rows, block_cols, fmt, power_of_2):
    return _empty_data(x, fmt), new_scale(x, block_rows, block_cols)


@quantize.register_kernel("cpu")
def _(x, block_rows, block_cols, fmt, power_of_2):
    if not cpu.can_quantize(fmt):
        return quantize.reference(x, block_rows, block_cols, fmt, power_of_2)
    _check(x, block_rows, block_cols, fmt)
    return cpu.quantize(x, block_rows, block_cols, power_of_2)


@quantize.register_kernel("cuda")
def _(x, block_rows, block_cols, fmt, power_of_2):
    _check(x, block_rows, block_cols, fmt)
    return backends.run("quantize", x, block_rows, block_cols, STORAGE_DTYPES[fmt], power_of_2)


@operator()
def quantize_with_scale(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Quantize matrices with one given scale. Values that are too large saturate, Inf too; NaN stays NaN.

    Args:
        x: [..., M, K], float32, bfloat16 or float16.
        scale: [1] float32, on x's device.
        fmt: "e4m3" or "e5m2"; "int8" is refused, since it has no NaN.

    Returns:
        data [..., M, K] in the format's dtype.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has fewer than two dimensions, or scale or fmt is another one.
    """
    _check_with_scale(x, scale, fmt)
    return _round(split_into_blocks(x.float() / scale, 1, 1), x.shape, fmt)


@quantize_with_scale.register_fake
def _(x, scale, fmt):
    return _empty_data(x, fmt)


@quantize_with_scale.register_kernel("cuda")
def _(x, scale, fmt):
    _check_with_scale(x, scale, fmt)
    return backends.run("quantize_with_scale", x, scale, STORAGE_DTYPES[fmt])


@operator()
def dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    """Dequantize matrices: data · scale, the inverse of `quantize` up to rounding.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K], or uint8 [..., M, 3K/2] for E5M6.
        scale: [..., ⌈M/R⌉, ⌈K/C⌉] float32.
        block_rows, block_cols: extent R×C of a block.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        values [..., M, K] in out_dtype.

    Raises:
        TypeError: data or scale has another dtype, or out_dtype is another one.
        ValueError: data has fewer than two dimensions, or scale does not fit data in blocks of R×C.
    """
    _check_dequantize(data, scale, block_rows, block_cols, out_dtype)
    return _dequantize(data, scale, block_rows, block_cols, out_dtype)


def _dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    values = split_into_blocks(decode(data), block_rows, block_cols)
    values *= scale[..., :, None, :, None]
    m, k = data.shape[-2], columns(data)
    return _merge_blocks(values, m, k).to(out_dtype)


@dequantize.register_fake
def _(data, scale, block_rows, block_cols, out_dtype):
    return data.new_empty(*data.shape[:-1], columns(data), dtype=out_dtype)


@dequantize.register_kernel("cpu")
def _(data, scale, block_rows, block_cols, out_dtype):
    if not cpu.can_quantize("e4m3", data):
        return dequantize.reference(data, scale, block_rows, block_cols, out_dtype)
    _check_dequantize(data, scale, block_rows, block_cols, out_dtype)
    return cpu.dequantize(data, scale, block_rows, block_cols).to(out_dtype)


@dequantize.register_kernel("cuda")
def _(data, scale, block_rows, block_cols, out_dtype):
    _check_dequantize(data, scale, block_rows, block_cols, out_dtype)
    return backends.run("dequantize", data, scale, block_rows, block_cols, out_dtype)


def decode(data: Tensor) -> Tensor:
    """Convert encoded values to float32, without their scale; always returns a new tensor.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K], or uint8 [..., M, 3K/2] for E5M6.

    Returns:
        [..., M, K] float32.
    """
    if data.dtype == torch.uint8 and data.device.type == "cpu":
        return cpu.decode_e5m6(data)
    if data.dtype == torch.uint8:
        return formats.E5M6.decode(formats.unpack12(data, columns(data)))
    if data.dtype == torch.float8_e4m3fn and data.device.type == "cpu":
        return cpu.decode_e4m3(data)
    return data.to(torch.float32)


def columns(data: Tensor) -> int:
    """K, the number of values in a row of data: its last extent, or for E5M6 (uint8) two thirds of it."""
    return _logical_shape(data.shape, data.dtype)[-1]


def _logical_shape(shape: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the values that data of this shape and dtype stores."""
    return (*shape[:-1], shape[-1] // 3 * 2) if dtype == torch.uint8 else shape


def _check(x: Tensor, block_rows: int, block_cols: int, fmt: str) -> None:
    check_input_dtype("x", x)
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix [..., M, K], not {tuple(x.shape)}")
    if min(block_rows, block_cols) < 1:
        raise ValueError(f"block must be at least 1×1, not {block_rows}×{block_cols}")
    if fmt not in STORAGE_DTYPES:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2', 'e5m6' or 'int8', not {fmt!r}")
    if fmt == "e5m6" and x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns to be packed as E5M6, not {x.shape[-1]}")


def _check_with_scale(x: Tensor, scale: Tensor, fmt: str) -> None:
    _check(x, 1, 1, fmt)
    if fmt not in ("e4m3", "e5m2"):
        raise ValueError(f"fmt must be 'e4m3' or 'e5m2' with a given scale, not {fmt!r}")
    if scale.dtype != torch.float32 or scale.shape != (1,):
        raise ValueError(f"scale must be float32 [1], not {scale.dtype} {list(scale.shape)}")
    check_device("x", x, "its scale", scale)


def _check_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> None:
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")
    check_quantized("data", data, scale, block_rows, block_cols)


def check_quantized(name: str, data: Tensor, scale: Tensor, block_rows: int, block_cols: int) -> None:
    """Raise TypeError or ValueError unless data, called name in messages, and scale are a result of `quantize`."""
    if data.dtype not in STORAGE_DTYPES.values():
        raise TypeError(f"{name} must be float8_e4m3fn, float8_e5m2, int8 or uint8 (E5M6), not {data.dtype}")
    if data.dim() < 2:
        raise ValueError(f"{name} must be a matrix [..., M, K], not {tuple(data.shape)}")
    check_scale(name, data, scale, block_rows, block_cols)


def check_input_dtype(name: str, t: Tensor) -> None:
    """Raise TypeError unless t is of one of `INPUT_DTYPES`."""
    if t.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")


def check_device(name: str, t: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors lie on one device."""
    if other.device != t.device:
        raise ValueError(f"{name} is on {t.device} but {other_name} on {other.device}")


def check_scale(name: str, data: Tensor, scale: Tensor, block_rows: int, block_cols: int) -> None:
    """Check that a scale fits data [..., M, K] in blocks of block_rows × block_cols.

    Args:
        name: the name of data in the message of an error.

    Raises:
        TypeError: scale is not float32.
        ValueError: scale has another shape, is on another device, or a block extent is below 1.
    """
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}'s scale must be float32, not {scale.dtype}")
    _check_scale_shape(name, data.shape, data.dtype, scale.shape, block_rows, block_cols)
    check_device(name, data, "its scale", scale)


@functools.lru_cache(4096)  # runs before every GEMM, and their shapes recur
def _check_scale_shape(
    name: str, data: torch.Size, dtype: torch.dtype, scale: torch.Size, rows: int, cols: int
) -> None:
    if min(rows, cols) < 1:
        raise ValueError(f"{name}'s block must be at least 1×1, not {rows}×{cols}")
    if dtype == torch.uint8 and data[-1] % 3:
        raise ValueError(f"{name} must have E5M6's two values in three bytes, not rows of {data[-1]} bytes")
    *batch, m, k = shape = tuple(_logical_shape(data, dtype))
    fitting = (*batch, -(-m // rows), -(-k // cols))
    if scale != fitting:
        raise ValueError(f"{name}'s scale must be {fitting} for {shape} in blocks of {rows}×{cols}, not {tuple(scale)}")


def split_into_blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """Split x [..., M, K] into blocks of R×C: [..., ⌈M/R⌉, R, ⌈K/C⌉, C], padded with zeros; a view where possible.

    Blocks that are larger than x become as large as x.
    """
    *batch, m, k = x.shape
    rows, cols = min(rows, max(m, 1)), min(cols, max(k, 1))
    if m % rows or k % cols:
        x = F.pad(x, (0, -k % cols, 0, -m % rows))
    return x.reshape(*batch, -(-m // rows), rows, -(-k // cols), cols)


def _merge_blocks(blocks: Tensor, m: int, k: int) -> Tensor:
    """The inverse of `split_into_blocks`: [..., M, K], contiguous."""
    return blocks.flatten(-2).flatten(-3, -2)[..., :m, :k].contiguous()


def _round(blocks: Tensor, shape: torch.Size, fmt: str) -> Tensor:
    """Round scaled blocks to the format: data of a matrix of this shape. Overwrites blocks.

    The values are clamped first, since not every cast of torch to an 8-bit dtype saturates.
    """
    limit = formats.by_name[fmt].max
    scaled = _merge_blocks(blocks.clamp_(-limit, limit), *shape[-2:])
    if fmt == "e5m6" and scaled.device.type == "cpu":
        return cpu.encode_e5m6(scaled)
    if fmt == "e5m6":
        return formats.pack12(formats.E5M6.encode(scaled))
    if fmt == "int8":
        return scaled.round_().nan_to_num_(0.0).to(torch.int8)  # the scale of the block shows the NaN
    return scaled.to(STORAGE_DTYPES[fmt])


def _empty_data(x: Tensor, fmt: str) -> Tensor:
    """An uninitialized `data` for x [..., M, K]."""
    *batch, m, k = x.shape
    return x.new_empty(*batch, m, k // 2 * 3 if fmt == "e5m6" else k, dtype=STORAGE_DTYPES[fmt])


def round_up_to_power_of_2(x: Tensor) -> Tensor:
    """Round non-negative float32 values up to the next normal power of two. NaN and Inf stay."""
    return _round_up(x, 0x7FFFFF)


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Round non-negative float32 values up to the next number of BF16. NaN and Inf stay."""
    return _round_up(x, 0xFFFF)


def _round_up(x: Tensor, dropped_bits: int) -> Tensor:
    """Round up to numbers without these bits: adding them carries unless they are zeros."""
    rounded = ((x.view(torch.int32) + dropped_bits) & ~dropped_bits).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)
