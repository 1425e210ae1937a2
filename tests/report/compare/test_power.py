"""How many pairs of runs show that a recipe stays within the bar."""

import math

import numpy as np
import pytest

from octile.report.compare.intervals import student_interval
from octile.report.compare.power import MAX_PAIRS, POWER, largest_deviation, pairs_needed
from octile.report.compare.summary import planned_pairs


@pytest.mark.parametrize("pairs", [2, 5, 14])
def test_intervals_over_gaps_of_the_largest_deviation_lie_within_the_bar_as_often_as_promised(pairs: int):
    deviation, draw = largest_deviation(pairs, 1.0), np.random.default_rng(7)
    intervals = (student_interval(draw.normal(0.0, deviation, pairs)) for _ in range(4_000))
    inside = np.mean([max(-interval.low, interval.high) <= 1.0 for interval in intervals])
    assert inside == pytest.approx(POWER, abs=4 * math.sqrt(POWER * (1 - POWER) / 4_000))


@pytest.mark.parametrize("deviation", [0.001, 0.0025, 0.004])
def test_the_pairs_needed_are_the_fewest(deviation: float):
    needed = pairs_needed(deviation, 0.0025)
    assert largest_deviation(needed, 0.0025) >= deviation > largest_deviation(needed - 1, 0.0025)


@pytest.mark.slow
def test_no_pairs_are_named_that_nobody_trains():
    assert pairs_needed(largest_deviation(MAX_PAIRS, 0.0025), 0.0025) == MAX_PAIRS
    assert pairs_needed(0.1, 0.0025) is None


def test_a_plan_of_one_pair_says_that_it_decides_nothing():
    assert planned_pairs(1, 0.0025) == (
        "one pair of runs gives no verdict on the bar of 0.25%; 5 pairs of runs show that a recipe without a gap stays "
        "within 0.25% of BF16, with a probability of 80%, where the gaps of pairs have a standard deviation of at "
        "most 0.13%"
    )
