"""Tests of the small benchmarks: octile and its peer do the same work, and a time becomes the right value."""

import pytest
import torch

from octile.bench import casts, gemm, shapes
from octile.bench.shapes import Case

OURS, PEER = 1e-3, 2e-3  # seconds


@pytest.fixture
def results(monkeypatch):
    """Simulate all times; return a list of (our result, the peer's result) per measurement."""
    found = []

    def seconds(candidates, rounds):
        found.append([candidate() for candidate in candidates.values()])
        return dict(zip(candidates, (OURS, PEER), strict=True))

    for bench in (casts, gemm):
        monkeypatch.setattr(bench, "work_seconds", seconds)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shapes, "CPU", [Case("dense", 32, 16, 128), Case("grouped", 128, 16, 128, 2)])
    monkeypatch.setattr(casts, "CPU_SHAPES", ((128, 256),))
    monkeypatch.setattr(casts, "NARROW_ROWS", {"cpu": 2**14})
    monkeypatch.setattr(casts, "HEADS", {"cpu": ((16, 96),)})
    monkeypatch.setattr(casts, "GATES", {"cpu": ((16, "tiny"),)})
    return found


def test_a_gemm_and_its_peer_compute_the_same(results):
    list(gemm.rows())
    for ours, theirs in results:
        assert (ours.float() - theirs).norm() < 0.05 * theirs.norm()


def test_a_gemm_counts_a_multiplication_and_an_addition(results):
    speed = next(row for row in gemm.rows() if row.unit == "TFLOP/s")
    assert speed.value == 2 * 32 * 16 * 128 / OURS / 1e12
    assert speed.against.ratio == PEER / OURS


def test_a_gemm_on_a_cpu_has_no_times_of_a_gpu(results):
    assert {row.unit for row in gemm.rows()} == {"TFLOP/s", "GB/s", "µs", "difference"}


def test_a_wrong_gemm_is_not_measured(results, monkeypatch):
    monkeypatch.setattr("octile.bench.gemm_case.matmul_nt_out", lambda out, *_: print(out.fill_(1.0)))
    with pytest.raises(ArithmeticError, match="differs from the high-precision GEMM"):
        next(gemm.rows())


def test_quantization_counts_the_bytes_that_it_reads_and_writes(results):
    values, tiles = 128 * 256, 128 * 2
    row = next(row for row in casts.rows() if row.what == "quantize 1×128")
    assert row.value == (4 * values + values + 4 * tiles) / OURS / 1e9


def test_a_copy_moves_what_the_operator_does_in_aligned_halves(results):
    for row in casts.rows():
        cast, copy = round(row.value * 1e9 * OURS), round(row.against.value * 1e9 * PEER)
        assert cast <= copy <= cast * (1 + 1 / casts.SMALL_PART) + 2, row.what


def test_an_operator_that_writes_twice_counts_both(results):
    values, tiles = 128 * 256, 128 * 2 + 256
    row = next(row for row in casts.rows() if row.what == "1×128 and transposed")
    assert row.value == (4 * values + 2 * values + 4 * tiles) / OURS / 1e9


def test_every_operator_is_measured(results):
    blocks = ("1×128", "128×1", "128×128", "all×all", "1×128 E5M6")
    measured: dict[str, list[str]] = {}
    for row in casts.rows():
        measured.setdefault(row.case, []).append(row.what)
    wide, *narrow, losses, gates, optimizer = measured.values()
    assert wide == [
        *(f"{cast} {b}" for b in blocks for cast in ("quantize", "dequantize")),
        "quantize, scale given",
        "1×128 and transposed",
        "requantize 1×128, transposed",
        "128×128 and transposed",
        "SwiGLU, 1×128",
        "SwiGLU, 1×128, inputs saved",
        "SwiGLU backward, 1×128 and transposed",
        "RMSNorm, 1×128",
        "RMSNorm, 1×128 and high precision",
        "RMSNorm backward",
        "SwiGLU",
        "SwiGLU backward",
        "RMSNorm",
        "permute to 8 experts",
        "unpermute, sums of 8",
        "weighted sums of 8",
        "weighted sums of 8, backward",
        "AdamW, BF16 moments",
        "norms of gradients",
    ]
    rotary = {"rotate in place", "latent keys", "latent keys backward"}
    assert [set(operators) for operators in narrow] == [casts.BETWEEN_GEMMS | rotary] * len(casts.NARROW_COLUMNS)
    assert losses == ["cross-entropy", "cross-entropy backward"]
    assert gates == [
        "gate",
        "gate backward",
        "balance of sequences",
        "balance of sequences, backward",
        "counts of tokens",
        "routing plan",
    ]
    assert optimizer == ["AdamW, BF16 moments", "norms of gradients"]
