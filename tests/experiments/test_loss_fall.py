"""Tests of how a gap from scratch divides into what chance and what a recipe costs."""

import numpy as np
import pytest

from experiments.loss.fall import EARLY, MIN_PAIRS, estimate, gaps, table
from experiments.loss.report import Results


def draw(n: int, seed: int, cost=0.001, slope=0.4, spread=0.01, noise=0.001):
    """Early and final gaps of pairs."""
    g = np.random.default_rng(seed)
    early = g.normal(0, spread, n)
    return early, cost + slope * early + g.normal(0, noise, n)


def test_a_gap_that_is_all_chance_costs_nothing():
    early = np.array([0.01, -0.02, 0.005, 0.0])
    found = estimate(early, 0.5 * early)
    assert (found.cost, found.slope, found.correlation) == pytest.approx((0.0, 0.5, 1.0), abs=1e-12)


def test_a_cost_that_no_early_gap_explains_is_found():
    early = np.array([0.01, -0.02, 0.005, 0.0])
    found = estimate(early, 0.001 + 0.5 * early)
    assert (found.cost, found.half) == pytest.approx((0.001, 0.0), abs=1e-12)


@pytest.mark.slow
def test_the_interval_covers_the_true_cost():
    found = [estimate(*draw(10, seed)) for seed in range(2000)]
    covered = np.mean([abs(e.cost - 0.001) <= e.half for e in found])
    assert 0.94 <= covered <= 0.96


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match=f"early must have at least {MIN_PAIRS} gaps, not 3"):
        estimate(np.zeros(3), np.zeros(3))


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


def test_the_table_has_the_cost_and_the_mean():
    pairs = [pair("core", seed, 3.0 + 0.03 * seed, 2.002 + 0.01 * seed) for seed in range(4)]
    line = table(Results(result for both in pairs for result in both)).splitlines()[-1]
    assert " ".join(line.split()) == "core, 30m, 100M tokens 4 1.00 0.50 +0.10% ± 0.00% +0.85% ± 1.03%"
