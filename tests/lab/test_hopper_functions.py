"""Operators with a GPU's functions. `octile lab recompute --functions` compares them with what the GPU has recorded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octile.lab.hopper_functions import FILES, HopperFunctions, chain, fold, log
from octile.ops.cross_entropy import cross_entropy
from octile.ops.gate import gate
from octile.ops.norm import rms_norm, rms_norm_quantize
from octile.ops.paged_attention import paged_attention_with_lse
from octile.ops.swiglu import swiglu_quantize_and_save

SIZES = {name: 2**24 if name == "rsqrt_1_4" else 2**23 for name in FILES}


def functions(steps: int = 0) -> HopperFunctions:
    """The functions of a GPU whose results are all so many neighbors above the correctly rounded ones."""
    return HopperFunctions({name: torch.full((n,), steps, dtype=torch.int8) for name, n in SIZES.items()})


@pytest.fixture(scope="module")
def exact() -> HopperFunctions:
    return functions()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(first: int, count: int, step: int) -> Tensor:
    return (torch.arange(first, first + count, step) - (first >> 31 << 32)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("table", "first", "function", "expected"),
    [
        ("exp2_-2_-1", 0xBF800000, "exp2", torch.exp2),
        ("rsqrt_1_4", 0x3F800000, "rsqrt", torch.rsqrt),
        ("rcp_1_2", 0x3F800000, "reciprocal", torch.reciprocal),
    ],
)
def test_each_significand_has_its_own_entry(table: str, first: int, function: str, expected):
    tables = {name: torch.zeros(n, dtype=torch.int32) for name, n in SIZES.items()}
    tables[table] = torch.arange(SIZES[table], dtype=torch.int32)
    x = bits(first, SIZES[table], 1009)
    found = getattr(HopperFunctions(tables), function)(x)
    steps = found.view(torch.int32) - expected(x.double()).float().view(torch.int32)
    assert torch.equal(steps, torch.arange(0, SIZES[table], 1009, dtype=torch.int32))


def test_exponents_do_not_change_how_far_results_are_from_the_rounded_ones():
    x = normal(1000).abs() + 0.01
    one = functions(1)
    for scale in (2.0**-8, 1.0, 4.0, 2.0**20):
        for found, expected in (
            (one.rsqrt(x * scale), (x * scale).double().rsqrt()),
            (one.reciprocal(x * scale), (x * scale).double().reciprocal()),
        ):
            assert torch.equal(found.view(torch.int32), expected.float().view(torch.int32) + 1)
    below = -x * 8 - 1
    found = one.exp2(below)
    assert torch.equal(found.view(torch.int32), torch.exp2(below.double()).float().view(torch.int32) + 1)


def test_an_exponent_is_truncated_and_negated_by_inverting_its_bits(exact):
    x, step = torch.tensor([-0.25 - 2.0**-25, 0.25, 3.0, -3.0]), 2.0**-23
    expected = torch.exp2(torch.tensor([-0.25, 0.25 + step, 3 + step, -3.0], dtype=torch.float64)).float()
    assert torch.equal(exact.exp2(x), expected)


def test_the_ends_of_an_exponential(exact):
    x = torch.tensor([0.0, -0.0, -torch.inf, -200.0, -3.4e38, torch.inf])
    assert exact.exp2(x).tolist() == [1, 1, 0, 0, 0, torch.inf]


def test_the_logarithm_is_close_to_the_rounded_one():
    x = normal(10_000).abs() * 100 + 1
    error = (log(x).double() - x.double().log()).abs() / x.double().log().clamp(min=1e-3)
    assert error.max() < 2.0**-22
    assert log(torch.ones(1)).tolist() == [0.0]


def test_sums_have_the_order_of_a_thread_and_of_lanes():
    values = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24)])
    assert (chain(values), fold(values), values.double().sum()) == (0, 2, 2)
    assert chain(values.flip(0)) == 2


def test_norms_are_close_to_the_reference_and_have_its_bits_for_their_own_rstd(exact):
    x, weight = normal(9, 224).bfloat16(), normal(224, seed=1)
    y, rstd = exact.compute(rms_norm.overload, (x, weight, 1e-6), {})
    torch.testing.assert_close(rstd, rms_norm(x, weight, 1e-6)[1], rtol=1e-6, atol=0)
    assert torch.equal(y, (x.float() * rstd[:, None] * weight).bfloat16())
    arguments = x, weight, 1e-6, "e4m3", True, True
    found, expected = exact.compute(rms_norm_quantize.overload, arguments, {}), rms_norm_quantize(*arguments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.13, atol=1e-3)
    wide = normal(2, 600), normal(600)
    for a, b in zip(exact.compute(rms_norm.overload, (*wide, 1e-6), {}), rms_norm(*wide, 1e-6), strict=True):
        assert torch.equal(a, b)


def test_swiglu_gate_and_cross_entropy_are_close_to_the_reference(exact):
    halves = normal(5, 128).bfloat16(), normal(5, 128, seed=1).bfloat16()
    arguments = *halves, "e4m3", True, "e4m3", True, normal(5, seed=2).abs()
    found = exact.compute(swiglu_quantize_and_save.overload, arguments, {})
    for a, b in zip(found, swiglu_quantize_and_save(*arguments), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.13, atol=1e-3)
    gating = normal(6, 256).bfloat16(), normal(16, 256, seed=1), None, 3, 4, 2, 2, "sigmoid", True, 2.5, True
    found = exact.compute(gate.overload, gating, {})
    for a, b in zip(found, gate(*gating), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for columns in (60, 300, 4096, 5000):
        logits, labels = 5 * normal(4, columns), torch.tensor([0, columns - 1, 7, -100])
        found = exact.compute(cross_entropy.overload, (logits, labels), {})
        for a, b in zip(found, cross_entropy(logits, labels), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


def test_attention_is_close_to_the_reference(exact):
    cache, pages = normal(3, 64, 128).bfloat16(), torch.tensor([2, 0, 1], dtype=torch.int32)
    q, lengths = normal(150, 4, 128, seed=1).bfloat16(), torch.arange(1, 151, dtype=torch.int32)
    arguments = q, cache, pages.expand(150, -1), lengths, 96, 0.1, 512, 1
    found = exact.compute(paged_attention_with_lse.overload, arguments, {})
    expected = paged_attention_with_lse(*arguments)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-4)


def test_a_file_has_all_tables_and_may_have_angles(tmp_path: Path):
    arrays = {name: np.zeros(n, dtype=np.int8) for name, n in SIZES.items()}
    np.savez(tmp_path / "few.npz", **{FILES[0]: arrays[FILES[0]]})
    with pytest.raises(ValueError, match=r"has no table rsqrt_1_4, rcp_1_2"):
        HopperFunctions.load(tmp_path / "few.npz")
    angles = normal(10, 16).numpy()
    np.savez(tmp_path / "all.npz", **arrays, rope_cos=angles, rope_sin=-angles)
    loaded = HopperFunctions.load(tmp_path / "all.npz")
    x = normal(7, 16)
    assert torch.equal(loaded.compute(torch.ops.aten.cos.default, (x,), {}), torch.from_numpy(angles[:7]))
    assert torch.equal(loaded.compute(torch.ops.aten.sin.default, (x,), {}), torch.from_numpy(-angles[:7]))
    assert torch.equal(loaded.compute(torch.ops.aten.sin.default, (x[:, :4],), {}), x[:, :4].sin())
