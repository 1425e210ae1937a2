"""One step of a tensor core in exact arithmetic: the specification, and as slow as it is plain.

    1.  A product's exponent is the sum of its operands' exponents, its significand lies in [1, 4): nothing is
        renormalised. A subnormal operand has its format's smallest exponent and a significand below 1.
    2.  e = the largest exponent among the products and the accumulator; zeros have none; at least the table's floor.
    3.  Every term is cut to a multiple of 2^(e − F), toward zero (or, if `row.truncation` says so, toward −∞).
    4.  The cut terms are added exactly, so their order does not matter.
    5.  The sum is cut to the output's bits, toward zero (an FP16 result is rounded to nearest even), with the
        output's subnormal numbers; what exceeds its range is Inf. A zero is +0.

A NaN, Inf · 0 or Inf − Inf anywhere gives NaN, else an Inf gives Inf.
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
    row: Instruction,
    fp16_accumulator: bool = False,
    scale: Fraction = Fraction(1),
) -> float:
    """c + Σ a·b·scale as the instruction computes it: `row.terms` products or fewer.

    Args:
        a, b: values of the two formats; TF32 as FP32 numbers with ten fraction bits.
        c: the accumulator, an FP32 number (FP16 where fp16_accumulator).
        fp16_accumulator: accumulator and result are FP16.
        scale: the product of the two UE8M0 scales, a power of two.
    """
    pairs = list(zip(a, b, strict=True))
    values = [x * y for x, y in pairs]
    if not all(math.isfinite(v) for v in (*values, c)):
        return sum(values, c)  # IEEE's rules for NaN and Inf are the hardware's

    exact = [Fraction(x) * Fraction(y) * scale for x, y in pairs]
    shift = exponent(scale, -10000)
    exponents = [exponent(x, smallest(a_format)) + exponent(y, smallest(b_format)) + shift for x, y in pairs]
    output = FP16 if fp16_accumulator else FP32
    terms = [*exact, Fraction(c)]
    exponents.append(exponent(c, smallest(output)))

    floor = row.fp16_floor if fp16_accumulator else row.floor
    assert floor is not None
    e_max = max([floor, *(e for e, term in zip(exponents, terms, strict=True) if term)])
    ulp = Fraction(2) ** (e_max - row.fraction_bits)
    cut = math.trunc if row.truncation == "zero" else math.floor
    total = sum(cut(term / ulp) for term in terms) * ulp

    digit = Fraction(2) ** (
        exponent(total, smallest(output)) - (FP16.mantissa_bits if fp16_accumulator else row.output_bits)
    )
    result = (
        round(total / digit) if fp16_accumulator else math.trunc(total / digit)
    ) * digit  # round() is to nearest even
    if abs(result) > output.max:
        return math.copysign(math.inf, result)
    return float(result)


def exponent(x: float | Fraction, least: int) -> int:
    """⌊log2 |x|⌋, at least `least`; of zero `least`."""
    if x == 0:
        return least
    numerator, denominator = abs(Fraction(x)).as_integer_ratio()
    e = numerator.bit_length() - denominator.bit_length()
    e -= numerator < denominator * Fraction(2) ** e
    return max(e, least)


def smallest(fmt: FloatFormat) -> int:
    """The exponent of a format's smallest normal number, and of its subnormal ones."""
    return 1 - fmt.bias
