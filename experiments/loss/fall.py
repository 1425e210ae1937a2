"""How much of a gap from scratch is there after 40% of the steps: `python -m experiments.loss.fall RUNS …`.

Two runs from scratch end apart partly because the loss of one falls steeply a few steps sooner, by chance. That is over
after some 40% of the steps, and the gap there, the early gap, predicts the final one:

    final gap = cost + slope · early gap

cost is what is left where both runs fall at the same step: the intercept of the regression over pairs of seeds, with
Student's 95% interval of n − 2 degrees of freedom. The mean final gap has Student's interval over the seeds.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.loss.job import VALIDATIONS
from experiments.loss.jobs import TRUNK
from experiments.loss.report import Results, gap
from octile.bench.rows import align_columns
from octile.report.compare.intervals import student_interval, student_quantile

EARLY = round(TRUNK * VALIDATIONS)  # the number of the measurement after 40% of the steps
MIN_PAIRS = 4  # fewer leave less than two degrees of freedom


class Cost(NamedTuple):
    """What is left of the final gap where there is no early one.

    Attributes:
        cost, half: the intercept, and half of its 95% interval.
        slope: of the final gap by the early one.
        correlation: of the two.
    """

    cost: float
    half: float
    slope: float
    correlation: float


def estimate(early: NDArray[np.float64], final: NDArray[np.float64]) -> Cost:
    """Estimate the cost from the early and the final gap of each pair, [n] both.

    Raises:
        ValueError: there are fewer than MIN_PAIRS pairs.
    """
    n = len(early)
    if n < MIN_PAIRS:
        raise ValueError(f"early must have at least {MIN_PAIRS} gaps, not {n}")
    centered = early - early.mean()
    s_xx = float(centered @ centered)
    slope = float(centered @ final) / s_xx
    residuals = final - final.mean() - slope * centered
    variance = float(residuals @ residuals) / (n - 2) * (1 / n + float(early.mean()) ** 2 / s_xx)
    return Cost(
        float(final.mean() - slope * early.mean()),
        student_quantile(n - 2) * math.sqrt(variance),
        slope,
        float(np.corrcoef(early, final)[0, 1]),
    )


def early_gap(result: dict[str, Any], base: dict[str, Any]) -> float:
    """Return the gap at the measurement of the held-out loss after 40% of the steps."""
    return result["val_loss"][EARLY - 1] / base["val_loss"][EARLY - 1] - 1


def gaps(r: Results, group: str, size: str) -> NDArray[np.float64]:
    """Return the early and the final gap of each pair of seeds that has ended, [2, pairs]."""
    pairs = [(r.get(group, size, "deepseek_v3", base["job"]["seed"]), base) for base in r.bf16(group, size)]
    ended = [(run, base) for run, base in pairs if run is not None and run["state"] == base["state"] == "done"]
    found = [(early_gap(run, base), gap(run, base)[0]) for run, base in ended]
    return np.array(found).reshape(-1, 2).T


def table(r: Results) -> str:
    """Format the estimates of all groups of runs from scratch."""
    rows = [["from scratch", "pairs", "correlation", "slope", "cost ± 95%", "mean gap ± 95%"]]
    for group in ("core", "slow", "long"):
        for size in r.sizes(group):
            early, final = gaps(r, group, size)
            mean = student_interval(final)
            if mean is None or len(early) < MIN_PAIRS:
                continue
            e = estimate(early, final)
            name = f"{group}, {size}, {r.tokens(group, size)} tokens"
            values = (e.cost, e.half), (final.mean(), (mean.high - mean.low) / 2)
            found = (f"{value:+.2%} ± {half:.2%}" for value, half in values)
            rows.append([name, str(len(early)), f"{e.correlation:.2f}", f"{e.slope:.2f}", *found])
    return align_columns(rows, right=set(rows[0][1:]))


if __name__ == "__main__":
    print(table(Results.read(*map(Path, sys.argv[1:]))))
