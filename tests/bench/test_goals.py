"""Verdicts: a goal is met only by all of its shapes."""

import pytest
import torch

from octile.bench import goals, shapes
from octile.bench.casts import _cases
from octile.bench.rows import Row, compare


def rows(ratio, cases=shapes.LARGE, peer="DeepGEMM"):
    return [compare(case.name, case.what, ratio, "TFLOP/s", peer, 1.0) for case in cases]


def verdict(measured):
    (only,) = goals.judge(measured)
    return only


@pytest.mark.parametrize(
    ("ratio", "floor", "aim"), [(0.92, False, False), (0.97, True, False), (1.0, True, False), (1.06, True, True)]
)
def test_a_floor_and_an_aim_are_bounds(ratio, floor, aim):
    assert (verdict(rows(ratio)).floor, verdict(rows(ratio)).aim) == (floor, aim)


def test_one_slow_shape_misses_what_is_asked_of_each():
    measured = [*rows(1.2)[1:], *rows(0.9)[:1]]
    found = verdict(measured)
    assert found.mean > 1.06
    assert found.worst == shapes.LARGE[0].name
    assert not found.floor


def test_a_shape_that_could_not_be_measured_misses_the_goal():
    found = verdict(rows(2.0)[1:])
    assert (found.measured, found.asked, found.floor) == (7, 8, False)


def test_what_is_only_an_aim_has_no_floor():
    assert verdict(rows(0.98, peer="cuBLASLt fast")).floor is None


def test_every_shape_counts_for_a_goal():
    counted = {case for goal in goals.GOALS for case in goal.cases}
    assert counted == set(shapes.GPU)


def test_the_mean_is_geometric():
    half, double = rows(0.5)[:4], rows(2.0)[4:]
    assert verdict([*half, *double]).mean == pytest.approx(1)


def test_a_line_says_what_was_missed():
    assert "floor mean ≥ 0.97× and each ≥ 0.93× met, aim mean ≥ 1.06× and each ≥ 1.00× MISSED" in goals.in_words(
        rows(1.01)
    )


def test_the_slowest_call_of_the_host_is_judged():
    times = {("a", "FP8"): 8.0, ("b", "FP8"): 12.0, ("b", "FP8 1D1D"): 9.0}  # of one shape, too
    measured = [Row(case, what, time, "µs of host") for (case, what), time in times.items()]
    assert goals.in_words(measured).endswith("at most 12.0 µs (b FP8): floor ≤ 25 met, aim ≤ 10 MISSED")


def casts(**ratios):
    return [compare("m", what, ratio, "GB/s", "copy", 1.0) for what, ratio in ratios.items()]


def test_casts_that_turn_have_bounds_of_their_own():
    measured = casts(**{"quantize 1×128": 0.9, "1×128 and turned": 0.86})
    once, twice = goals.casts_in_words(measured).splitlines()
    assert once.endswith("floor each ≥ 0.80× met, aim each ≥ 0.92× MISSED")
    assert twice.endswith("floor each ≥ 0.70× met, aim each ≥ 0.85× met")


def test_of_permutation_and_optimizer_a_floor_is_asked_only():
    assert goals.casts_in_words(casts(**{"AdamW, BF16 moments": 0.9})).endswith("floor each ≥ 0.80× met")


def test_the_slowest_cast_of_all_shapes_is_judged():
    measured = [*casts(**{"RMSNorm, 1×128": 0.7}), compare("larger", "RMSNorm, 1×128", 0.9, "GB/s", "copy", 1.0)]
    assert "smallest 0.700× (RMSNorm, 1×128, m)" in goals.casts_in_words(measured)


def test_every_cast_that_is_judged_is_measured():
    what = {name for name, _, _ in _cases(torch.randn(128, 256))}
    assert what >= goals.ONCE | goals.TWICE | goals.MOVES
