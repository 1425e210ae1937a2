"""Tests of what needs no GPU in the measurement of decoding's attention."""

import pytest

from octile.bench import attention
from octile.bench.attention import Shape, flops
from octile.bench.goals import attention_verdicts
from octile.bench.rows import Row, compare


def test_each_form_of_the_cache_is_compared_with_a_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "CPU_SHAPES", (Shape(2, 64, 2),))
    monkeypatch.setattr(attention, "GPU_SHAPES", ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = list(attention.rows())
    assert [(row.case, row.what) for row in found] == [
        (f"2 texts of 64, 2 heads, {form}", what) for form in ("BF16", "FP8") for what in ("bytes", "products")
    ]
    assert all(row.against is not None for row in found[::2])


def test_flops_are_those_of_scores_and_weighted_values():
    assert flops(Shape(128, 4096, 128)) == 2 * 128 * 4096 * 128 * (576 + 512)


def test_the_worst_context_of_each_form_is_judged():
    measured = [
        compare("128 texts of 4096, 16 heads, BF16", "bytes", 3.4, "GB/s", "copy", 4),
        compare("128 texts of 8192, 16 heads, BF16", "bytes", 3.8, "GB/s", "copy", 4),
        compare("128 texts of 4096, 16 heads, FP8", "bytes", 2.8, "GB/s", "copy", 4),
        Row("128 texts of 4096, 128 heads, BF16", "products", 550, "TFLOP/s"),
    ]
    assert attention_verdicts(measured).splitlines() == [
        "16 heads, BF16: smallest 0.85× of a copy (128 texts of 4096): floor ≥ 0.75 met, aim ≥ 0.9 MISSED",
        "16 heads, FP8: smallest 0.7× of a copy (128 texts of 4096): floor ≥ 0.75 MISSED, aim ≥ 0.9 MISSED",
        "128 heads, BF16: smallest 550 TFLOP/s (128 texts of 4096): floor ≥ 300 met, aim ≥ 600 MISSED",
    ]
