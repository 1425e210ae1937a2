"""Tests of what-if: every statistic against exact fractions, on small GEMMs."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from octile.lab.capture import Capture, CapturedGemm, load
from octile.lab.tensor_core import reference, tensor_core_scaled_matmul
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.tensor_core.operand import FORMATS as BY_DTYPE
from octile.lab.variants import PUBLISHED, SearchSpace, Variant, operand_blocks, quantize_as
from octile.lab.what_if import Error, SampledGemm, noise_to_db, select_gemms, values, what_if
from tests.lab.captures import write_capture


def captured(m=5, n=4, k=300, name="fprop", seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    a[1] *= 50
    return CapturedGemm("layer", name, a, b)


def exactly(a, b):
    """a · bᵀ of float tensors as fractions, [M][N]."""
    rows_a, rows_b = ([[Fraction(x) for x in row] for row in t.double().tolist()] for t in (a, b))
    return [[sum(x * y for x, y in zip(p, q, strict=True)) for q in rows_b] for p in rows_a]


def slow_error(found, exact):
    """Noise over signal, worst over RMS and bias, by their definitions in exact arithmetic."""
    f, e = ([x for row in rows for x in row] for rows in (found, exact))
    signal = sum(x * x for x in e)
    noise = sum((x - y) ** 2 for x, y in zip(f, e, strict=True)) / signal
    worst = max(abs(x - y) for x, y in zip(f, e, strict=True)) / Fraction(math.sqrt(signal / len(e)))
    outward = sum((x - y) * (1 if y > 0 else -1) for x, y in zip(f, e, strict=True))
    return float(noise), float(worst), float(outward / sum(abs(y) for y in e))


def assert_error(error, slow):
    for mine, theirs in zip((error.noise, error.worst, error.bias), slow, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def expanded_scale(q, k):
    """The scales of an operand in any blocks, one a value."""
    rows, columns = q.block
    return q.scale.double().repeat_interleave(rows, 0)[: q.data.shape[0]].repeat_interleave(columns, 1)[:, :k]


VARIANTS = [
    PUBLISHED,
    Variant("e4m3", "tensor", "float32", None, "sm_90"),
    Variant("e5m2", "row", "nearest", 32, "sm_90"),
    Variant("mx", "1x32", "up", None, "sm_100"),
    Variant("mx", "1x32", "ocp", 32, "sm_90"),
    Variant("e5m6", "1x128", "down", 128, "sm_90"),
    Variant("int8", "1x32", "float32", None, "exact"),
    Variant("nvfp4", "1x16", "e4m3", None, "exact"),
    Variant("nvfp4", "1x16", "e4m3", None, "fp32"),
]


@pytest.mark.one_case
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_quantization_error_is_exact(variant):
    p = captured()
    block_a, block_b = operand_blocks(variant, "fprop")
    a, b = quantize_as(p.a, variant.fmt, block_a, variant.scale), quantize_as(p.b, variant.fmt, block_b, variant.scale)
    quantized = exactly(a.data.double() * expanded_scale(a, 300), b.data.double() * expanded_scale(b, 300))
    assert_error(SampledGemm.draw(p, 32, 0).row(variant).quantization, slow_error(quantized, exactly(p.a, p.b)))


def test_per_tensor_accumulation_equals_the_instruction():
    p, variant = captured(k=96), Variant("e4m3", "tensor", "float32", None, "sm_90")
    row = find_instruction("sm_90", torch.float8_e4m3fn, torch.float8_e4m3fn)
    a, b = (quantize_as(t, "e4m3", (None, None), "float32") for t in (p.a, p.b))
    scale = (a.scale * b.scale).item()
    sums = [[torch.tensor(chain(x, y, row)).mul(scale).item() for y in b.data] for x in a.data]
    quantized = exactly(a.data.double() * a.scale.double(), b.data.double() * b.scale.double())
    found = SampledGemm.draw(p, 32, 0).row(variant)
    as_fractions = [[Fraction(x) for x in line] for line in sums]
    assert_error(found.accumulation, slow_error(as_fractions, quantized))
    assert_error(found.total, slow_error(as_fractions, exactly(p.a, p.b)))


def chain(x, y, row):
    """One output as the instruction sums it, k-block by k-block."""
    fmt, total = BY_DTYPE[x.dtype], 0.0
    for k in range(0, len(x), row.terms):
        part = slice(k, k + row.terms)
        total = reference.step(x[part].float().tolist(), y[part].float().tolist(), total, fmt, fmt, row)
    return total


def test_the_published_accumulation_equals_the_kernel():
    p = captured(40, 300)  # a weight of several rows of blocks
    p.b[128:256] *= 1000
    a, b = quantize_as(p.a, "e4m3", (1, 128), "float32"), quantize_as(p.b, "e4m3", (128, 128), "float32")
    sums = tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block).double()
    at = SampledGemm.draw(p, 16, 1)
    error = Error.between(sums[at.rows_a][:, at.rows_b], at.exact)
    assert at.row(PUBLISHED).total == error


def test_mx_on_its_own_instruction_needs_no_scale_outside():
    """With one k-block of 32 products and 25 bits, the sum of the scaled values is exact up to its last bits."""
    p = captured(k=32)
    assert SampledGemm.draw(p, 32, 0).row(Variant("mx", "1x32", "up", None, "sm_100")).accumulation.noise < 2.0**-40


def test_exact_sums_have_no_error():
    row = SampledGemm.draw(captured(), 32, 0).row(replace(PUBLISHED, promote=None, arch="exact"))
    assert row.accumulation == Error(0.0, 0.0, 0.0)
    assert row.total == row.quantization


def test_fp32_accumulation_has_the_rounding_error_of_fp32():
    row = SampledGemm.draw(captured(), 32, 0).row(replace(PUBLISHED, promote=None, arch="fp32"))
    assert 0 < row.accumulation.noise < (300 * 2.0**-24) ** 2


def test_without_a_signal_any_difference_is_infinite():
    zero, one = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    assert Error.between(zero, zero) == Error(0.0, 0.0, 0.0)
    assert Error.between(one, zero).noise == math.inf


def test_decibels():
    assert noise_to_db(0.01) == pytest.approx(20)
    assert noise_to_db(0.0) is None
    assert noise_to_db(math.nan) is None


def test_noise_is_averaged_over_gemms():
    products = [captured(seed=seed) for seed in range(3)]
    found = what_if(products, SearchSpace(("e4m3",), ("row",), ("up",), (128,), ("sm_90",)))
    (rank,) = found.ranking()
    for part in ("quantization", "accumulation", "total"):
        noise = [getattr(row, part).noise for row in found.rows]
        assert getattr(rank, part) == pytest.approx(sum(noise) / 3, rel=1e-12)
    assert rank.worst == max(row.total.worst for row in found.rows)
    assert rank.bias == pytest.approx(sum(row.total.bias for row in found.rows) / 3)
    assert rank.gemms == 3


def test_the_ranking_begins_with_the_least_noise():
    ranking = what_if([captured()], SearchSpace(archs=("exact",))).ranking()
    assert [rank.total for rank in ranking] == sorted(rank.total for rank in ranking)
    assert ranking[0].variant.fmt == "e5m6"


def test_the_ranking_includes_accumulation_error():
    p = captured(k=4096)
    positive = replace(p, a=p.a.abs(), b=p.b.abs())
    choice = SearchSpace(("e4m3",), ("tensor",), ("float32",), (None, 32), ("sm_90",))
    assert [rank.variant.promote for rank in what_if([positive], choice).ranking()] == [32, None]


def test_the_hardest_gemm_is_named():
    hard = replace(captured(seed=1), layer="hard", a=captured().a * torch.tensor([1.0, 1e-8] * 150))
    found = what_if([captured(), hard], SearchSpace(("int8",), ("tensor",), ("float32",), (None,), ("exact",)))
    worst = max(found.rows, key=lambda row: row.total.noise)
    assert found.ranking()[0].hardest == (worst.layer, worst.gemm)


def test_the_sample_is_drawn_by_its_seed():
    p = captured(200, 100)
    first, again, other = (SampledGemm.draw(p, 16, seed) for seed in (0, 0, 1))
    assert torch.equal(first.rows_a, again.rows_a)
    assert not torch.equal(first.rows_a, other.rows_a)
    assert first.exact.shape == (16, 16)
    assert len(first.rows_a.unique()) == 16


def test_a_sample_that_is_large_enough_is_everything():
    assert torch.equal(SampledGemm.draw(captured(), 1000, 0).rows_a, torch.arange(5))


def test_operands_are_quantized_whole_before_they_are_sampled():
    """The row that sets the tensor's scale need not be drawn."""
    p = captured(100, 4)
    p.a[99] = 1e6
    at = SampledGemm.draw(p, 4, 3)
    assert 99 not in at.rows_a
    variant = Variant("int8", "tensor", "float32", None, "exact")
    assert not at.quantized(variant).a.data.any()


def test_values_times_scales_are_the_dequantized_operand():
    q = quantize_as(captured().a, "e4m3", (1, 128), "float32")
    assert torch.equal(values(q), q.data.double() * expanded_scale(q, 300))


def test_inapplicable_variants_are_listed_with_their_reason():
    found = what_if([captured()], SearchSpace(("e4m3",), ("row", "1x32"), ("up",), (128,), ("sm_90",)))
    assert {row.variant.block for row in found.rows} == {"row"}
    assert found.refused == {
        "e4m3 in 1x32 blocks with power-of-two scales is mx": [Variant("e4m3", "1x32", "up", 128, "sm_90")]
    }


def test_gemms_of_zeros_are_named():
    zero = replace(captured(), layer="silent", a=torch.zeros(5, 300))
    assert what_if([captured(), zero], SearchSpace(("mx",), archs=("exact",))).silent == ["fprop of silent"]


@pytest.mark.parametrize(
    ("products", "options", "message"),
    [
        (
            [captured()],
            {"space": SearchSpace(("nvfp4",), archs=("sm_90",))},
            "no combination applies: the model has no instruction",
        ),
        ([], {}, "there is nothing to measure"),
        ([captured()], {"sample": 0}, "sample must be at least 1, not 0"),
        (
            [replace(captured(), a=torch.full((5, 300), torch.inf))],
            {},
            "fprop of layer has operands that are not finite",
        ),
    ],
)
def test_unmeasurable_gemms_are_refused(products, options, message):
    with pytest.raises(ValueError, match=message):
        what_if(products, **options)


@pytest.fixture(scope="module")
def capture(tmp_path_factory) -> Capture:
    return load(write_capture(tmp_path_factory.mktemp("captures") / "c.safetensors"))


def test_the_expert_with_the_most_tokens_represents_its_layer(capture):
    layers = {p.layer for p in select_gemms(capture)}
    assert layers == {"first", "second", "experts.gate_up.2", "experts.down.2"}


def test_a_named_expert_is_chosen(capture):
    assert {p.layer for p in select_gemms(capture, "experts.down.0")} == {"experts.down.0"}


def test_layers_and_gemms_are_chosen(capture):
    assert [(p.layer, p.gemm) for p in select_gemms(capture, "first,sec*", ("dgrad",))] == [
        ("first", "dgrad"),
        ("second", "dgrad"),
    ]


def test_a_layer_that_does_not_exist_is_refused(capture):
    with pytest.raises(ValueError, match="no layer matches 'third'"):
        select_gemms(capture, "third")


def test_a_gemm_that_was_not_captured_is_refused(capture):
    only = Capture(tuple(p for p in capture.gemms if p.gemm == "fprop"), 1, "r", "run", "0")
    with pytest.raises(ValueError, match="the capture has no wgrad: it has fprop"):
        select_gemms(only, "*", ("wgrad",))
