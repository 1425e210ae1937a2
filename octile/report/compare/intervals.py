"""How sure is a mean? Two intervals that hold the true one in 95 of 100 repetitions, and when they can.

    Student    mean ± t · s/√n. Its coverage is exact for normal samples of any size from two on; two give so wide an
               interval (12.7 standard errors) that it says little.
    bootstrap  how the mean scatters when the samples are drawn again from themselves. It assumes no shape, but never
               leaves the range of the samples, which holds the true median with probability 1 − 2^(1−n) only: 50% for
               two samples, 75% for three, 97% for six. So it is refused below six. Small samples scatter too little;
               the quantiles are therefore moved outwards, as far as Student's t lies beyond the normal distribution.

Sources: Student, "The probable error of a mean" (1908); Hesterberg, "What teachers should know about the bootstrap"
(arXiv 1411.5279) §3.4, the expanded percentile interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from octile.report.run.metrics import Floats

LEVEL = 0.95
FEWEST_TO_BOOTSTRAP = 6
RESAMPLES, DRAWN = 10_000, 300_000  # at least so many resamples; more of small samples, whose tails are asked for


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, in the samples' unit."""

    low: float
    high: float


def student_interval(samples: Floats) -> Interval | None:
    """Of the mean of samples [n], float64; None for fewer than two."""
    n = len(samples)
    if n < 2:
        return None
    half = student_quantile(n - 1) * float(samples.std(ddof=1)) / math.sqrt(n)
    return Interval(float(samples.mean()) - half, float(samples.mean()) + half)


def bootstrap_interval(samples: Floats) -> Interval | None:
    """Of the mean of samples [n], float64; None for fewer than six. The same samples give the same interval."""
    n = len(samples)
    if n < FEWEST_TO_BOOTSTRAP:
        return None
    draw = np.random.default_rng(0)
    batches = max(RESAMPLES, DRAWN // n) // 100
    means = np.concatenate([samples[draw.integers(n, size=(100, n))].mean(axis=1) for _ in range(batches)])
    outside = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(n - 1))
    low, high = np.quantile(means, [outside, 1 - outside])
    return Interval(float(low), float(high))


@cache
def student_quantile(freedom: int) -> float:
    """t, so that Student's distribution with `freedom` ≥ 1 degrees lies within ±t with probability LEVEL.

    With t = √freedom · tan θ its density becomes cos θ to the power of freedom − 1, on an interval without tails.
    """
    theta = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(theta) ** (freedom - 1)
    inside = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(LEVEL, inside / inside[-1], theta)))
