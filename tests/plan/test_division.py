"""How a sequence of costs is divided among the stages of a pipeline."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.plan.division import divide, fold

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(COSTS, st.data())
def test_a_division_has_the_smallest_largest_part_and_then_the_smallest_sum_of_squares(costs, data):
    n = data.draw(st.integers(1, len(costs)))
    bounds = divide(tuple(map(float, costs)), n)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == len(costs)
    assert all(begin < end for begin, end in bounds)
    all_cuts = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), n - 1))
    parts = ([sum(costs[begin:end]) for begin, end in pairwise(cuts)] for cuts in all_cuts)
    found = [sum(costs[begin:end]) for begin, end in bounds]
    assert (max(found), sum(part**2 for part in found)) == min((max(p), sum(part**2 for part in p)) for p in parts)


def test_of_divisions_with_the_same_longest_part_that_with_the_shortest_others_is_taken():
    assert divide((1.0, 1.0, 1.0, 1.0, 9.0), 3) == [(0, 2), (2, 4), (4, 5)]


def test_of_equally_good_divisions_the_one_that_ends_its_first_part_first_is_taken():
    assert divide((2.0, 1.0, 2.0), 2) == [(0, 1), (1, 3)]
    assert divide((1.0, 1.0, 1.0), 2) == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("costs", "bounds"),
    [  # the smallest sum of squares among divisions with the same longest part
        ((7, 8, 2, 5, 6, 5, 4), [(0, 2), (2, 5), (5, 7)]),
        ((9, 2, 7, 7, 5, 6, 8), [(0, 1), (1, 3), (3, 5), (5, 7)]),
    ],
)
def test_the_other_parts_have_the_smallest_sum_of_squares(costs, bounds):
    assert divide(tuple(map(float, costs)), len(bounds)) == bounds


def quality(costs, bounds):
    """The largest sum of a rank's two parts, and the sum of squares of all parts."""
    parts = [sum(costs[begin:end]) for begin, end in bounds]
    return max(parts[r] + parts[-1 - r] for r in range(len(parts) // 2)), sum(part**2 for part in parts)


def best_quality(costs, n):
    all_cuts = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), 2 * n - 1))
    return min(quality(costs, [*pairwise(cuts)]) for cuts in all_cuts)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.data())
def test_the_two_parts_of_a_fold_have_the_smallest_largest_sum(costs, data):
    n = data.draw(st.integers(1, len(costs) // 2))
    found = fold(tuple(map(float, costs)), n)
    assert quality(costs, found) == best_quality(costs, n)
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(costs)


@given(st.lists(st.sampled_from([0.1, 0.3, 0.7]), min_size=4, max_size=9))
def test_rounding_errors_of_sums_decide_nothing(costs):
    exact = [Fraction(cost) for cost in costs]
    assert quality(exact, fold(tuple(costs), 2)) == best_quality(exact, 2)
