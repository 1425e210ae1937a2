"""Tests of how a gap from scratch divides into what chance and what a recipe costs."""

import json

import numpy as np
import pytest

from experiments.loss.fall import EARLY, MIN_PAIRS, estimate, gaps, table
from experiments.loss.jobs import TRUNK, all_jobs
from experiments.loss.report import Results

NONE = np.empty(0)


def draw(n: int, more: int, seed: int, cost=0.001, slope=0.4, spread=0.01, noise=0.001):
    """Early and final gaps of complete pairs, and early gaps of others."""
    g = np.random.default_rng(seed)
    early = g.normal(0, spread, n)
    return early, cost + slope * early + g.normal(0, noise, n), g.normal(0, spread, more)


def test_without_other_pairs_the_mean_is_that_of_the_final_gaps():
    early, final, more = draw(10, 0, 0)
    assert estimate(early, final, more).mean == pytest.approx(final.mean())


def test_a_gap_that_is_all_chance_costs_nothing():
    early = np.array([0.01, -0.02, 0.005, 0.0])
    found = estimate(early, 0.5 * early, NONE)
    assert (found.cost, found.slope, found.correlation) == pytest.approx((0.0, 0.5, 1.0), abs=1e-12)


def test_other_pairs_shift_the_mean_along_the_slope():
    early, cost = np.array([0.01, -0.02, 0.005, 0.0]), 0.001
    found = estimate(early, cost + 0.5 * early, np.array([0.03, 0.01]))
    assert found.mean == pytest.approx(cost + 0.5 * np.mean([*early, 0.03, 0.01]))
    assert found.cost == pytest.approx(cost)


def test_other_pairs_make_the_interval_narrower():
    few, many = draw(10, 0, 1), draw(10, 60, 1)
    assert estimate(*many).mean_half < 0.7 * estimate(*few).mean_half


@pytest.mark.parametrize("more", [0, 30])
def test_the_interval_covers_the_true_mean(more):
    found = [estimate(*draw(10, more, seed)) for seed in range(2000)]
    covered = np.mean([abs(e.mean - 0.001) <= e.mean_half for e in found])
    assert 0.93 <= covered <= 0.98  # Student's degrees of freedom are those of the residuals, which is cautious


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match=f"early must have at least {MIN_PAIRS} gaps, not 3"):
        estimate(np.zeros(3), np.zeros(3), NONE)


def run(group: str, recipe: str, seed: int, losses: list[float], state: str = "done") -> dict:
    name = f"{group}-30m-{recipe}-{seed}"
    job = {"name": name, "group": group, "size": "30m", "recipe": recipe, "seed": seed, "tokens": 1e8}
    return {"job": job, "state": state, "val_steps": [*range(len(losses))], "val_loss": losses}


def pair(group: str, seed: int, early: float, final: float, state: str = "done") -> list[dict]:
    def losses(last: float, at_40: float) -> list[float]:
        return [4.0] * (EARLY - 1) + [at_40, 2.9, last]

    return [run(group, "bf16", seed, losses(2.0, 3.0)), run(group, "deepseek_v3", seed, losses(final, early), state)]


def test_gaps_are_those_of_pairs_that_have_ended():
    found = Results([*pair("core", 0, 3.03, 2.02), *pair("core", 1, 3.3, 2.2, "stopped"), *pair("slow", 2, 3.3, 2.2)])
    assert gaps(found, "core", "30m").tolist() == [pytest.approx([0.01]), pytest.approx([0.01])]


def test_the_table_counts_complete_pairs_and_others():
    complete = [pair("core", seed, 3.0 + 0.01 * seed, 2.0 + 0.003 * seed) for seed in range(5)]
    others = [pair("start", seed, 3.0, 3.0) for seed in range(38, 41)]
    line = table(Results(result for both in complete + others for result in both))
    assert "core, 30m, 100M tokens" in line
    assert line.split("tokens", 1)[1].split()[:2] == ["5", "3"]


def test_runs_of_the_start_are_the_first_part_of_runs_like_those_of_core():
    jobs = {job.name: job for job in all_jobs()}
    start, core = jobs["start-30m-bf16-38"], jobs["core-30m-bf16-37"]
    assert (start.until, start.is_trunk) == (TRUNK, False)
    assert json.loads(start.config().to_json()) == {**json.loads(core.config().to_json()), "seed": 38}
    assert {job.seed for job in jobs.values() if job.group == "start"}.isdisjoint(
        job.seed for job in jobs.values() if (job.group, job.size) == ("core", "30m")
    )
