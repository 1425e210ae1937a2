"""Tests of the power calculation of the loss experiment."""

import math

import pytest

from experiments.loss.power import pairs_needed, power, power_after
from experiments.loss.report import BAR


def test_gaps_without_spread_inside_the_bar_always_show_equality():
    assert power(2, 0.5 * BAR, 1e-9) == 1.0


def test_gaps_without_spread_outside_the_bar_never_show_equality():
    assert power(2, 1.5 * BAR, 1e-9) == 0.0


def test_many_pairs_have_the_power_of_the_normal_distribution():
    n, deviation = 60, 0.0085
    inside = BAR * math.sqrt(n) / deviation - 2.0  # t of 59 degrees of freedom is 2.001
    assert power(n, 0.0, deviation) == pytest.approx(math.erf(inside / math.sqrt(2)), abs=0.05)


def test_a_larger_gap_needs_more_pairs():
    assert pairs_needed(0.0, 0.002) < pairs_needed(0.001, 0.002)


def test_a_gap_at_the_bar_cannot_be_shown_to_be_equal():
    assert pairs_needed(BAR, 0.002) is None


def test_gaps_without_spread_stay_where_they_are():
    assert power_after([0.5 * BAR, 0.5 * BAR + 1e-9], 3) == 1.0
    assert power_after([1.5 * BAR, 1.5 * BAR + 1e-9], 3) == 0.0


def test_many_more_pairs_decide_by_the_side_on_which_the_mean_lies():
    gaps = [0.0015, 0.0035, 0.002, 0.003, 0.0025]  # mean: the bar
    assert power_after(gaps, 2000) == pytest.approx(0.5, abs=0.05)
