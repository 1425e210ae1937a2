# mypy: allow-untyped-defs
"""Conversion of 8- and 12-bit encoded values in integer arithmetic, exact on every GPU and in Triton's interpreter.

GPUs from sm_89 on have an instruction that converts FP32 to FP8, which kernels use where it exists. sm_80 has none, and
there Triton has no E4M3.

FP16 holds every encoded value exactly: E5M2 and E5M6 are the upper bits of an FP16 number, and E4M3 (2⁻⁹ … 448) and the
integers up to 127 lie within its range. So tensor cores without FP8 multiply them as FP16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import E4M3, E5M2, E5M6, INT8, FloatFormat, IntFormat
from octile.kernels.triton.device import device_properties

FORMAT_OF_DTYPE: dict[torch.dtype, FloatFormat | IntFormat] = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.int8: INT8,
    torch.uint8: E5M6,  # packed: two values in three bytes
}


def format_constants(fmt: FloatFormat | IntFormat) -> dict[str, int]:
    """The constants of a format that `encode` and `to_half` take; MANTISSA is 0 for integers."""
    if isinstance(fmt, IntFormat):
        return {"MANTISSA": 0, "BIAS": 0}
    return {"MANTISSA": fmt.mantissa_bits, "BIAS": fmt.bias}


def quantize_constants(dtype: torch.dtype) -> dict[str, float]:
    """The constants of kernels that quantize to dtype: 1 / max as two FP32 numbers, and `format_constants`."""
    fmt = FORMAT_OF_DTYPE[dtype]
    inverse = torch.tensor(1 / fmt.max, dtype=torch.float32).item()
    return {"INVERSE": inverse, "REST": 1 / fmt.max - inverse} | format_constants(fmt)


def as_encoded(data: Tensor) -> Tensor:
    """View FP8 data as uint8 if the GPU has no FP8 conversion."""
    is_fp8 = data.dtype.is_floating_point
    return data.view(torch.uint8) if is_fp8 and not device_properties(data.device).fp8 else data


@triton.jit
def encode(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round float32 within ±max to encoded values in int32, ties to even. NaN stays NaN; for INT8 it becomes 0."""
    if MANTISSA == 0:
        integer = (value + 12582912.0) - 12582912.0  # 1.5 · 2²³ leaves no bit for a fraction
        return tl.where(value == value, integer, 0.0).to(tl.int32)
    else:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF

        # normal numbers: add almost half of the dropped bits, or half if the last bit kept is odd; carries propagate
        CUT: tl.constexpr = 23 - MANTISSA
        odd = (magnitude >> CUT) & 1
        normal = ((magnitude + ((1 << (CUT - 1)) - 1) + odd) >> CUT) - ((127 - BIAS) << MANTISSA)

        # subnormal numbers: above this power of two FP32 has the format's smallest spacing, so the sum's bits count it
        EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
        spaced = magnitude.to(tl.float32, bitcast=True) + 2.0**EXPONENT
        subnormal = spaced.to(tl.int32, bitcast=True) - ((127 + EXPONENT) << 23)

        encoded = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
        if MANTISSA == 6:
            return tl.where(magnitude > 0x7F800000, 0x7E0, encoded) | ((bits >> 20) & 0x800)
        else:
            return tl.where(magnitude > 0x7F800000, 0x7F, encoded) | ((bits >> 24) & 0x80)


@triton.jit
def to_half(encoded, MANTISSA: tl.constexpr):
    """Convert encoded values of any integer type to float16, exactly."""
    if MANTISSA == 0:
        return encoded.to(tl.float16)
    elif MANTISSA == 3:
        # moves exponent and mantissa to FP16's place; FP16's bias is larger by 8, so the number is 2⁸ too small
        encoded = encoded.to(tl.int16)
        small = (((encoded & 0x80) << 8) | ((encoded & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((encoded & 0x7F) == 0x7F, float("nan"), small * 256.0)
    else:
        return (encoded.to(tl.int16) << (10 - MANTISSA)).to(tl.float16, bitcast=True)


@triton.jit
def to_float(encoded, MANTISSA: tl.constexpr):
    """Convert encoded values of any integer type, or FP8 values, to float32, exactly."""
    if encoded.dtype.is_fp8():
        return encoded.to(tl.float32)
    else:
        return to_half(encoded, MANTISSA).to(tl.float32)
