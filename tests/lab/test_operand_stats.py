"""Tests of an operand's statistics against loops over its values in exact arithmetic."""

import json
import math
import statistics
from fractions import Fraction

import pytest
import torch

from octile.formats import E4M3, E5M2, INT8
from octile.lab import operand_stats
from octile.lab.operand_stats import measure_operand, snr_db
from octile.ops.quantize import decode
from octile.scaled import ScaledTensor, quantize

M, K = 6, 200


def operand(seed: int = 0) -> torch.Tensor:
    """[M, K], heavy-tailed, an outlier channel, zeros, a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=g) ** 5
    x[:, 7] *= 1000
    x[:, ::11] = 0
    x[2] = 0
    return x


def row_of(x, q, *more):
    stats = measure_operand(x, q)
    for other in more:
        stats.add(measure_operand(*other))
    return stats.row(stats.packed().tolist())


def reference_statistics(x: torch.Tensor, q: ScaledTensor, tile: tuple[int, int]) -> dict[str, float]:
    """The same statistics, computed by loops."""
    values = [(Fraction(v), r, c) for r, line in enumerate(x.tolist()) for c, v in enumerate(line)]
    codes = [Fraction(v) for v in decode(q.data).flatten().tolist()]
    scales = [Fraction(float(q.scale[r // q.block[0], c // q.block[1]])) for _, r, c in values]
    xs, qs = [v for v, _, _ in values], [code * s for code, s in zip(codes, scales, strict=True)]
    nonzero = [abs(v) for v in xs if v]
    tiles: dict[tuple[int, int], list[Fraction]] = {}
    for v, r, c in values:
        if v:
            tiles.setdefault((r // tile[0], c // tile[1]), []).append(abs(v))
    octaves = [math.log2(max(t) / min(t)) for t in tiles.values()]
    largest, normal = q.fmt.max, getattr(q.fmt, "smallest_normal", 0.0)
    clip = {"e4m3": 464, "e5m2": 61440, "int8": 127.5}[q.fmt.name]
    errors = [b - a for a, b in zip(xs, qs, strict=True)]
    power = sum(v * v for v in xs)
    mean = sum(xs) / len(xs)
    moments = [sum((v - mean) ** k for v in xs) / len(xs) for k in (2, 4)]
    channels = [max(abs(v) for v, _, c in values if c == channel) for channel in range(x.shape[1])]
    typical = statistics.median_high(channels)
    assert all(abs(code) <= largest for code in codes)
    return {
        "values": len(xs),
        "underflows%": 100 * sum(a != 0 and b == 0 for a, b in zip(xs, codes, strict=True)) / len(nonzero),
        "overflows%": 100 * sum(abs(a) > s * Fraction(clip) for a, s in zip(xs, scales, strict=True)) / len(nonzero),
        "subnormals%": 100 * sum(0 < abs(code) < normal for code in codes) / len(nonzero),
        "cur_amax": float(max(nonzero)),
        "dynamic_range": math.log2(max(nonzero) / min(nonzero)),
        "max_blockwise_dynamic_range": max(octaves),
        "mean_blockwise_dynamic_range": statistics.fmean(octaves),
        "between_blocks_dynamic_range": math.log2(max(nonzero) / min(max(t) for t in tiles.values())),
        "scale_inv_min": float(min(scale for scale, code in zip(scales, codes, strict=True) if code)),
        "scale_inv_max": float(max(scale for scale, code in zip(scales, codes, strict=True) if code)),
        "kurtosis": float(moments[1] / moments[0] ** 2),
        "outlier_channels": sum(c > 10 * typical for c in channels),
        "mse": float(sum(e * e for e in errors) / len(errors)),
        "snr_db": 10 * math.log10(power / sum(e * e for e in errors)),
        "worst_over_rms": float(max(map(abs, errors))) / math.sqrt(power / len(xs)),
        "bias": float(sum(e * (1 if a > 0 else -1) for a, e in zip(xs, errors, strict=True) if a) / sum(nonzero)),
    }


CASES = {
    "tiles": ((1, 128), E4M3, "float32", (1, 128)),
    "powers of two": ((1, 128), E5M2, "power_of_2", (1, 128)),
    "columns": ((128, 1), E4M3, "float32", (128, 1)),
    "blocks": ((128, 128), E4M3, "float32", (128, 128)),
    "one scale": ((None, None), E4M3, "float32", (128, K)),
    "integers": ((1, 128), INT8, "float32", (1, 128)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_figure(case):
    block, fmt, scale, tile = CASES[case]
    x = operand()
    q = quantize(x, block, fmt, scale)
    found, expected = row_of(x, q), reference_statistics(x, q, tile)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=1e-7)


def test_clipped_values_count_as_overflow():
    x = torch.tensor([[448.0, 463.0, 465.0, -2000.0]])
    q = ScaledTensor(x.clamp(-448, 448).to(torch.float8_e4m3fn), torch.ones(1, 1), (1, 4))
    assert row_of(x, q)["overflows%"] == 50.0


def test_micro_batches_add_up_to_one():
    x, y = operand(0), operand(1) * 8
    both = torch.cat([x, y])
    apart = row_of(x, quantize(x), (y, quantize(y)))
    together = row_of(both, quantize(both))
    assert apart.pop("scale_histogram") == together.pop("scale_histogram")
    assert apart.pop("top_channels") == together.pop("top_channels")
    assert apart == pytest.approx(together, rel=1e-6)


def test_the_histogram_counts_every_block_of_scales():
    q = ScaledTensor(torch.ones(3, 4).to(torch.float8_e4m3fn), torch.tensor([[0.26], [3.0], [4.0]]), (1, 4))
    assert row_of(torch.ones(3, 4), q)["scale_histogram"] == {"log2": [-2, 2], "count": [1, 2]}


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda fmt: fmt.name)
def test_scales_of_tiles_of_zeros_are_left_out(block, fmt):
    x = torch.zeros(300, 260)
    x[130, 5], x[130, 200], x[2, 259] = fmt.max / 8, -fmt.max / 64, -0.0
    found = row_of(x, quantize(x, block, fmt))
    assert (found["scale_inv_min"], found["scale_inv_max"]) == (1 / 64, 1 / 8)
    assert found["scale_histogram"] == {"log2": [-6, -3], "count": [1, 1]}


def test_an_operand_of_zeros_has_no_scales():
    found = row_of(torch.zeros(3, 130), quantize(torch.zeros(3, 130)))
    assert (found["scale_inv_min"], found["scale_inv_max"]) == (None, None)
    assert found["scale_histogram"] == {"log2": [], "count": []}


def test_one_micro_batch_of_zeros_does_not_hide_the_scales_of_another():
    x, zeros = torch.full((2, 128), 7.0), torch.zeros(2, 128)
    for first, second in ((x, zeros), (zeros, x)):
        found = row_of(first, quantize(first), (second, quantize(second)))
        assert (found["scale_inv_min"], found["scale_inv_max"]) == (7 / 448, 7 / 448)


@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=lambda fmt: fmt.name)
def test_the_scale_of_a_tile_of_nan_is_not_left_out(fmt):
    x = torch.zeros(2, 128)
    x[1, 3] = math.nan
    found = row_of(x, quantize(x, (1, 128), fmt))
    assert (found["scale_inv_min"], found["scale_inv_max"]) == (None, None)  # what is no number is null


@pytest.mark.parametrize("transposed", [False, True])
def test_a_transposed_operand_has_the_scales_of_its_own_tiles(transposed):
    x = torch.zeros(256, 130)
    x[128:, 4] = 448.0 * 4
    q = quantize(x.mT if transposed else x, (1, 128) if transposed else (128, 1))
    found = row_of(x, q.mT if transposed else q)
    assert found["scale_histogram"] == {"log2": [2], "count": [1]}


def test_the_largest_channels_are_named_with_their_ratio_to_the_median():
    x = torch.ones(4, 9)
    x[1, 3], x[2, 5] = -50.0, 20.0
    assert row_of(x, quantize(x))["top_channels"][:2] == [[3, 50.0], [5, 20.0]]


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1), (None, None)])
def test_a_large_operand_is_sampled_but_its_outliers_are_not_missed(monkeypatch, block):
    monkeypatch.setattr(operand_stats, "SAMPLE", 128 * 256)
    x = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0))
    x[-1, 17] = 1e4
    found, q = row_of(x, quantize(x, block)), quantize(x, block)
    assert found["values"] <= 128 * 256
    assert found["cur_amax"] == 1e4
    assert found["top_channels"][0][0] == 17
    assert sum(found["scale_histogram"]["count"]) == q.scale.numel()


def test_a_sample_of_a_uniform_operand_has_the_statistics_of_the_whole(monkeypatch):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).repeat(16, 2)
    monkeypatch.setattr(operand_stats, "SAMPLE", x.numel())
    whole = row_of(x, quantize(x))
    monkeypatch.setattr(operand_stats, "SAMPLE", 256 * 256)
    part = row_of(x, quantize(x))
    assert (whole["values"], part["values"]) == (x.numel(), 256 * 256)
    for name in ("kurtosis", "snr_db", "mean_blockwise_dynamic_range"):
        assert part[name] == pytest.approx(whole[name], rel=0.1), name


def test_a_sample_of_zeros_does_not_end_the_run(monkeypatch):
    monkeypatch.setattr(operand_stats, "SAMPLE", 256)
    x = torch.zeros(64, 128)
    x[5] = 1.0
    found = row_of(x, quantize(x))
    assert (found["cur_amax"], found["between_blocks_dynamic_range"], found["dynamic_range"]) == (1.0, 0.0, 0.0)


def test_stacked_weights_are_one_operand(monkeypatch):
    w = torch.stack([operand(seed) for seed in range(3)])
    q = quantize(w, (128, 128))
    found = row_of(w, q)
    assert found["values"] == w.numel()
    monkeypatch.setattr(operand_stats, "SAMPLE", 2 * M * K)
    assert row_of(w, q)["values"] == 2 * M * K


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_values_neither_vanish_nor_overflow(scale):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    found, expected = row_of(x * scale, quantize(x * scale)), row_of(x, quantize(x))
    assert found["kurtosis"] == pytest.approx(expected["kurtosis"], rel=1e-4)
    assert found["snr_db"] == pytest.approx(expected["snr_db"], abs=0.5)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_zeros_and_broken_values_give_a_row_that_json_can_hold(value):
    x = torch.full((3, 130), value)
    row = row_of(x, quantize(x))
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_leaves_no_statistic_that_reads_as_no_loss(value):
    x = operand()
    x[1, 3] = value
    row = row_of(x, quantize(x))
    json.dumps(row, allow_nan=False)
    unknown = {name for name, statistic in row.items() if statistic is None}
    assert unknown >= {"underflows%", "overflows%", "subnormals%", "cur_amax", "dynamic_range", "mse", "snr_db"}
    assert unknown >= {"worst_over_rms", "bias", "max_blockwise_dynamic_range", "mean_blockwise_dynamic_range"}
    assert row["top_channels"][0] == [3, None]
    assert row["top_channels"][1][0] == 7
    assert row["outlier_channels"] == row_of(operand(), quantize(operand()))["outlier_channels"] + 1


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (1e3, 10.0, 20.0),
        (1e-200, 1e200, -4000.0),
        (1e200, 1e-200, 4000.0),
        *((1.0, noise, None) for noise in (0.0, math.inf, math.nan)),
        *((signal, 1.0, None) for signal in (0.0, math.inf, math.nan)),
    ],
)
def test_a_signal_to_noise_ratio_that_underflows(signal, noise, expected):
    assert snr_db(signal, noise) == (expected if expected is None else pytest.approx(expected))


def test_values_that_became_zero_are_counted_though_others_became_nonzero():
    """wgrad's h is quantized from SwiGLU's output and compared with fprop's h, some of whose values are flushed."""
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([1.0, 2.0**-30, 0.0])  # flushed: the second
    after = torch.ones(1, 128)
    after[0, 1] = 0
    assert row_of(x, quantize(after))["underflows%"] == 50.0
