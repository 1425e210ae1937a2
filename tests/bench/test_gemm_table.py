"""Tests of the table that `octile bench gemm` prints."""

from octile.bench.gemm_table import gemm_table, legend
from octile.bench.rows import Row, compare

ROWS = [
    compare("1×2×3", "FP8", 1250.0, "TFLOP/s", "A", 1000.0),
    compare("1×2×3", "FP8", 1250.0, "TFLOP/s", "B", 2500.0),
    Row("1×2×3", "FP8", 12.34, "µs"),
    compare("4×5×6", "FP8 1D1D", 99.5, "TFLOP/s", "B", 100.0),
    Row("4×5×6", "FP8 1D1D", 7e-4, "difference"),
]


def test_a_gemm_is_a_line_and_a_peer_a_column():
    assert gemm_table(ROWS).splitlines() == [
        "case   what        µs  TFLOP/s    × A    × B  difference",
        "1×2×3  FP8       12.3    1,250  1.250  0.500",
        "4×5×6  FP8 1D1D           99.5         0.995     7.0e-04",
    ]


def test_the_legend_explains_no_column_that_is_not_there():
    assert "host" not in legend(ROWS)
    assert "clean" not in legend(ROWS)
    assert "registers" not in legend(ROWS)
    assert "host: until a call returns" in legend([*ROWS, Row("1×2×3", "FP8", 9.0, "µs of host")])
