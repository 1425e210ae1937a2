"""How much of a gap from scratch is there after 40% of the steps: `python -m experiments.loss.fall RESULTS.json …`.

Two runs from scratch end apart mostly because the loss of one falls steeply a few steps sooner, by chance. That is over
after some 40% of the steps, and the gap there, the early gap, predicts the final one. So a gap has two parts:

    final gap = cost + slope · early gap

cost is what is left where both runs fall at the same step, the intercept of the regression over pairs of seeds. The
mean of the early gap takes most pairs to estimate, but runs of the first 40% of the steps suffice for it (group
`start`). With n complete pairs and N in all the mean final gap and its variance are estimated by

    ȳ + b · (x̄_N − x̄)        s² · (1/n + (x̄_N − x̄)² / S_xx) + b² · s_x² / N

where x is the early gap, y the final one, b the slope, s² the variance of the residuals and s_x² that of x over all N.
Without runs of `start` this is the mean of y. The 95% interval is Student's with n − 2 degrees of freedom.

Source: double sampling with regression, Cochran, Sampling Techniques (3rd edition, 1977), §12.7.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.loss.job import VALIDATIONS
from experiments.loss.jobs import TRUNK
from experiments.loss.report import SCRATCH, Results, gap
from octile.bench.rows import align_columns
from octile.report.compare.intervals import student_quantile

EARLY = round(TRUNK * VALIDATIONS)  # the number of the measurement after 40% of the steps
MIN_PAIRS = 4  # complete ones; fewer leave less than two degrees of freedom


class Estimate(NamedTuple):
    """The final gap and its parts, each with half of its 95% interval.

    Attributes:
        mean, mean_half: of the final gap.
        cost, cost_half: the final gap where there is no early one.
        slope: of the final gap by the early one.
        correlation: of the two.
    """

    mean: float
    mean_half: float
    cost: float
    cost_half: float
    slope: float
    correlation: float


def estimate(early: NDArray[np.float64], final: NDArray[np.float64], more: NDArray[np.float64]) -> Estimate:
    """Estimate the final gap.

    Args:
        early, final: [n] of complete pairs.
        more: [N − n] early gaps of pairs that ended there.

    Raises:
        ValueError: there are fewer than MIN_PAIRS complete pairs.
    """
    n, every = len(early), np.concatenate([early, more])
    if n < MIN_PAIRS:
        raise ValueError(f"early must have at least {MIN_PAIRS} gaps, not {n}")
    centered = early - early.mean()
    s_xx = float(centered @ centered)
    slope = float(centered @ final) / s_xx
    residuals = final - final.mean() - slope * centered
    variance = float(residuals @ residuals) / (n - 2)
    shift = float(every.mean() - early.mean())
    of_mean = variance * (1 / n + shift**2 / s_xx) + slope**2 * float(every.var(ddof=1)) / len(every)
    of_cost = variance * (1 / n + float(early.mean()) ** 2 / s_xx)
    t = student_quantile(n - 2)
    return Estimate(
        float(final.mean()) + slope * shift,
        t * math.sqrt(of_mean),
        float(final.mean() - slope * early.mean()),
        t * math.sqrt(of_cost),
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
    """Format the estimates of all groups of runs from scratch; those of `core` include `start`."""
    rows = [["from scratch", "complete pairs", "others", "correlation", "slope", "cost ± 95%", "mean gap ± 95%"]]
    for group in SCRATCH:
        for size in r.sizes(group):
            early, final = gaps(r, group, size)
            more = gaps(r, "start", size)[0] if group == "core" else np.empty(0)
            if len(early) < MIN_PAIRS:
                continue
            e = estimate(early, final, more)
            cost, mean = (f"{x:+.2%} ± {half:.2%}" for x, half in ((e.cost, e.cost_half), (e.mean, e.mean_half)))
            name = f"{group}, {size}, {r.tokens(group, size)} tokens"
            counts = [str(len(early)), str(len(more))]
            rows.append([name, *counts, f"{e.correlation:.2f}", f"{e.slope:.2f}", cost, mean])
    return align_columns(rows, right=set(rows[0][1:]))


if __name__ == "__main__":
    print(table(Results(result for file in sys.argv[1:] for result in json.loads(Path(file).read_text())["results"])))
