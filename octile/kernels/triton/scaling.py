# mypy: allow-untyped-defs
"""A block's scale, and its values divided by it: what every cast does, bit for bit as `octile.ops.quantize` specifies.

Magnitudes are compared as integers: without their sign, FP32 numbers sort like their bits, and NaN lies above all. So a
NaN wins every maximum, where floating-point comparisons would lose it.
"""

import triton
import triton.language as tl

from octile.kernels.triton.e5m6_rows import load_packed
from octile.kernels.triton.fp8_bits import encode, to_float


@triton.jit
def magnitude(value):
    """|value| as integers that sort like the numbers, NaN above all."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, INVERSE: tl.constexpr, REST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """From the bits of the largest magnitude, float32: amax / max but a normal number, or 1 for zeros. NaN stays.

    INVERSE + REST is 1 / max of the format, in two FP32 numbers.
    """
    number = amax.to(tl.float32, bitcast=True)
    small = number < 2.0**-60
    number = tl.where(small, number * 2.0**64, number)  # or the product with REST would lose bits
    scale = tl.fma(number, INVERSE, number * REST)  # number / max rounded once, whatever the number
    scale = tl.where(number < float("inf"), scale, number)
    scale = tl.where(small, scale * 2.0**-64, scale)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    if POWER_OF_2:
        # an all-ones mantissa carries into the exponent unless the number is a power of two already
        rounded_up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, rounded_up, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def divide(value, scale, POWER_OF_2: tl.constexpr):
    """value / scale, as exactly as rounding it to a format needs, for values of the block whose scale it is.

    A division takes a dozen instructions, so there is one a block: r = 1 / scale. That of a power of two is exact.
    Otherwise 1 − scale · r is r's relative error e, exactly, and

        value / scale = value · r / (1 − e) ≈ value · r + value · r · (e + e²)

    where a fused multiply-add sums without a rounding in between. What is rounded at the end is off by less than
    3 · 2⁻⁴⁸ of itself, which decides between two codes as the FP32 quotient does: that could differ only for a scale
    within 6 units in the last place of a number with 8 significant bits, and `tests/kernels/triton/test_scaling.py`
    tries all of these with all values that lie about halfway between two codes. Source of the method: Brisebarre,
    Muller and Raina, IEEE Trans. Computers 53(8), 2004.
    """
    reciprocal = tl.div_rn(1.0, scale)
    if POWER_OF_2:
        return value * reciprocal
    else:
        error = tl.fma(-scale, reciprocal, 1.0)
        error = tl.where(scale < float("inf"), tl.fma(error, error, error), 0.0)  # x / Inf is 0, and Inf / Inf NaN
        quotient = tl.fma(value, reciprocal, value * reciprocal * error)
        sign = value.to(tl.int32, bitcast=True) & -0x80000000  # the sum makes +0 of −0
        return (quotient.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def to_codes(scaled, DTYPE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Rounds to the format. DTYPE is FP8 where the GPU casts to it, else the integers of the codes.

    Nothing needs to saturate: amax / scale exceeds the format's largest number by a rounding of FP32 at most.
    """
    if DTYPE.is_fp8():
        return scaled.to(DTYPE)
    else:
        return encode(scaled, MANTISSA, BIAS).to(DTYPE)


@triton.jit
def load_tiles(
    data, scale, rows, row_inside, k, k_tile, K, data_row, data_col, scale_row, scale_col, MANTISSA: tl.constexpr
):  # fmt: skip
    """The values at these rows and the columns k of one tile, float32: codes times their rows' scales.

    They are zero outside. Codes of 12 bits are packed, two in three bytes.
    """
    rows = rows.to(tl.int64)
    inside = row_inside[:, None] & (k < K)[None, :]
    base = data + rows[:, None] * data_row
    if MANTISSA == 6:
        codes = load_packed(base, k, data_col, inside)
    else:
        codes = tl.load(base + k.to(tl.int64)[None, :] * data_col, mask=inside, other=0.0)
    tile_scale = tl.load(scale + rows * scale_row + k_tile.to(tl.int64) * scale_col, mask=row_inside, other=0.0)
    return to_float(codes, MANTISSA) * tile_scale[:, None]
