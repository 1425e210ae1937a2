"""95% confidence intervals of a mean: Student's and the bootstrap's.

    Student    mean ± t · s/√n. Its coverage is exact for two or more normally distributed samples; with two it is so
               wide (12.7 standard errors) that it says little.
    bootstrap  the quantiles of the means of resamples. It assumes no distribution, but never leaves the range of the
               samples, which contains the true median only with probability 1 − 2^(1−n): 50% for two samples, 75% for
               three, 97% for six. It is therefore not computed for fewer than six. Resamples of few samples scatter
               too little; the quantiles are widened by the ratio of Student's t to the normal distribution.

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
TEXT_BLOCKS = 32  # blocks into which held-out text is divided
MIN_BOOTSTRAP_SAMPLES = 6
MIN_RESAMPLES, MIN_DRAWS = 10_000, 300_000  # resamples, and values drawn in total: few samples are resampled more often


@dataclass(frozen=True)
class Interval:
    """An interval from `low` to `high`, in the unit of the samples."""

    low: float
    high: float


def student_interval(samples: Floats, level: float = LEVEL) -> Interval | None:
    """Student's interval of the mean of samples [n], float64, at a confidence level; None for fewer than two."""
    n = len(samples)
    if n < 2:
        return None
    half = student_quantile(n - 1, level) * float(samples.std(ddof=1)) / math.sqrt(n)
    return Interval(float(samples.mean()) - half, float(samples.mean()) + half)


def bootstrap_interval(samples: Floats) -> Interval | None:
    """The bootstrap interval of the mean of samples [n], float64; None for fewer than six. It is deterministic."""
    n = len(samples)
    if n < MIN_BOOTSTRAP_SAMPLES:
        return None
    draw = np.random.default_rng(0)
    batches = max(MIN_RESAMPLES, MIN_DRAWS // n) // 100
    means = np.concatenate([samples[draw.integers(n, size=(100, n))].mean(axis=1) for _ in range(batches)])
    outside = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(n - 1))
    low, high = np.quantile(means, [outside, 1 - outside])
    return Interval(float(low), float(high))


def block_means(samples: Floats) -> Floats:
    """The means of TEXT_BLOCKS blocks of consecutive samples [n], float64; the samples themselves if n is too small.

    Neighboring windows of a text are alike: they come from one document. Their blocks are nearly independent, so a
    standard error or a bootstrap over blocks is not too small, as one over windows is.

    Source: Künsch, "The jackknife and the bootstrap for general stationary observations" (1989).
    """
    if len(samples) < 2 * TEXT_BLOCKS:
        return samples
    return np.array([block.mean() for block in np.array_split(samples, TEXT_BLOCKS)])


@cache
def student_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t so that Student's distribution with `freedom` ≥ 1 degrees of freedom lies within ±t with probability level.

    Substituting t = √freedom · tan θ makes the density cos θ to the power of freedom − 1, on a bounded interval.
    """
    theta = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(theta) ** (freedom - 1)
    inside = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, inside / inside[-1], theta)))
