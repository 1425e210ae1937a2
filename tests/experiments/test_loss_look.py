"""Tests of the one look at a registered plan."""

import pytest

from experiments.loss.jobs import DESIGNS, all_jobs
from experiments.loss.look import look, verdict
from experiments.loss.plans import PLANS, Plan
from experiments.loss.recipes import recipe
from experiments.loss.report import BAR
from octile.report.compare.intervals import Interval

PLAN = Plan("planned-some", "30m", "muon", ("deepseek_v3", "e5m2"), range(4, 7))
LOSSES = {"bf16": (2.0, 2.1, 2.2), "deepseek_v3": (2.001, 2.1, 2.2), "e5m2": (2.02, 2.1211, 2.2221)}


def results(**states):
    runs = []
    for recipe_name, seed, name in PLAN.runs:
        job = {"name": name, "group": "planned", "size": "30m", "recipe": recipe_name, "seed": seed}
        facts = {"device": "NVIDIA H200", "machine": {"commit": "abc"}}
        loss = LOSSES[recipe_name][seed - 4]
        state = states.get(f"{recipe_name}_{seed}", "done")
        runs.append({"job": job, "state": state, "val_steps": [1526], "val_loss": [loss], "facts": facts})
    return runs


def rows(text):
    return {line.split()[0]: line for line in text.splitlines()}


def test_each_recipe_has_its_own_verdict():
    found = rows(look(PLAN, results()))
    assert found["deepseek_v3"].split()[1:3] == ["3", "+0.017%"]
    assert " shown " in found["deepseek_v3"]
    assert found["e5m2"].split()[1:3] == ["3", "+1.003%"]
    assert " outside " in found["e5m2"]


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_nothing_is_computed_before_all_runs_have_ended(state):
    with pytest.raises(ValueError, match=r"all 9 runs of planned-some .* 1 have not ended, .* planned-some-e5m2-6"):
        look(PLAN, results(e5m2_6=state))


def test_a_run_that_diverged_is_not_shown_to_be_equal():
    found = rows(look(PLAN, results(deepseek_v3_5="diverged")))
    assert "not shown: 1 diverged" in found["deepseek_v3"]
    assert " outside " in found["e5m2"]


def test_a_run_that_is_there_twice_is_refused():
    runs = results()
    with pytest.raises(ValueError, match=r"each run of planned-some once, and have several of planned-some-e5m2-6$"):
        look(PLAN, [*runs, runs[-1]])


def test_a_run_that_has_not_ended_does_not_count_as_a_second_one():
    runs = results()
    assert look(PLAN, [{**runs[-1], "state": "stopped"}, *runs]) == look(PLAN, runs)


@pytest.mark.parametrize(
    "facts",
    [
        {"device": "NVIDIA H100 80GB HBM3", "machine": {"commit": "abc"}},
        {"device": "NVIDIA H200", "machine": {"commit": "def"}},
        {"device": "NVIDIA H200", "machine": {"commit": None}},
    ],
    ids=["another GPU", "another commit", "no commit"],
)
def test_the_runs_of_a_seed_are_of_one_gpu_and_commit(facts):
    *others, last = results()
    with pytest.raises(ValueError, match=r"one kind of GPU and one commit, and those of planned-some, seed 6"):
        look(PLAN, [*others, {**last, "facts": facts}])


def test_runs_that_do_not_say_their_commit_are_refused():
    runs = [{**run, "facts": {"device": "NVIDIA H200", "machine": {"commit": None}}} for run in results()]
    with pytest.raises(ValueError, match="one kind of GPU and one commit"):
        look(PLAN, runs)


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (-BAR, BAR, "shown"),
        (-0.001, 1.01 * BAR, "not shown"),
        (-1.01 * BAR, 0.0, "not shown"),
        (1.01 * BAR, 0.01, "outside"),
        (-0.01, -1.01 * BAR, "outside"),
        (-0.01, 0.01, "not shown"),
    ],
)
def test_an_interval_decides(low, high, says):
    assert verdict(Interval(low, high)) == says


def test_the_jobs_of_a_plan_have_its_size_design_and_seeds():
    jobs = {job.name: job for job in all_jobs()}
    for plan in PLANS.values():
        for name_of_recipe, seed, name in plan.runs:
            found = jobs[name]
            assert (found.group, found.size, found.recipe, found.seed) == ("planned", plan.size, name_of_recipe, seed)
            assert found.changes == DESIGNS[plan.design]
            recipe(name_of_recipe)
