"""Tests of the specification against sums computed by hand."""

import math
from dataclasses import replace

import pytest

from octile.formats import BF16, E4M3, E5M2, FP16
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.tensor_core.reference import exponent, step

HOPPER = find_instruction("sm_90", E4M3.dtype, E4M3.dtype)
DOWN = replace(HOPPER, truncation="down")
HALVES = find_instruction("sm_90", FP16.dtype, FP16.dtype)
BFLOATS = find_instruction("sm_90", BF16.dtype, BF16.dtype)


def hopper(a, b, c=0.0, formats=(E4M3, E4M3), row=HOPPER):
    return step(a, b, c, *formats, row)


def test_a_short_sum_is_exact():
    assert hopper([1.5, 2.0, -3.0], [4.0, 0.5, 1.0], 1.0) == 5.0


def test_a_product_loses_what_lies_13_bits_below_the_largest_exponent():
    assert hopper([64.0, 2.0**-6], [64.0, 2.0**6], 0.0) == 4096 + 1  # 2⁰ is far above 2^(12 − 13)
    assert hopper([64.0, 0.75], [64.0, 1.0]) == 4096 + 0.5


def test_a_negative_term_is_truncated_toward_zero():
    assert hopper([64.0, -0.75], [64.0, 1.0]) == 4096 - 0.5
    assert hopper([64.0, -0.25], [64.0, 1.0]) == 4096


def test_under_the_other_hypothesis_it_is_truncated_toward_minus_infinity():
    assert hopper([64.0, -0.75, 64.0], [64.0, 1.0, -64.0], row=DOWN) == -1.0
    assert hopper([64.0, -0.75, 64.0], [64.0, 1.0, -64.0]) == -0.5


def test_a_product_is_not_renormalized():
    # 1.875 · 1.875 = 3.515625 has the exponent 0, not 1: 2^(0 − 13) stays
    assert hopper([1.875, -1.875, 2.0**-6], [1.875, 1.875, 2.0**-6]) == 2.0**-12
    assert hopper([1.875, -1.875, 2.0**-6], [1.875, 1.875, 2.0**-7]) == 2.0**-13


def test_the_accumulator_is_aligned_and_truncated_like_any_term():
    assert hopper([64.0, 64.0], [64.0, -64.0], 0.75) == 0.5
    assert hopper([0.75], [1.0], 4096.0) == 4096.5


def test_the_result_keeps_13_fraction_bits():
    assert hopper([1.0, 1.0], [1.0, 1.0], 1 + 2.0**-13) == 3.0  # 3 + 2⁻¹³ has 14 of them


def test_a_subnormal_operand_has_the_smallest_exponent():
    # with the exponent −6 of E4M3's subnormal numbers, 2⁻⁹ · 1 does not lower the exponent below that of 2⁻⁶ · 1
    assert hopper([2.0**-9, 2.0**-6], [1.0, 2.0**-6]) == 2.0**-9 + 2.0**-12
    assert hopper([2.0**-9], [2.0**-6], formats=(E4M3, E5M2)) == 2.0**-15


def test_nan_and_inf_follow_ieee():
    assert math.isnan(hopper([math.nan], [0.0]))
    assert math.isnan(hopper([math.inf], [0.0], formats=(E5M2, E4M3)))
    assert math.isnan(hopper([math.inf], [1.0], -math.inf, formats=(E5M2, E4M3)))
    assert hopper([math.inf], [-1.0], 1.0, formats=(E5M2, E4M3)) == -math.inf


def test_zero_is_positive():
    assert math.copysign(1.0, hopper([-0.0], [1.0], -0.0)) == 1.0
    assert math.copysign(1.0, hopper([1.0, -1.0], [1.0, 1.0])) == 1.0


def test_an_overflow_is_inf():
    huge = 2.0**127
    assert step([huge, huge], [1.0, 1.0], 0.0, BF16, BF16, BFLOATS) == math.inf


def test_a_subnormal_result_is_not_flushed():
    assert step([2.0**-126], [2.0**-10], 0.0, BF16, BF16, BFLOATS) == 2.0**-136
    assert hopper([0.0], [0.0], 2.0**-139) == 2.0**-139
    assert hopper([0.0], [0.0], 2.0**-149) == 0.0  # below 2^(−126 − 13)


def test_terms_26_bits_below_the_floor_are_lost():
    assert step([2.0**-100], [2.0**-49], 0.0, BF16, BF16, BFLOATS) == 2.0**-149
    terms = [2.0**-80, -(2.0**-80), 2.0**-80]
    assert step(terms, [2.0**-80, 2.0**-80, 2.0**-79], 0.0, BF16, BF16, BFLOATS) == 0.0


def test_an_fp16_result_is_rounded_to_even():
    one = [1.0, 2.0**-11]
    assert step(one, [1.0, 1.0], 0.0, FP16, FP16, HALVES, fp16_accumulator=True) == 1.0
    assert step([*one, 2.0**-20], [1.0] * 3, 0.0, FP16, FP16, HALVES, fp16_accumulator=True) == 1 + 2.0**-10
    assert step([60000.0], [2.0], 0.0, FP16, FP16, HALVES, fp16_accumulator=True) == math.inf


@pytest.mark.parametrize(("x", "expected"), [(1.0, 0), (0.75, -1), (-3.0, 1), (2.0**-9, -6), (0.0, -6)])
def test_exponent(x, expected):
    assert exponent(x, -6) == expected
