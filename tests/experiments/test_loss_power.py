"""Tests of the power calculation of the loss experiment."""

import math
import re
from pathlib import Path

import pytest

from experiments.loss.power import LOOKS, interval_after, measured, pairs_needed, power, power_after, power_outside
from experiments.loss.report import BAR, Results


def test_gaps_without_spread_inside_the_bar_always_show_equality():
    assert power(2, 0.5 * BAR, 1e-9) == 1.0


def test_gaps_without_spread_outside_the_bar_never_show_equality():
    assert power(2, 1.5 * BAR, 1e-9) == 0.0


def test_only_gaps_above_the_bar_are_outside():
    assert power_outside(2, 1.5 * BAR, 1e-9) == 1.0
    assert power_outside(2, 0.5 * BAR, 1e-9) == 0.0
    assert power_outside(2, -1.5 * BAR, 1e-9) == 0.0


def test_a_gap_at_the_bar_is_outside_as_often_as_the_level_says():
    assert power_outside(12, BAR, 0.002) == pytest.approx(0.025, abs=0.005)


def test_many_pairs_have_the_power_of_the_normal_distribution():
    n, deviation = 60, 0.0085
    inside = BAR * math.sqrt(n) / deviation - 2.0  # t of 59 degrees of freedom is 2.001
    assert power(n, 0.0, deviation) == pytest.approx(math.erf(inside / math.sqrt(2)), abs=0.05)


def test_a_larger_gap_needs_more_pairs():
    assert pairs_needed(0.0, 0.002) < pairs_needed(0.001, 0.002)


@pytest.mark.slow
def test_a_gap_at_the_bar_cannot_be_shown_to_be_equal():
    assert pairs_needed(BAR, 0.002) is None


def test_gaps_without_spread_stay_where_they_are():
    assert power_after([0.5 * BAR, 0.5 * BAR + 1e-9], 3) == 1.0
    assert power_after([1.5 * BAR, 1.5 * BAR + 1e-9], 3) == 0.0


@pytest.mark.exhaustive  # draws 40 million gaps
def test_many_more_pairs_decide_by_the_side_on_which_the_mean_lies():
    gaps = [0.0015, 0.0035, 0.002, 0.003, 0.0025]  # mean: the bar
    assert power_after(gaps, 2000) == pytest.approx(0.5, abs=0.05)


def test_an_interval_that_was_looked_at_once_is_students():
    interval = interval_after([0.0, 0.002, 0.004], 1)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.002 - 0.0049683, 0.002 + 0.0049683), abs=1e-6)  # t: 4.3027


def test_an_interval_that_was_looked_at_five_times_has_a_level_of_99_percent():
    interval = interval_after([0.0, 0.002, 0.004], 5)
    assert interval is not None
    assert interval.high == pytest.approx(0.002 + 9.9248 * 0.002 / math.sqrt(3), abs=1e-6)  # Student's t at 99.5%


def test_looks_are_counted_up_to_the_pairs_of_the_record():
    r = Results.read(Path(__file__).parents[2] / "experiments" / "loss" / "one-rounding" / "runs")
    for (group, size, pairs), looks in LOOKS.items():
        assert len(r.gaps(group, size, "deepseek_v3")) == pairs == looks[-1]
    assert re.search(r"^80m, .* −0\.16 … \+0\.14% +6 +−0\.21 … \+0\.19%$", measured(r), re.MULTILINE)
