"""Tests of the verdicts on goals: a goal is met only if all of its shapes meet it."""

from dataclasses import replace

import pytest
import torch

from octile.bench import drawn, goals, shapes
from octile.bench.casts import BETWEEN_GEMMS, READ_TWICE, TWO_PASSES, _cases, _gate_cases, _loss_cases, _narrow_cases
from octile.bench.drawn import DrawnClass
from octile.bench.rows import Row, compare
from octile.models.config import ModelConfig


def rows(ratio, cases=shapes.LARGE, peer="DeepGEMM"):
    return [compare(case.name, case.what, ratio, "TFLOP/s", peer, 1.0, case.drawn or None) for case in cases]


def verdict(measured):
    (only,) = goals.judge(measured)
    return only


@pytest.mark.parametrize(
    ("ratio", "floor", "aim"), [(0.99, False, False), (1.0, True, False), (1.03, True, False), (1.04, True, True)]
)
def test_a_floor_and_an_aim_are_bounds(ratio, floor, aim):
    assert (verdict(rows(ratio)).floor, verdict(rows(ratio)).aim) == (floor, aim)


def test_one_slow_shape_misses_the_bound_of_each():
    measured = [*rows(1.2)[1:], *rows(0.9)[:1]]
    found = verdict(measured)
    assert found.mean > 1.06
    assert found.worst == shapes.LARGE[0].name
    assert not found.floor


def test_a_shape_that_could_not_be_measured_misses_the_goal():
    found = verdict(rows(2.0)[1:])
    assert (found.measured, found.needed, found.floor) == (7, 8, False)


def test_an_aim_alone_has_no_floor():
    assert verdict(rows(0.98, peer="cuBLASLt fast")).floor is None


def test_a_clean_cache_is_judged_apart():
    clean = rows(1.07, shapes.M128, goals.DEEP_GEMM_CLEAN)
    written, read = goals.judge([*rows(1.03, shapes.M128), *clean])
    assert (written.mean, read.mean) == (pytest.approx(1.03), pytest.approx(1.07))
    assert (written.floor, read.floor) == (False, True)


def test_every_shape_counts_for_a_goal():
    listed = [goal.cases for goal in goals.GOALS if not isinstance(goal.cases, DrawnClass)]
    assert {case for cases in listed for case in cases} == set(shapes.GPU)


def test_every_class_of_drawn_shapes_counts_for_a_goal():
    assert {goal.cases for goal in goals.GOALS if isinstance(goal.cases, DrawnClass)} == set(drawn.CLASSES)


def drawn_rows(ratio, peer="DeepGEMM"):
    return rows(ratio, [case for case in drawn.drawn_cases(1) if case.drawn == "large"], peer)


def test_drawn_shapes_are_judged_by_their_class():
    found = verdict(drawn_rows(1.02))
    assert (found.goal.cases, found.measured, found.needed) == (drawn.LARGE, 16, 16)
    assert (found.floor, found.aim) == (True, False)


def test_a_drawn_shape_that_the_peer_lacks_is_not_needed():
    found = verdict([*drawn_rows(1.02)[1:], *drawn_rows(1.02, peer="BF16")[:1]])
    assert (found.measured, found.needed, found.floor) == (15, 15, True)


def test_a_drawn_shape_that_could_not_be_measured_misses_the_goal():
    found = verdict(drawn_rows(2.0)[1:])
    assert (found.measured, found.needed, found.floor) == (15, 16, False)


def test_the_mean_is_geometric():
    half, double = rows(0.5)[:4], rows(2.0)[4:]
    assert verdict([*half, *double]).mean == pytest.approx(1)


def test_a_line_names_the_missed_goal():
    line = "floor mean ≥ 1.00× and each ≥ 0.95× met, aim mean ≥ 1.04× MISSED"
    assert line in goals.gemm_verdicts(rows(1.01))


def test_the_slowest_call_of_the_host_is_judged():
    times = {("a", "FP8"): 8.0, ("b", "FP8"): 12.0, ("b", "FP8 1D1D"): 9.0}  # two times of the same shape
    measured = [Row(case, what, time, "µs of host") for (case, what), time in times.items()]
    assert goals.gemm_verdicts(measured).endswith("at most 12.0 µs (b FP8): floor ≤ 25 met, aim ≤ 10 MISSED")


def operator(what, ratio, goal, case="m", peer="copy"):
    return compare(case, what, ratio, "GB/s", peer, 1.0, goal)


def test_operators_that_transpose_have_bounds_of_their_own():
    measured = [
        operator("quantize 1×128", 0.9, goals.WRITE_ONCE),
        operator("1×128 and transposed", 0.86, goals.WRITE_TWICE),
    ]
    once, twice = goals.casts_verdicts(measured).splitlines()
    assert once.endswith("floor each ≥ 0.80× met, aim each ≥ 0.92× MISSED")
    assert twice.endswith("floor each ≥ 0.70× met, aim each ≥ 0.85× met")


def test_permutation_and_optimizer_have_only_a_floor():
    (line,) = goals.casts_verdicts([operator("AdamW, BF16 moments", 0.9, goals.MOVES)]).splitlines()
    assert line.endswith("floor each ≥ 0.80× met")


def test_the_cross_entropy_has_a_floor_of_its_own():
    (line,) = goals.casts_verdicts([operator("cross-entropy", 0.79, goals.LOSS)]).splitlines()
    assert line.startswith("cross-entropy of logits, vs. a copy: smallest 0.790×")
    assert line.endswith("floor each ≥ 0.80× MISSED")


def test_the_slowest_operator_of_all_shapes_is_judged():
    ratios = {"m": 0.7, "larger": 0.9}
    measured = [operator("RMSNorm, 1×128", ratio, goals.WRITE_ONCE, case) for case, ratio in ratios.items()]
    assert "smallest 0.700× (RMSNorm, 1×128, m)" in goals.casts_verdicts(measured)


def test_narrow_rows_have_a_floor_of_their_own():
    measured = [
        operator("RMSNorm, 1×128", 0.9, goals.WRITE_ONCE),
        operator("RMSNorm, 1×128", 0.75, goals.NARROW, "64×512"),
    ]
    wide, narrow = goals.casts_verdicts(measured).splitlines()
    assert "smallest 0.900× (RMSNorm, 1×128, m): floor each ≥ 0.80× met" in wide
    assert narrow.startswith("rows of 128 to 1024, vs. a copy: smallest 0.750×")
    assert narrow.endswith("floor each ≥ 0.70× met")


def test_an_operator_with_a_bound_is_judged_by_it():
    measured = [operator("gate", 0.2, goals.GATE), operator("gate", 0.75, goals.GATE, peer=goals.BOUND_OF_FLOPS)]
    (line,) = goals.casts_verdicts(measured).splitlines()
    assert line == "expert gates, with their GEMMs, vs. their bound: smallest 0.750× (gate, m): floor each ≥ 0.70× met"


def test_a_row_without_a_goal_is_not_judged():
    assert goals.casts_verdicts([operator("quantize 1×128", 0.1, None)]) == ""


def test_every_operator_with_several_passes_is_measured():
    wide, gates = _cases(128, 256, "cpu", torch.float32), _gate_cases(128, ModelConfig.tiny(), "cpu", torch.float32)
    assert {case.what for case in (*wide, *gates)} >= TWO_PASSES | READ_TWICE


def test_every_operator_between_gemms_is_measured_for_narrow_rows():
    narrow = _narrow_cases(128, 256, "cpu", torch.float32)
    assert {case.what for case in narrow} >= BETWEEN_GEMMS
    assert {case.goal for case in narrow} == {goals.NARROW}


def test_every_goal_judges_an_operator():
    cases = [*_cases(128, 256, "cpu", torch.float32), *_narrow_cases(128, 256, "cpu", torch.float32)]
    cases += _loss_cases(128, 256, "cpu", torch.float32)
    cases += _gate_cases(128, ModelConfig.tiny(), "cpu", torch.float32)
    assert {case.goal for case in cases} - {None} == set(goals.CASTS)


def test_every_operator_of_a_training_step_has_a_goal():
    unjudged = {case.what for case in _cases(128, 256, "cpu", torch.float32) if case.goal is None}
    assert {what for what in unjudged if not what.startswith("dequantize")} == {
        "quantize 128×1", "quantize all×all", "quantize, scale given"  # of other recipes
    }  # fmt: skip


# octile bench step


def verdicts(*rows: Row) -> list[str]:
    return goals.step_verdicts(rows).splitlines()


def speeds(*ratios: float) -> list[Row]:
    peers = zip(goals.TORCHAO, ratios, strict=False)
    return [compare(goals.DENSE, goals.STEP, ratio, "tokens/s", peer, 1.0) for peer, ratio in peers]


def test_the_fastest_peer_decides():
    blockwise, every = verdicts(*speeds(0.9, 1.1, 1.2))
    assert blockwise.endswith("1.100: floor ≥ 1 met")
    assert every.endswith("0.900 (torchao tensorwise): aim ≥ 1 MISSED")


def test_a_peer_that_was_not_measured_misses_the_bound_and_is_named():
    assert verdicts(*speeds(1.3, 1.3))[-1].endswith("aim ≥ 1 MISSED (not measured: torchao rowwise)")
    assert verdicts(*speeds(1.3, 0.9))[-1].endswith("aim ≥ 1 MISSED")


def test_fewer_bytes_are_better():
    saved = compare(goals.DENSE, goals.SAVED, 0.52, "bytes", goals.BF16, 1.0)
    assert verdicts(saved) == ["dense, bytes saved vs. compiled BF16: 0.520: floor ≤ 0.56 met, aim ≤ 0.5 MISSED"]


def test_a_share_is_judged_without_a_peer():
    share = Row(goals.SLICE, goals.OUTSIDE, 30.0, "% of a step")
    assert verdicts(share)[0].endswith("30.000: floor ≤ 35 met, aim ≤ 25 MISSED")
    assert verdicts(replace(share, value=36.0))[0].endswith("floor ≤ 35 MISSED, aim ≤ 25 MISSED")


def test_bytes_per_parameter_are_summed():
    rows = [Row(goals.DENSE, f"{what}, of a parameter", 6.0, "bytes", goal=goals.OF_A_PARAMETER) for what in "ab"]
    cached = Row(goals.DENSE, "cached FP8, of a parameter", 2.0, "bytes")
    assert verdicts(*rows, cached) == ["bytes per parameter, without cached FP8 weights: 12.00: floor ≤ 12 met"]
