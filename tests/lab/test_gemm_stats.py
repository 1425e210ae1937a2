"""Tests of a GEMM's errors against exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from octile.formats import INT8
from octile.lab.gemm_stats import OperandSample, evenly_spaced, gemm_errors
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.scaled import quantize

K = 300


def operands(fmt_name: str = "e4m3"):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, K, generator=g), torch.randn(10, K, generator=g).abs()
    if fmt_name == "int8":
        return a, quantize(a, (1, 128), INT8), b, quantize(b, (128, 128), INT8)
    return a, quantize(a, (1, 128)), b, quantize(b, (128, 128))


def exact(a: torch.Tensor, b: torch.Tensor) -> list[list[Fraction]]:
    rows = [[Fraction(v) for v in row] for row in a.tolist()]
    columns = [[Fraction(v) for v in row] for row in b.tolist()]
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in rows]


def slow_row(found: list[list[Fraction]], reference: list[list[Fraction]]) -> dict[str, float]:
    pairs = [(f, r) for fs, rs in zip(found, reference, strict=True) for f, r in zip(fs, rs, strict=True)]
    power, errors = sum(r * r for _, r in pairs), [f - r for f, r in pairs]
    return {
        "snr_db": 10 * math.log10(power / sum(e * e for e in errors)),
        "worst_over_rms": float(max(map(abs, errors))) / math.sqrt(power / len(pairs)),
        "bias": float(sum(e if r > 0 else -e for e, (_, r) in zip(errors, pairs, strict=True)))
        / float(sum(abs(r) for _, r in pairs)),
    }


def as_rows(errors, prefix):
    row = errors.row(prefix, errors.packed().tolist())
    return {name.removeprefix(f"{prefix}_"): value for name, value in row.items()}


@pytest.mark.slow
def test_both_errors_of_whole_gemms():
    a, q_a, b, q_b = operands()
    rows_a, rows_b = evenly_spaced(40), evenly_spaced(10)
    quantization, accumulation = gemm_errors(
        OperandSample.of(a[rows_a], q_a, rows_a), OperandSample.of(b[rows_b], q_b, rows_b)
    )
    true = exact(a[rows_a], b[rows_b])
    decoded = [
        [[Fraction(float(d)) * Fraction(float(s)) for d, s in zip(data, scales, strict=True)] for data, scales in pair]
        for pair in (_data_and_scales(q_a, rows_a), _data_and_scales(q_b, rows_b))
    ]
    quantized = [[sum(x * y for x, y in zip(r, c, strict=True)) for c in decoded[1]] for r in decoded[0]]
    assert as_rows(quantization, "q") == pytest.approx(slow_row(quantized, true), rel=1e-9)
    summed = tensor_core_scaled_matmul(q_a.data, q_a.scale, q_a.block, q_b.data, q_b.scale, q_b.block)[rows_a][
        :, rows_b
    ]
    found = [[Fraction(v) for v in row] for row in summed.tolist()]
    assert as_rows(accumulation, "a") == pytest.approx(slow_row(found, quantized), rel=1e-9)


def _data_and_scales(q, rows):
    """(codes, scale of each) of some rows."""
    scale = q.scale.repeat_interleave(q.block[0], 0).repeat_interleave(q.block[1], 1)[: q.shape[0], : q.shape[1]]
    return zip(q.data.float()[rows].tolist(), scale[rows].tolist(), strict=True)


@pytest.mark.parametrize("columns", [range(128), range(128, 300), range(37, 200), range(130, 140)])
def test_a_group_of_columns_is_a_separate_gemm(columns):
    a, q_a, b, q_b = operands()
    rows_a, rows_b = evenly_spaced(40), evenly_spaced(10)
    window = slice(columns.start, columns.stop)
    found, _ = gemm_errors(
        OperandSample.of(a[rows_a], q_a, rows_a, columns), OperandSample.of(b[rows_b], q_b, rows_b, columns)
    )
    true = a[rows_a][:, window].double() @ b[rows_b][:, window].double().mT
    values = q_a.dequantize().double()[rows_a][:, window] @ q_b.dequantize().double()[rows_b][:, window].mT
    assert float(found.sums["signal2"]) == pytest.approx(float(true.square().sum()), rel=1e-12)
    assert float(found.sums["error2"]) == pytest.approx(float((values - true).square().sum()), rel=1e-4)


def test_integers_have_no_accumulation_error():
    a, q_a, b, q_b = operands("int8")
    rows_a, rows_b = evenly_spaced(40), evenly_spaced(10)
    assert gemm_errors(OperandSample.of(a[rows_a], q_a, rows_a), OperandSample.of(b[rows_b], q_b, rows_b))[1] is None


@pytest.mark.parametrize(
    ("n", "start", "first", "last", "count"), [(5, 0, 0, 4, 5), (1000, 10, 10, 978, 32), (0, 3, None, None, 0)]
)
def test_samples_are_spread_over_all_rows(n, start, first, last, count):
    found = evenly_spaced(n, start).tolist()
    assert len(set(found)) == len(found) == count
    if count:
        assert (found[0], found[-1]) == (first, last)


def test_micro_batches_add_up():
    a, q_a, b, q_b = operands()
    rows_a, rows_b = torch.arange(16), torch.arange(10)
    one, other = (
        gemm_errors(OperandSample.of(a[r], q_a, r), OperandSample.of(b, q_b, rows_b))[0] for r in (rows_a, rows_a + 16)
    )
    both = torch.arange(32)
    one.add(other)
    together = gemm_errors(OperandSample.of(a[both], q_a, both), OperandSample.of(b, q_b, rows_b))[0]
    assert as_rows(one, "q") == pytest.approx(as_rows(together, "q"))
