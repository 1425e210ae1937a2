"""How far two runs of a pair end apart by chance, by design: `python -m experiments.loss.noise RUNS …`.

A pair is BF16 and `deepseek_v3` with the same seed: the same initial weights and order of the text. The deviation of
its gap over the seeds decides how many pairs a claim needs. A deviation of n pairs has a relative standard error of
about 1/√(2(n − 1)), so four pairs tell a half from a whole, and little less.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.loss.jobs import DESIGNS, PARTS, PARTS_DESIGN, SCANS
from experiments.loss.report import STEEP, Result, Results, gap, step_below
from octile.bench.rows import align_columns


def averaged_loss(run: Result) -> float:
    """Return the loss of the averaged weights over the held-out windows; NaN if there is none."""
    losses = run.get("averaged_window_loss")
    return statistics.fmean(losses) if losses else math.nan


def averaged_gap(run: Result, base: Result) -> float:
    """Return the gap of the averaged weights over the held-out windows; NaN if one has none."""
    return averaged_loss(run) / averaged_loss(base) - 1


def pairs_of(r: Results, design: str, recipe: str = "deepseek_v3") -> list[tuple[Result, Result]]:
    """Return (the recipe, BF16) of each seed of a design that has ended, sorted by seed."""
    found: dict[tuple[str, int], dict[str, Result]] = defaultdict(dict)
    for name, result in r.all.items():
        job = result["job"]
        if name == f"noise-{design}-{job['size']}-{job['recipe']}-{job['seed']}" and result["state"] == "done":
            found[job["size"], job["seed"]][job["recipe"]] = result
    return [(pair[recipe], pair["bf16"]) for _, pair in sorted(found.items()) if pair.keys() >= {recipe, "bf16"}]


def design_table(r: Results) -> str:
    """Format the deviations of each design with at least two pairs."""
    names = ["design", "pairs", "evaluated", "mean gap", "deviation", "its error", "gaps", "BF16's losses"]
    rows = [names]
    evaluated: Mapping[str, tuple[Callable[[Result, Result], float], Callable[[Result], float]]] = {
        "the last weights": (lambda run, base: gap(run, base)[0], lambda base: base["val_loss"][-1]),
        "the averaged weights": (averaged_gap, averaged_loss),
    }
    for design in DESIGNS:
        pairs = pairs_of(r, design)
        for weights, (measured, loss) in evaluated.items():
            gaps = [measured(*pair) for pair in pairs]
            if len(gaps) < 2 or any(map(math.isnan, gaps)):
                continue
            deviation, error = statistics.stdev(gaps), 1 / math.sqrt(2 * (len(gaps) - 1))
            each = ", ".join(f"{one:+.2%}" for one in gaps)
            levels = ", ".join(f"{loss(base):.3f}" for _, base in pairs)
            rows.append([
                design, str(len(gaps)), weights, f"{statistics.fmean(gaps):+.2%}", f"{deviation:.2%}", f"{error:.0%}",
                each, levels,
            ])  # fmt: skip
    return align_columns(rows, right={"pairs", "mean gap", "deviation", "its error"})


def parts_table(r: Results) -> str:
    """Format the gap of each recipe of PARTS to BF16 under PARTS_DESIGN, for the seeds that have ended."""
    rows = [["recipe", "seeds", "mean gap", "gaps"]]
    for recipe in ("deepseek_v3", *PARTS):
        pairs = pairs_of(r, PARTS_DESIGN, recipe)
        gaps = [gap(*pair)[0] for pair in pairs]
        if gaps:
            seeds = ", ".join(str(base["job"]["seed"]) for _, base in pairs)
            rows.append([recipe, seeds, f"{statistics.fmean(gaps):+.2%}", ", ".join(f"{one:+.2%}" for one in gaps)])
    return align_columns(rows, right={"mean gap"})


def fall_table(r: Results) -> str:
    """Format when the loss of each run of the scan and of each pair falls below STEEP, and which have not ended."""
    rows = [["runs", f"step at which the loss is below {STEEP}, by seed", "held-out loss"]]
    for name in SCANS:
        runs = [x for key, x in sorted(r.all.items()) if key.startswith(f"noise-scan-{name}-") and x.get("steps")]
        if runs:
            steps = ", ".join(step_below(run, STEEP) for run in runs)
            rows.append([f"scan, {name}", steps, ", ".join(_last_loss(run) for run in runs)])
    for design in DESIGNS:
        for run, base in pairs_of(r, design):
            steps = ", ".join(step_below(x, STEEP) for x in (base, run))
            losses = ", ".join(_last_loss(x) for x in (base, run))
            rows.append([f"{design}, seed {base['job']['seed']}, BF16 and FP8", steps, losses])
    return align_columns(rows, right=set())


def _last_loss(run: Result) -> str:
    """Return the last held-out loss of a run, with its state and step unless it is done."""
    last = f"{run['val_loss'][-1]:.3f}" if run.get("val_loss") else "–"
    at = run["val_steps"][-1] if run.get("val_loss") else run["steps"][-1]
    return last if run["state"] == "done" else f"{last} ({run['state']}, step {at:,})"


if __name__ == "__main__":
    results = Results.read(*map(Path, sys.argv[1:]))
    print("\n\n".join(table(results) for table in (design_table, parts_table, fall_table)))
