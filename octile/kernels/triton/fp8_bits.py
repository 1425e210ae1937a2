# mypy: allow-untyped-defs
"""8- and 12-bit codes in integer arithmetic: exact, and the same on every GPU and in Triton's interpreter.

GPUs from sm_89 on convert FP32 to FP8 by an instruction, which `quantize` uses where it can; sm_80 has none, and Triton
no E4M3 there.

Every code is exactly an FP16 number: E5M2 and E5M6 are the upper bits of one, E4M3 lies within its range (2⁻⁹ … 448),
and so do the integers up to 127. Tensor cores without FP8 therefore multiply them as FP16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import E4M3, E5M2, E5M6, INT8, FloatFormat, IntFormat
from octile.kernels.triton.device import machine

FORMAT_OF: dict[torch.dtype, FloatFormat | IntFormat] = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.int8: INT8,
    torch.uint8: E5M6,  # packed: two codes in three bytes
}


def constants(fmt: FloatFormat | IntFormat) -> dict[str, int]:
    """What `encode` and `to_half` need to know of a format; an integer has no mantissa."""
    if isinstance(fmt, IntFormat):
        return {"MANTISSA": 0, "BIAS": 0}
    return {"MANTISSA": fmt.mantissa_bits, "BIAS": fmt.bias}


def cast_constants(dtype: torch.dtype) -> dict[str, float]:
    """What a kernel that casts to the dtype's format is compiled with: 1 / max in two FP32 numbers, and `constants`."""
    fmt = FORMAT_OF[dtype]
    inverse = torch.tensor(1 / fmt.max, dtype=torch.float32).item()
    return {"INVERSE": inverse, "REST": 1 / fmt.max - inverse} | constants(fmt)


def as_codes(data: Tensor) -> Tensor:
    """The same memory, as integers where the GPU has no cast to FP8."""
    return data if machine(data.device).fp8 or data.dtype == torch.int8 else data.view(torch.uint8)


@triton.jit
def encode(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 within ±max → codes (INT8: the integers) in int32, ties to even. NaN stays one; as INT8 it becomes 0."""
    if MANTISSA == 0:
        integer = (value + 12582912.0) - 12582912.0  # 1.5 · 2²³ leaves no bit for a fraction
        return tl.where(value == value, integer, 0.0).to(tl.int32)
    else:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF

        # a normal number: add just under half of what is cut off, half after an odd digit; a carry may run through
        CUT: tl.constexpr = 23 - MANTISSA
        odd = (magnitude >> CUT) & 1
        normal = ((magnitude + ((1 << (CUT - 1)) - 1) + odd) >> CUT) - ((127 - BIAS) << MANTISSA)

        # a subnormal one: above this power of two FP32 has the format's smallest spacing, so the sum's bits count it
        EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
        spaced = magnitude.to(tl.float32, bitcast=True) + 2.0**EXPONENT
        subnormal = spaced.to(tl.int32, bitcast=True) - ((127 + EXPONENT) << 23)

        code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
        if MANTISSA == 6:
            return tl.where(magnitude > 0x7F800000, 0x7E0, code) | ((bits >> 20) & 0x800)
        else:
            return tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def to_half(code, MANTISSA: tl.constexpr):
    """Codes in any integer type (INT8: the integers) → float16, exactly."""
    if MANTISSA == 0:
        return code.to(tl.float16)
    elif MANTISSA == 3:
        # exponent and mantissa where FP16 has them; its bias is larger by 8, so the number comes out 2⁸ too small
        code = code.to(tl.int16)
        small = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((code & 0x7F) == 0x7F, float("nan"), small * 256.0)
    else:
        return (code.to(tl.int16) << (10 - MANTISSA)).to(tl.float16, bitcast=True)


@triton.jit
def to_float(code, MANTISSA: tl.constexpr):
    """Codes in any integer type, or FP8 where the GPU converts it → float32, exactly."""
    if code.dtype.is_fp8():
        return code.to(tl.float32)
    else:
        return to_half(code, MANTISSA).to(tl.float32)
