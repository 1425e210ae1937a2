"""Specification of one tensor core step, in exact rational arithmetic.

    1.  The exponent of a product is the sum of its operands' exponents, and its significand lies in [1, 4): products
        are not normalized. A subnormal operand has its format's smallest exponent and a significand below 1.
    2.  e is the largest exponent among the products and the accumulator, zeros excepted, and at least `floor`.
    3.  Every term is truncated to a multiple of 2^(e − F), in the direction of `truncation`.
    4.  The truncated terms are added exactly, so their order does not matter.
    5.  The sum is truncated toward zero to the bits of the output; an FP16 result is rounded to nearest even. The
        output has subnormal numbers; a sum beyond its range becomes Inf. A zero is +0.

A NaN, Inf · 0 or Inf − Inf in any term gives NaN; otherwise an Inf gives Inf.
Source: MMA-Sim (arXiv 2511.10909), algorithm 7.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from octile.formats import FP16, FP32, FloatFormat
from octile.lab.tensor_core.architectures import Instruction


def step(
    a: Sequence[float],
    b: Sequence[float],
    c: float,
    a_format: FloatFormat,
    b_format: FloatFormat,
    instruction: Instruction,
    fp16_accumulator: bool = False,
    scale: Fraction = Fraction(1),
) -> float:
    """Compute c + Σ a·b·scale as one step of the instruction.

    Args:
        a, b: at most `instruction.terms` values of the two formats; TF32 as FP32 numbers with ten fraction bits.
        c: the accumulator, an FP32 number, or an FP16 number with fp16_accumulator.
        a_format, b_format: the formats of a and b.
        instruction: the instruction.
        fp16_accumulator: whether accumulator and result are FP16.
        scale: the product of the two UE8M0 scales, a power of two.
    """
    pairs = list(zip(a, b, strict=True))
    values = [x * y for x, y in pairs]
    if not all(math.isfinite(v) for v in (*values, c)):
        return sum(values, c)  # the hardware follows IEEE 754's rules for NaN and Inf

    exact = [Fraction(x) * Fraction(y) * scale for x, y in pairs]
    shift = exponent(scale, -10000)
    exponents = [exponent(x, smallest(a_format)) + exponent(y, smallest(b_format)) + shift for x, y in pairs]
    output = FP16 if fp16_accumulator else FP32
    terms = [*exact, Fraction(c)]
    exponents.append(exponent(c, smallest(output)))

    floor = instruction.fp16_floor if fp16_accumulator else instruction.floor
    assert floor is not None
    e_max = max([floor, *(e for e, term in zip(exponents, terms, strict=True) if term)])
    ulp = Fraction(2) ** (e_max - instruction.fraction_bits)
    truncate = math.trunc if instruction.truncation == "zero" else math.floor
    total = sum(truncate(term / ulp) for term in terms) * ulp

    digit = Fraction(2) ** (
        exponent(total, smallest(output)) - (FP16.mantissa_bits if fp16_accumulator else instruction.output_bits)
    )
    result = (
        round(total / digit) if fp16_accumulator else math.trunc(total / digit)
    ) * digit  # round() is to nearest even
    if abs(result) > output.max:
        return math.copysign(math.inf, result)
    return float(result)


def exponent(x: float | Fraction, least: int) -> int:
    """Return ⌊log2 |x|⌋, at least `least`; `least` for zero."""
    if x == 0:
        return least
    numerator, denominator = abs(Fraction(x)).as_integer_ratio()
    e = numerator.bit_length() - denominator.bit_length()
    e -= numerator < denominator * Fraction(2) ** e
    return max(e, least)


def smallest(fmt: FloatFormat) -> int:
    """Return the exponent of a format's smallest normal number, which its subnormal numbers share."""
    return 1 - fmt.bias
