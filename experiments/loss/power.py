"""Calculate how many pairs of seeds show that two recipes are equal: `python -m experiments.loss.power RUNS …`.

Equal means that Student's 95% interval of the mean gap over seeds lies inside ± the bar (two one-sided tests of level
2.5%; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). The power is the probability that this happens, for gaps that
are normally distributed with a given mean and standard deviation. The runs in the folders RUNS give the deviations of
the gaps that were measured.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from experiments.loss.report import BAR, SCRATCH, Results
from octile.bench.rows import align_columns
from octile.report.compare.intervals import LEVEL, Interval, student_interval
from octile.report.compare.power import DRAWS, POWER, interval_reaches
from octile.report.compare.summary import span

MEANS = (0.0, 0.0005, 0.001, 0.0015)  # the true gap
DEVIATIONS = (0.001, 0.0015, 0.002, 0.0025, 0.003)  # of a pair's gap
MAX_PAIRS = 60
# after how many pairs an interval stands in the history of one-rounding/note.md: group, size, pairs now → looks
LOOKS = {("core", "80m", 24): (4, 6, 7, 11, 14, 24)}


def power(pairs: int, mean: float, deviation: float) -> float:
    """Return the probability that the 95% interval over `pairs` ≥ 2 gaps lies inside ± BAR, by simulation."""
    return _share_inside(_drawn(pairs, mean, deviation))


def power_outside(pairs: int, mean: float, deviation: float) -> float:
    """Return the probability that the 95% interval over `pairs` ≥ 2 gaps lies above BAR, by simulation."""
    gaps = _drawn(pairs, mean, deviation)
    means = gaps.mean(axis=1)
    return float(np.mean(means - (interval_reaches(gaps) - np.abs(means)) > BAR))


def power_after(gaps: Sequence[float], more: int) -> float:
    """Return the probability that the 95% interval over `gaps` and `more` further gaps lies inside ± BAR.

    By simulation: mean and deviation are drawn from what the gaps say about them with the prior 1/deviation, and the
    further gaps from that normal distribution (predictive probability; Spiegelhalter et al., Control. Clin. Trials 7,
    1986).
    """
    draw, n = np.random.default_rng(0), len(gaps)
    deviation = statistics.stdev(gaps) * np.sqrt((n - 1) / draw.chisquare(n - 1, DRAWS))
    mean = statistics.fmean(gaps) + deviation / math.sqrt(n) * draw.standard_normal(DRAWS)
    further = mean[:, None] + deviation[:, None] * draw.standard_normal((DRAWS, more))
    every = np.hstack([np.broadcast_to(gaps, (DRAWS, n)), further])
    return _share_inside(every)


def _drawn(pairs: int, mean: float, deviation: float) -> npt.NDArray[np.float64]:
    """Return gaps [draws, pairs] from a normal distribution."""
    return np.random.default_rng(0).normal(mean, deviation, size=(DRAWS, pairs))


def _share_inside(gaps: npt.NDArray[np.float64]) -> float:
    """Return the share of the rows, gaps [draws, pairs], whose 95% interval lies inside ± BAR."""
    return float(np.mean(interval_reaches(gaps) <= BAR))


def pairs_needed(mean: float, deviation: float) -> int | None:
    """Return the fewest pairs with a power of at least POWER; None if MAX_PAIRS are too few."""
    return next((n for n in range(2, MAX_PAIRS + 1) if power(n, mean, deviation) >= POWER), None)


def table() -> str:
    """Format the pairs needed for each mean and deviation."""
    rows = [["deviation of a pair's gap", *(f"true gap {mean:.2%}" for mean in MEANS)]]
    for deviation in DEVIATIONS:
        needed = (pairs_needed(mean, deviation) for mean in MEANS)
        rows.append([f"{deviation:.2%}", *(str(n) if n else f"> {MAX_PAIRS}" for n in needed)])
    return align_columns(rows, right=set(rows[0][1:]))


def measured(r: Results) -> str:
    """Format the gaps from scratch: mean, standard deviation, 95% interval, and one that allows for looks, if any."""
    names = ["from scratch", "pairs", "mean gap", "deviation of a pair's gap", "95% interval", "looks", "for all looks"]
    rows = [names]
    for group in ("core", "slow", "long"):
        for size in r.sizes(group):
            gaps = r.gaps(group, size, "deepseek_v3")
            if len(gaps) > 1:
                row = (str(len(gaps)), f"{statistics.fmean(gaps):+.2%}", f"{statistics.stdev(gaps):.2%}")
                rows.append(
                    [f"{size}, {r.tokens(group, size)} tokens{SCRATCH[group]}", *row, span(interval_after(gaps, 1))]
                )
                looks = LOOKS.get((group, size, len(gaps)))
                rows[-1] += [str(len(looks)), span(interval_after(gaps, len(looks)))] if looks else ["", ""]
    return align_columns(rows, right=set(names[1:]))


def interval_after(gaps: Sequence[float], looks: int) -> Interval | None:
    """Return the interval of the mean gap over seeds that, together with those of all looks, holds with 95%."""
    return student_interval(np.array(gaps), 1 - (1 - LEVEL) / looks)


def main(folders: list[Path]) -> None:
    found = Results.read(*folders)
    print(f"Pairs of seeds so that the 95% interval lies inside ±{BAR:.2%} with a probability of {POWER:.0%}:\n")
    print(f"{table()}\n\n{measured(found)}")


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
