"""The small benchmarks: what they time does the same work twice, and a time becomes the right figure."""

import pytest
import torch

from octile.bench import casts, gemm

OURS, PEER = 1e-3, 2e-3  # seconds


@pytest.fixture
def results(monkeypatch):
    """[(our result, the peer's)] of each measurement; every time is made up and nothing is timed."""
    found = []

    def seconds(candidates, rounds):
        found.append([candidate() for candidate in candidates.values()])
        return dict(zip(candidates, (OURS, PEER), strict=True))

    for bench in (casts, gemm):
        monkeypatch.setattr(bench, "seconds", seconds)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gemm, "CPU_SHAPES", [(32, 16, 128)])
    monkeypatch.setattr(gemm, "CPU_GROUPS", (2, 16, 16, 128))
    monkeypatch.setattr(casts, "CPU_SHAPE", (128, 256))
    return found


def test_a_product_and_its_peer_compute_the_same(results):
    gemm.rows()
    for ours, theirs in results:
        assert (ours.float() - theirs).norm() < 0.05 * theirs.norm()


def test_a_product_counts_a_multiplication_and_an_addition(results):
    assert {row.value for row in gemm.rows()} == {2 * 32 * 16 * 128 / OURS / 1e12}


def test_a_cast_counts_the_bytes_that_it_reads_and_writes(results):
    values, tiles = 128 * 256, 128 * 2
    row = next(row for row in casts.rows() if row.what == "quantize 1×128")
    assert row.value == (4 * values + values + 4 * tiles) / OURS / 1e9


def test_a_copy_counts_the_bytes_that_it_reads_and_writes(results):
    assert {row.against.value for row in casts.rows()} == {2 * 4 * 128 * 256 / PEER / 1e9}


def test_quantize_and_dequantize_are_measured_in_each_block(results):
    blocks = ("1×128", "128×1", "128×128", "all×all")
    assert [row.what for row in casts.rows()] == [f"{cast} {b}" for b in blocks for cast in ("quantize", "dequantize")]
