"""Look at the result of a registered plan, once all its runs have ended: `python -m experiments.loss.look PLAN RUNS …`.

A recipe's gap of a pair is (L − L_bf16) / L_bf16 on the held-out windows at the end. Its verdict follows from Student's
95% interval of the mean over all pairs: "shown" to be equal if it lies within ±BAR, "outside" if it lies above or
below, otherwise "not shown". A run that diverged makes it "not shown", too. Nothing is computed before, since an
interval that is looked at while pairs are added fits too often by chance.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.loss.plans import PLANS, Plan
from experiments.loss.report import BAR, Result, gap
from experiments.loss.runs import read_runs
from octile.bench.rows import align_columns
from octile.report.compare.intervals import Interval, student_interval
from octile.report.compare.summary import span

ENDED = "done", "diverged"


def look(plan: Plan, runs: Sequence[Result]) -> str:
    """Format a line for each recipe of the plan: its gaps, their interval, and the verdict.

    Raises:
        ValueError: a run of the plan has not ended, or there are two of it, or the runs of a seed are of several kinds
            of GPU or commits.
    """
    rows = [["recipe", "pairs", "mean gap", "deviation", "95% interval", "verdict", "gaps"]]
    for recipe, found in pair_gaps(plan, runs).items():
        gaps = [one for one in found if one is not None]
        if diverged := len(found) - len(gaps):
            rows.append([recipe, str(len(found)), "", "", "", f"not shown: {diverged} diverged", ""])
            continue
        interval = student_interval(np.array(gaps))
        rows.append([
            recipe, str(len(gaps)), f"{statistics.fmean(gaps):+.3%}", f"{statistics.stdev(gaps):.3%}", span(interval),
            verdict(interval), ", ".join(f"{one:+.2%}" for one in gaps),
        ])  # fmt: skip
    return align_columns(rows, right={"pairs", "mean gap", "deviation", "95% interval"})


def pair_gaps(plan: Plan, runs: Sequence[Result]) -> dict[str, list[float | None]]:
    """Return each recipe's gaps, seed by seed; None where a run diverged.

    Raises:
        ValueError: as `look`.
    """
    found = _check_complete(plan, runs)
    return {
        recipe: [_gap(found[plan.job_name(recipe, seed)], found[plan.job_name("bf16", seed)]) for seed in plan.seeds]
        for recipe in plan.recipes
    }


def _gap(run: Result, base: Result) -> float | None:
    return None if "diverged" in (run["state"], base["state"]) else gap(run, base)[0]


def _check_complete(plan: Plan, runs: Sequence[Result]) -> dict[str, Result]:
    """Return the runs of a plan by name; see `look` for what is refused."""
    names = {name for _, _, name in plan.runs}
    ended = [run for run in runs if run["job"]["name"] in names and run["state"] in ENDED]
    found = {run["job"]["name"]: run for run in ended}
    if missing := [name for _, _, name in plan.runs if name not in found]:
        raise ValueError(
            f"RUNS must have all {len(plan.runs)} runs of {plan.name} before its one look; {len(missing)} have not "
            f"ended, the first of them {missing[0]}"
        )
    twice = [name for name, count in Counter(run["job"]["name"] for run in ended).items() if count > 1]
    if twice:
        raise ValueError(f"RUNS must have each run of {plan.name} once, and have several of {', '.join(twice)}")
    for seed in plan.seeds:
        of_seed = {_where(found[name]) for _, other, name in plan.runs if other == seed}
        if len(of_seed) > 1 or None in next(iter(of_seed)):
            raise ValueError(
                f"the runs of a seed must be of one kind of GPU and one commit, and those of {plan.name}, seed {seed}, "
                f"are of {sorted(map(str, of_seed))}"
            )
    return found


def _where(run: Result) -> tuple[str | None, str | None]:
    """The kind of GPU and the commit of a run, None where it does not say."""
    facts = run.get("facts", {})
    return facts.get("device"), facts.get("machine", {}).get("commit")


def verdict(interval: Interval | None) -> str:
    """What an interval of the mean gap shows, by the rule of all plans."""
    if interval is None:
        return "not shown"
    if interval.low >= -BAR and interval.high <= BAR:
        return "shown"
    return "outside" if interval.low > BAR or interval.high < -BAR else "not shown"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("runs", type=Path, nargs="+", help="folders with results, JOB.json.gz")
    asked = parser.parse_args()
    try:
        print(look(PLANS[asked.plan], [run for folder in asked.runs for run in read_runs(folder)]))
    except ValueError as error:
        parser.error(str(error))
