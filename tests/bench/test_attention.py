"""Tests of what needs no GPU in the measurement of decoding's attention."""

import pytest
import torch

from octile.bench import attention
from octile.bench.attention import Shape, flops
from octile.bench.goals import (
    BANDWIDTH,
    DENSE_DECODING,
    FLOPS,
    attention_goal,
    attention_verdicts,
    flash_mla_verdicts,
    slow_copies,
)
from octile.bench.rows import Row, compare


def test_each_form_of_the_cache_is_compared_with_a_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "CPU_SHAPES", (Shape(2, 64, 2),))
    monkeypatch.setattr(attention, "GPU_SHAPES", ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = list(attention.rows())
    assert [(row.case, row.what) for row in found] == [
        (f"2 texts of 64, 2 heads, {form}", what) for form in ("BF16", "FP8") for what in ("bandwidth", "FLOPs")
    ]
    assert all(row.against is not None for row in found[::2])
    assert {row.unit for row in found} == {"MB/s", "GFLOP/s"}  # TFLOP/s of a CPU would be thousandths


def test_a_copy_is_of_a_kernel_and_of_all_bytes():
    for n in (64, 17):
        source, target = torch.arange(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
        with torch.profiler.profile() as record:
            attention.copying(source, target)()
        assert torch.equal(target, ~source)
        assert "aten::copy_" not in {event.name for event in record.events()}


def test_flops_are_those_of_scores_and_weighted_values():
    assert flops(Shape(128, 4096, 128)) == 2 * 128 * 4096 * 128 * (576 + 512)


def measured(texts: str, goal: str, gigabytes: float, copy: float) -> Row:
    return compare(f"{texts}, {goal}", BANDWIDTH, gigabytes, "GB/s", "copy", copy, goal)


BF16, FP8, ALL_HEADS = attention_goal(16, "BF16"), attention_goal(16, "FP8"), attention_goal(128, "BF16")


def test_the_worst_context_of_each_format_is_judged():
    rows = [
        measured("128 texts of 4096", BF16, 3.4, 4),
        measured("128 texts of 8192", BF16, 3.8, 4),
        measured("128 texts of 4096", FP8, 2.8, 4),
        Row(f"128 texts of 4096, {ALL_HEADS}", FLOPS, 550, "TFLOP/s", goal=ALL_HEADS),
    ]
    assert attention_verdicts(rows).splitlines() == [
        "16 heads, BF16: smallest 0.85× of a copy (128 texts of 4096, 16 heads, BF16): floor ≥ 0.75 met, "
        "aim ≥ 0.9 MISSED",
        "16 heads, FP8: smallest 0.7× of a copy (128 texts of 4096, 16 heads, FP8): floor ≥ 0.75 MISSED, "
        "aim ≥ 0.9 MISSED",
        "128 heads, BF16: smallest 550 TFLOP/s (128 texts of 4096, 128 heads, BF16): floor ≥ 300 met, aim ≥ 600 MISSED",
    ]


def test_a_slow_copy_is_named_and_not_judged_by():
    rows = [measured("128 texts of 4096", FP8, 2.8, 2.7), measured("128 texts of 8192", FP8, 3.6, 4)]
    assert slow_copies(rows).splitlines() == [
        "128 texts of 4096, 16 heads, FP8: its copy, 2.7 GB/s, is below 0.9 of the fastest of this run, 4; "
        "the ratio to the fastest is 0.700"
    ]
    assert "smallest 0.7× of a copy (128 texts of 4096, 16 heads, FP8): floor ≥ 0.75 MISSED" in attention_verdicts(rows)
    assert slow_copies(rows[1:]) == ""


def test_flash_mla_has_goals_of_its_own_and_is_no_copy():
    case = f"128 texts of 4096, {ALL_HEADS}"
    rows = [
        measured("128 texts of 4096", ALL_HEADS, 2300, 3000),
        compare(case, FLOPS, 536, "TFLOP/s", "FlashMLA", 585, DENSE_DECODING),
        compare(case.replace("4096", "8192"), FLOPS, 590, "TFLOP/s", "FlashMLA", 585, DENSE_DECODING),
    ]
    assert slow_copies(rows) == ""
    assert flash_mla_verdicts(rows) == f"decoding in BF16, vs. FlashMLA: smallest 0.916× ({case}): floor ≥ 1.00× MISSED"
    assert flash_mla_verdicts(rows[2:]).endswith("floor ≥ 1.00× met")
    assert flash_mla_verdicts(rows[:1]) == ""
