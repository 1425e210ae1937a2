"""The small benchmarks run on this machine and give rows."""

import pytest

from octile.bench import casts, gemm


@pytest.mark.parametrize("bench", [casts, gemm])
def test_every_figure_stands_beside_a_peer(bench, monkeypatch):
    monkeypatch.setattr(gemm, "CPU_SHAPES", [(32, 16, 128)])
    monkeypatch.setattr(gemm, "CPU_GROUPS", (2, 16, 16, 128))
    monkeypatch.setattr(casts, "CPU_SHAPE", (128, 256))
    rows = bench.rows()
    assert rows
    assert all(row.value > 0 and row.against.ratio == row.value / row.against.value for row in rows)
