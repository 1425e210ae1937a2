"""How many pairs of runs show that a recipe stays within the bar.

A recipe stays within the bar if Student's 95% interval of the mean gap over pairs does (two one-sided tests of level
2.5%; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). That depends on the number of pairs, the standard deviation of
their gaps, and chance. Here the true gap is zero and gaps are normally distributed, so that `POWER` is the best that
can be expected: a recipe with a gap of its own needs more pairs.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from octile.report.compare.intervals import student_quantile
from octile.report.run.metrics import Floats

POWER = 0.8  # the probability with which a recipe without a gap is shown to stay within the bar
MAX_PAIRS = 200
DRAWS = 20_000


def interval_reaches(gaps: Floats) -> Floats:
    """How far from zero Student's 95% interval over each row of gaps [draws, pairs] reaches: [draws]."""
    pairs = gaps.shape[1]
    half = student_quantile(pairs - 1) * gaps.std(axis=1, ddof=1) / math.sqrt(pairs)
    reaches: Floats = np.abs(gaps.mean(axis=1)) + half
    return reaches


def largest_deviation(pairs: int, bar: float) -> float:
    """The largest standard deviation of gaps with which so many pairs show that a recipe stays within the bar.

    Args:
        pairs: at least 2.
        bar: in the unit of the gaps.
    """
    return bar / _reach(pairs)


def pairs_needed(deviation: float, bar: float) -> int | None:
    """The fewest pairs that show that a recipe stays within the bar; None for more than MAX_PAIRS.

    Args:
        deviation: the standard deviation of the gaps.
        bar: in the same unit.
    """
    if largest_deviation(MAX_PAIRS, bar) < deviation:
        return None
    too_few, enough = 1, MAX_PAIRS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if largest_deviation(middle, bar) < deviation:
            too_few = middle
        else:
            enough = middle
    return enough


@cache
def _reach(pairs: int) -> float:
    """How far from zero the interval over gaps of deviation 1 reaches at most, with probability POWER."""
    return float(np.quantile(interval_reaches(np.random.default_rng(0).standard_normal((DRAWS, pairs))), POWER))
