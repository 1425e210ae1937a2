# mypy: allow-untyped-defs
"""The scale of a block, and the division of its values by the scale, bit for bit as `octile.ops.quantize` specifies.

Magnitudes are compared as integers: FP32 numbers without their sign are ordered as their bits, with NaN above all. So
a NaN wins every maximum; floating-point comparisons would lose it.
"""

import triton
import triton.language as tl

from octile.kernels.triton.e5m6_rows import load_e5m6
from octile.kernels.triton.fp8_bits import encode, to_float


@triton.jit
def magnitude(value):
    """The bits of |value| in int32: ordered as the numbers, with NaN above all."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_amax(amax, INVERSE: tl.constexpr, REST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """The scale of a block in float32, from the bits of its amax: amax / max, at least 2⁻¹²⁶; 1 for zeros. NaN stays.

    INVERSE + REST is 1 / max of the format as two FP32 numbers.
    """
    number = amax.to(tl.float32, bitcast=True)
    small = number < 2.0**-60
    number = tl.where(small, number * 2.0**64, number)  # otherwise the product with REST would lose bits
    scale = tl.fma(number, INVERSE, number * REST)  # number / max, rounded once for any number
    scale = tl.where(number < float("inf"), scale, number)
    scale = tl.where(small, scale * 2.0**-64, scale)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    if POWER_OF_2:
        scale = round_up(scale, 0x7FFFFF)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def round_up(scale, DROPPED_BITS: tl.constexpr):
    """A scale rounded up to a number without these bits: adding them carries unless they are zeros. NaN stays."""
    rounded = ((scale.to(tl.int32, bitcast=True) + DROPPED_BITS) & ~DROPPED_BITS).to(tl.float32, bitcast=True)
    return tl.where(scale == scale, rounded, scale)


@triton.jit
def divide(value, scale, POWER_OF_2: tl.constexpr):
    """value / scale, exact enough that rounding to a format gives the bits of the FP32 quotient.

    The scale must be that of the value's block. A division takes a dozen instructions, so there is only one per block:
    r = 1 / scale, which is exact for a power of two. Otherwise e = 1 − scale · r, the relative error of r, is computed
    exactly, and

        value / scale = value · r / (1 − e) ≈ value · r + value · r · (e + e²)

    A fused multiply-add sums this without an intermediate rounding. Before the last rounding the relative error is
    below 3 · 2⁻⁴⁸. The result could then round to another encoded value than the FP32 quotient only for a scale within
    6 units in the last place of a number with 8 significant bits. `tests/kernels/triton/test_scaling.py` tries all of
    these with all values about halfway between two encoded values. Source of the method: Brisebarre, Muller and Raina,
    IEEE Trans. Computers 53(8), 2004.
    """
    reciprocal = tl.div_rn(1.0, scale)
    if POWER_OF_2:
        return value * reciprocal
    else:
        error = tl.fma(-scale, reciprocal, 1.0)
        error = tl.where(scale < float("inf"), tl.fma(error, error, error), 0.0)  # x / Inf is 0, and Inf / Inf NaN
        quotient = tl.fma(value, reciprocal, value * reciprocal * error)
        sign = value.to(tl.int32, bitcast=True) & -0x80000000  # the sum of −0 and +0 is +0
        return (quotient.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_to_format(scaled, DTYPE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round scaled values to the format. DTYPE is FP8 if the GPU converts to it, else an integer dtype.

    Values need not saturate: amax / scale exceeds the format's largest number by at most a rounding of FP32.
    """
    if DTYPE.is_fp8():
        return scaled.to(DTYPE)
    else:
        return encode(scaled, MANTISSA, BIAS).to(DTYPE)


@triton.jit
def load_dequantized(
    data, scale, rows, row_inside, k, k_tile, K, data_row, data_col, scale_row, scale_col, MANTISSA: tl.constexpr
):  # fmt: skip
    """Load and dequantize one 1×128 tile of each row, float32; zero outside.

    Args:
        rows, row_inside: indices of the rows, and whether each lies in the matrix.
        k, k_tile: the columns of the tile and its index.
        MANTISSA: mantissa bits of the format; 6 is E5M6, packed.
    """
    rows = rows.to(tl.int64)
    inside = row_inside[:, None] & (k < K)[None, :]
    base = data + rows[:, None] * data_row
    if MANTISSA == 6:
        encoded = load_e5m6(base, k, data_col, inside)
    else:
        encoded = tl.load(base + k.to(tl.int64)[None, :] * data_col, mask=inside, other=0.0)
    tile_scale = tl.load(scale + rows * scale_row + k_tile.to(tl.int64) * scale_col, mask=row_inside, other=0.0)
    return to_float(encoded, MANTISSA) * tile_scale[:, None]
