"""Tests of the properties of number formats against ml_dtypes, NumPy and exact rational arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from octile.formats import BF16, E2M1, E4M3, E5M2, E5M6, FP16, FP32, INT8, UE8M0, by_name
from octile.lab.formats import (
    ALL,
    TILE_OCTAVES,
    add_many_times,
    facts,
    gaps,
    octaves_below_amax,
    positive_values,
    stored_bits,
    tile_errors,
    underflow,
    worst_relative_error,
)

PEERS = {
    FP32: np.float32,
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    UE8M0: ml_dtypes.float8_e8m0fnu,
}
SMALL = {fmt: peer for fmt, peer in PEERS.items() if fmt.bits <= 16}

each_peer = pytest.mark.parametrize(("fmt", "peer"), PEERS.items(), ids=lambda v: getattr(v, "name", ""))
each_small = pytest.mark.parametrize(("fmt", "peer"), SMALL.items(), ids=lambda v: getattr(v, "name", ""))


def every_value(peer) -> np.ndarray:
    """All finite values of a peer's type, distinct, ascending, float64."""
    integers = np.arange(1 << (8 * np.dtype(peer).itemsize)).astype(f"u{np.dtype(peer).itemsize}")
    with np.errstate(invalid="ignore"):  # NaN
        values = integers.view(peer).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@each_peer
def test_limits(fmt, peer):
    info, found = ml_dtypes.finfo(peer), facts(fmt)
    assert found.largest == float(info.max)
    assert found.smallest_normal == float(info.tiny if fmt.signed else info.smallest_normal)
    assert found.smallest == float(info.smallest_subnormal)
    assert found.epsilon == float(info.eps)
    assert found.bits == info.bits
    assert found.octaves == pytest.approx(math.log2(Fraction(found.largest) / Fraction(found.smallest)))


@each_small
def test_counts_of_values(fmt, peer):
    values = every_value(peer)
    assert facts(fmt).finite_values == len(values)
    assert facts(fmt).between_1_and_2 == ((values > 1) & (values < 2)).sum()


def test_counts_of_values_between_1_and_2():
    assert (facts(E4M3).between_1_and_2, facts(E5M2).between_1_and_2) == (7, 3)


@pytest.mark.one_case
@each_small
def test_positive_values_and_their_gaps(fmt, peer):
    values = every_value(peer)
    values = values[values > 0]
    assert positive_values(fmt).tolist() == values.tolist()
    at, gap = gaps(fmt)
    assert [Fraction(a) + Fraction(g) for a, g in zip(at, gap, strict=True)] == [Fraction(v) for v in values[1:]]


def test_integers():
    found = facts(INT8)
    assert (found.largest, found.smallest, found.finite_values, found.between_1_and_2) == (127, 1, 255, 0)
    assert positive_values(INT8).tolist() == list(range(1, 128))


@pytest.mark.parametrize(
    ("fmt", "block", "scale", "bits"),
    [
        (E4M3, (1, 128), FP32, Fraction(33, 4)),
        (E4M3, (128, 128), FP32, 8 + Fraction(32, 16384)),
        (E5M6, (1, 128), FP32, Fraction(49, 4)),
        (E2M1, (1, 16), E4M3, Fraction(9, 2)),
        (E2M1, (1, 32), UE8M0, Fraction(17, 4)),
    ],
)
def test_bits_with_scales(fmt, block, scale, bits):
    assert Fraction(stored_bits(fmt, block, scale)) == bits


def test_every_format_of_the_library_is_listed():
    assert {fmt.name for fmt in ALL} == by_name.keys()


@pytest.mark.one_case
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("octave", [-18, -7, -1, 0, 5, 7, 9])
def test_the_worst_error_of_an_octave(fmt, octave):
    points = 64
    table = [Fraction(0), *(Fraction(v) for v in positive_values(fmt))]
    worst = Fraction(0)
    for i in range(points):
        x = (1 + Fraction(i, points)) * Fraction(2) ** octave
        worst = max(worst, min(abs(v - x) for v in table) / x)
    assert worst_relative_error(fmt, [octave], points)[0] == pytest.approx(float(worst), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3], ids=lambda fmt: fmt.name)
def test_adding_one_update_many_times(fmt):
    update, table = Fraction(float(np.float32(1e-3))), [Fraction(v) for v in positive_values(fmt) if 1 <= v < 4]
    weight, expected = Fraction(1), [1.0]
    for _ in range(40):
        exact = weight + update
        nearest = min(abs(v - exact) for v in table)
        candidates = [i for i, v in enumerate(table) if abs(v - exact) == nearest]
        assert len(candidates) == 1  # no tie: which neighbour is even does not matter here
        weight = table[candidates[0]]
        expected.append(float(weight))
    assert add_many_times(fmt, 1e-3, 40).tolist() == expected


def test_fp32_loses_no_update():
    weight = np.float32(1)
    for _ in range(1000):
        weight = np.float32(weight + np.float32(1e-3))
    assert add_many_times(FP32, 1e-3, 1000)[-1] == weight


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_fp16_underflow_equals_numpys(scale):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 10.0 ** -torch.arange(5000).remainder(12)
    x[::7] = 0
    with np.errstate(over="ignore"):
        half = (x[x != 0].numpy() * np.float32(scale)).astype(np.float16)
    found = underflow(x, scale)
    assert found.lost == (half == 0).mean()
    assert found.overflowed == np.isinf(half).mean()
    assert found.subnormal == ((half != 0) & (np.abs(half) < np.finfo(np.float16).tiny)).mean()


@pytest.fixture
def activation():
    """[3, 200], heavy-tailed, with zeros."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, 200, generator=g) ** 3 * torch.randn(3, 200, generator=g).exp()
    x[:, ::9] = 0
    return x


def quantized_slowly(x: torch.Tensor, fmt) -> list[list[tuple[Fraction, Fraction]]]:
    """(value, nearest multiple of the tile's FP32 scale) of every element."""
    table = [Fraction(0), *(Fraction(v) for v in positive_values(fmt))]
    rows = []
    for row in x.tolist():
        pairs = []
        for start in (0, 128):
            tile = row[start : start + 128]
            scale = Fraction(float(np.float32(max(map(abs, tile))) / np.float32(fmt.max)))
            for value in tile:
                target = Fraction(float(np.float32(value) / np.float32(float(scale))))
                nearest = min(table, key=lambda v: abs(v - abs(target)))
                pairs.append((Fraction(value), nearest * scale * (1 if value >= 0 else -1)))
        rows.append(pairs)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=lambda fmt: fmt.name)
def test_tile_errors_in_exact_arithmetic(activation, fmt):
    pairs = [pair for row in quantized_slowly(activation, fmt) for pair in row]
    nonzero = [(x, q) for x, q in pairs if x]
    found = tile_errors(activation, fmt)
    assert found.flushed == sum(q == 0 for _, q in nonzero) / len(nonzero)
    signal, noise = sum(x * x for x, _ in pairs), sum((q - x) ** 2 for x, q in pairs)
    assert found.snr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
    octaves = octaves_below_amax(activation)[activation != 0].tolist()
    for octave in set(octaves):
        errors = [abs(q - x) / abs(x) for (x, q), o in zip(nonzero, octaves, strict=True) if o == octave]
        assert found.error_by_size[octave] == pytest.approx(float(sum(errors) / len(errors)), abs=1e-6)
    assert np.isnan(found.error_by_size[[o for o in range(TILE_OCTAVES + 1) if o not in octaves]]).all()


def test_octaves_below_the_largest_of_a_tile():
    x = torch.zeros(1, 130)
    x[0, :5] = torch.tensor([8.0, -4.0, 3.9, 1.0, 8.0 * 2.0**-40])
    x[0, 128:] = torch.tensor([0.5, 0.25])
    found = octaves_below_amax(x)[0]
    assert found[:5].tolist() == [0, 1, 1, 3, TILE_OCTAVES]
    assert found[128:].tolist() == [0, 1]
