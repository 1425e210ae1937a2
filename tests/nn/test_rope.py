import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.nn.fused.rotary import rotate
from octile.nn.interleave import run_interleaved
from octile.nn.rope import Rope
from octile.nn.tables import tables_once

V3 = Rope(64, factor=40.0, mscale=1.0, mscale_all_dim=1.0)


def rotated(x, positions, rope):
    return rotate(x, rope.cos_sin(torch.tensor(positions)))


@given(st.integers(0, 2**31), st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_a_product_depends_on_the_distance_only(seed, query_at, key_at, shift):
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(seed))
    near = rotated(q, [query_at], V3).flatten() @ rotated(k, [key_at], V3).flatten()
    far = rotated(q, [query_at + shift], V3).flatten() @ rotated(k, [key_at + shift], V3).flatten()
    torch.testing.assert_close(near, far, rtol=0, atol=2e-2)  # angles of 4000 radians in FP32


def test_neighboring_channels_are_a_complex_number_that_rotates():
    rope, x = Rope(8), torch.randn(5, 2, 8)
    rotations = torch.exp(1j * torch.arange(5)[:, None] * rope.frequencies())
    expected = torch.view_as_real(torch.view_as_complex(x.view(5, 2, 4, 2)) * rotations[:, None]).flatten(-2)
    torch.testing.assert_close(rotated(x, range(5), rope), expected)


def test_factor_one_is_the_unscaled_rotation():
    unscaled = torch.tensor([10000.0 ** (-i / 64) for i in range(0, 64, 2)])
    torch.testing.assert_close(Rope(64).frequencies(), unscaled)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones_by_the_factor():
    unscaled, slowed = Rope(64).frequencies(), V3.frequencies()
    rotations = unscaled * 4096 / (2 * math.pi)  # within the original length
    assert torch.equal(slowed[rotations > 40], unscaled[rotations > 40])
    torch.testing.assert_close(slowed[rotations < 0.7], unscaled[rotations < 0.7] / 40)
    between = slowed[(rotations < 32) & (rotations > 1)] / unscaled[(rotations < 32) & (rotations > 1)]
    assert (between.diff() <= 0).all()


@pytest.mark.parametrize(
    ("mscale", "expected"),
    [(1.0, (0.1 * math.log(40) + 1) ** 2), (0.707, (0.0707 * math.log(40) + 1) ** 2), (0.0, 1.0)],
)
def test_softmax_factor_is_the_published_one(mscale, expected):
    assert Rope(64, factor=40.0, mscale=mscale, mscale_all_dim=mscale).softmax_factor == pytest.approx(expected)


def test_equal_mscales_do_not_change_the_magnitude():
    cos, sin = V3.cos_sin(torch.arange(100))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


def test_attention_factor_is_the_magnitude_whatever_the_mscales():
    cos, sin = Rope(64, factor=40.0, mscale=0.5, attention_factor=1.5).cos_sin(torch.arange(100))
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.5**2))


def test_without_truncation_pairs_are_interpolated_between_exact_numbers_of_rotations():
    rope = Rope(64, factor=40.0, truncate=False)
    pair = torch.arange(32, dtype=torch.float64)
    first, last = (32 * math.log(4096 / (n * 2 * math.pi)) / math.log(10000.0) for n in (32, 1))
    slowed = ((pair - first) / (last - first)).clamp(0, 1)
    expected = 10000.0 ** (-pair / 32) * (1 - slowed + slowed / 40)
    torch.testing.assert_close(rope.frequencies(), expected.float())


def test_bfloat16_is_rotated_in_float32():
    x = torch.randn(7, 2, 8).bfloat16()
    assert torch.equal(rotated(x, range(7), Rope(8)), rotated(x.float(), range(7), Rope(8)).bfloat16())


def test_a_table_is_computed_once_in_its_context_by_interleaved_passes_too():
    cpu, found = torch.device("cpu"), []
    with tables_once():
        run_interleaved(*[lambda: found.append(V3.table(100, cpu))] * 2)
        other, unscaled = V3.table(99, cpu), Rope(64).table(100, cpu)
    assert found[0] is found[1]
    assert V3.table(100, cpu) is not found[0]
    for rope, length, table in ((V3, 100, found[0]), (V3, 99, other), (Rope(64), 100, unscaled)):
        assert all(map(torch.equal, table, rope.cos_sin(torch.arange(length))))
