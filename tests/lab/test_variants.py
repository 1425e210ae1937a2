"""Tests of quantization with every scale rule, against octile.quantize and exact fractions."""

from bisect import bisect
from dataclasses import replace
from fractions import Fraction
from itertools import product as every_combination

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.formats import E2M1, E4M3, E5M6
from octile.lab.variants import (
    BLOCKS,
    FIXED_SCALES,
    FORMATS,
    PUBLISHED,
    SCALES,
    STORAGE_DTYPE,
    SearchSpace,
    Variant,
    bits_per_value,
    operand_blocks,
    operands_of,
    quantize_as,
    why_not_applicable,
)
from octile.recipe import TILE, OperandFormat, Recipe
from octile.scaled import quantize

EIGHT_BITS = ("e4m3", "e5m2", "int8", "mx")


def matrix(seed=0, rows=130, columns=200):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    x[:, 7] *= 1e4
    x[2] *= 1e-30
    return x


def slow_scale(amax: Fraction, largest: Fraction, rule: str) -> Fraction:
    """The scale by the definition of the rule."""
    exact = amax / largest
    below = power_at_or_below(exact)
    if rule == "up":
        return below if below == exact else 2 * below
    if rule == "down":
        return below
    if rule == "nearest":
        return below if exact / below < Fraction(3, 2) else 2 * below
    return power_at_or_below(amax) / power_at_or_below(largest)


def power_at_or_below(x: Fraction) -> Fraction:
    power = Fraction(1)
    while power > x:
        power /= 2
    while 2 * power <= x:
        power *= 2
    return power


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("scale", ["float32", "up"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e5m6", "int8"])
def test_variants_of_the_library_equal_the_library(fmt, block, scale):
    mine = quantize_as(matrix(), fmt, BLOCKS[block], scale)
    theirs = quantize(matrix(), BLOCKS[block], FORMATS[fmt], "power_of_2" if scale == "up" else "float32")
    assert mine.block == theirs.block
    assert torch.equal(mine.scale, theirs.scale)
    rows, columns = mine.block
    spread = mine.scale.repeat_interleave(rows, 0)[:130].repeat_interleave(columns, 1)[:, :200]
    assert torch.equal(mine.data.float() * spread, theirs.dequantize())


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("rule", ["up", "nearest", "down", "ocp"])
@pytest.mark.parametrize("fmt", EIGHT_BITS)
@settings(max_examples=60, deadline=None)
@given(amax=st.floats(2.0**-60, 2.0**60, width=32))
def test_scales_that_are_powers_of_two_are_those_of_the_rule(fmt, rule, amax):
    scale = quantize_as(torch.tensor([[amax]]), fmt, (1, 1), rule).scale.item()
    # amax / max is rounded to FP32 first, as octile.quantize does it
    quotient = Fraction((torch.tensor(amax) / FORMATS[fmt].max).item())
    largest = Fraction(FORMATS[fmt].max)
    assert Fraction(scale) == slow_scale(Fraction(amax) if rule == "ocp" else quotient * largest, largest, rule)


def test_the_mx_scale_rule_lies_between_up_and_nearest_for_e4m3():
    amax = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)).T + 0.01
    up, ocp, nearest = (quantize_as(amax, "mx", (1, 1), rule).scale for rule in ("up", "ocp", "nearest"))
    assert (nearest <= ocp).all()
    assert (ocp <= up).all()
    assert (nearest < ocp).any()
    assert (ocp < up).any()


@pytest.mark.parametrize("fmt", EIGHT_BITS)
@pytest.mark.parametrize("rule", SCALES[1:])
def test_every_value_is_the_nearest_that_the_format_has(fmt, rule):
    x = matrix(1, 4, 40)
    q = quantize_as(x, fmt, (1, 32), rule)
    numbers = sorted({Fraction(v) for v in possible(fmt)})
    for row, column in every_combination(range(4), range(40)):
        exact = Fraction(x[row, column].item()) / Fraction(q.scale[row, column // 32].item())
        found = Fraction(q.data[row, column].float().item())
        next_one = bisect(numbers, exact)
        around = numbers[max(next_one - 1, 0) : next_one + 1]  # of sorted numbers one of these is the nearest
        assert abs(found - exact) == min(abs(number - exact) for number in around)


def possible(fmt):
    if fmt == "int8":
        return range(-127, 128)
    values = FORMATS[fmt].values()
    return values[values.isfinite()].tolist()


def test_nvfp4_is_the_formula():
    x = matrix(2, 3, 40)
    q = quantize_as(x, "nvfp4", BLOCKS["1x16"], "e4m3")
    whole = x.abs().max().div(6 * 448).item()
    for row, block in every_combination(range(3), range(3)):
        part = x[row, 16 * block : 16 * block + 16]
        ratio = part.abs().max() / 6 / torch.tensor(whole)
        scale = E4M3.round(ratio).item()
        assert q.scale[row, block].item() == scale * whole
        if scale:
            divisor = torch.tensor(scale * whole)
            assert torch.equal(q.data[row, 16 * block : 16 * block + 16].float(), E2M1.round(part / divisor))


def test_a_block_of_nvfp4_too_small_for_its_scale_is_zero():
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-6
    q = quantize_as(x, "nvfp4", BLOCKS["1x16"], "e4m3")
    assert q.scale[0, 1] == 0
    assert not q.data[0, 16:].float().any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_stay_zeros(fmt):
    q = quantize_as(torch.zeros(3, 40), fmt, (1, 16), FIXED_SCALES.get(fmt, ("float32",))[0])
    assert not q.data.float().any()
    assert q.scale.isfinite().all()


def test_fp16_holds_every_value_of_e5m6():
    values = E5M6.values()
    values = values[values.isfinite()]
    assert torch.equal(values.half().float(), values)


@pytest.mark.parametrize(
    ("recipe", "operands"),
    [
        ("deepseek_v3", ("e4m3", "128x128", "float32")),
        ("int8_tiles", ("int8", "128x128", "float32")),
        ("per_tensor", ("e4m3", "tensor", "float32")),
        ("mxfp8", ("mx", "1x32", "up")),
        ("hybrid_e5m2", None),  # two formats
        ("delayed", None),  # scales from past steps
        ("fp8_lm", None),
    ],
)
def test_a_recipe_has_the_operands_of_a_variant(recipe, operands):
    assert operands_of(Recipe.named(recipe).formats) == operands


def test_a_recipe_with_other_blocks_has_the_operands_of_no_variant():
    formats = Recipe.deepseek_v3().formats
    assert operands_of(replace(formats, w=OperandFormat(block=(64, 128)))) is None
    assert operands_of(replace(formats, w=OperandFormat(block=TILE))) == ("e4m3", "1x128", "float32")


def test_only_a_weight_has_128x128_blocks():
    square, tile = BLOCKS["128x128"], BLOCKS["1x128"]
    assert operand_blocks(PUBLISHED, "fprop") == (tile, square)
    assert operand_blocks(PUBLISHED, "dgrad") == (tile, square)
    assert operand_blocks(PUBLISHED, "wgrad") == (tile, tile)


@pytest.mark.parametrize(
    ("variant", "bits"),
    [
        (PUBLISHED, 8 + 32 / 128),
        (Variant("mx", "1x32", "up", None, "exact"), 8 + 8 / 32),
        (Variant("nvfp4", "1x16", "e4m3", None, "exact"), 4 + 8 / 16),
        (Variant("e5m6", "row", "up", None, "exact"), 12 + 32 / 256),
    ],
    ids=str,
)
def test_bits_a_value(variant, bits):
    a, _ = operand_blocks(variant, "fprop")
    assert bits_per_value(variant, quantize_as(matrix(0, 8, 256), variant.fmt, a, variant.scale)) == bits


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (Variant("e4m3", "1x32", "up", None, "exact"), "is mx"),
        (Variant("mx", "1x32", "float32", None, "exact"), "mx has power-of-two scales, so float32 does not apply"),
        (Variant("int8", "row", "up", 128, "sm_90"), "tensor cores sum INT8 as exact integers"),
        (Variant("nvfp4", "1x16", "e4m3", None, "sm_100"), "the model has no instruction for NVFP4"),
        (Variant("e4m3", "row", "up", 128, "sm_80"), "sm_80 has no instruction"),
        (Variant("e4m3", "1x32", "float32", 128, "sm_90"), "1x32 has a new scale every 32 products"),
        (Variant("e4m3", "row", "up", 128, "sm_90_mma"), "itself promotes every 32"),
        (Variant("e4m3", "row", "up", 48, "sm_90"), "sums 32 products a step; 48 is not a multiple"),
        (Variant("mx", "1x32", "up", 128, "sm_90"), "1x32 has a new scale every 32 products"),
    ],
    ids=str,
)
def test_an_inapplicable_variant_has_a_reason(variant, reason):
    assert reason in (why_not_applicable(variant) or "")


@pytest.mark.parametrize(
    "variant",
    [
        PUBLISHED,
        Variant("mx", "1x32", "up", 128, "sm_100"),
        Variant("e5m6", "1x128", "up", 32, "sm_90"),
        Variant("e4m3", "1x32", "float32", None, "fp32"),
        Variant("e5m2", "tensor", "down", None, "sm_90_mma"),
    ],
    ids=str,
)
def test_an_applicable_variant_has_no_reason(variant):
    assert why_not_applicable(variant) is None


def test_all_combinations_occur_once_and_controls_are_not_promoted():
    every = list(SearchSpace(archs=("sm_90", "fp32", "exact")).combinations())
    assert len(every) == len(set(every))
    assert len([v for v in every if v.fmt == "e4m3"]) == 5 * 5 * (3 + 1 + 1)
    assert len([v for v in every if v.fmt == "mx"]) == 5 * 5
    assert len([v for v in every if v.fmt == "nvfp4"]) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["e3m4"]}, "formats must be some of e4m3, e5m2, e5m6, int8, mx, nvfp4, not 'e3m4'"),
        ({"blocks": ["1x16"]}, "blocks must be some of tensor, row, 1x128, 128x128, 1x32, not '1x16'"),
        ({"scales": ["sideways"]}, "scales must be some of float32, up, nearest, down, ocp, not 'sideways'"),
        ({"archs": ["sm_75"]}, "arch must be some of sm_80"),
        ({"promote": [0]}, "promote must be at least 1 or never, not 0"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SearchSpace(**options)


def test_every_format_is_stored_exactly():
    for name, fmt in FORMATS.items():
        if name != "int8":
            values = fmt.values()
            values = values[values.isfinite()]
            assert torch.equal(values.to(STORAGE_DTYPE[name]).float(), values)
