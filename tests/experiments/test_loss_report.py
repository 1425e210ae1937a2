"""Tests of the report of the loss experiment: what it says of missing runs, of the text, and of runs over 1B tokens."""

import json
from dataclasses import replace

import pytest

from experiments.loss.jobs import BILLION, CORE, LONG, RATE, SHORT, Job, all_jobs, branch, job
from experiments.loss.report import (
    LONG_FACTS,
    Results,
    answer_table,
    core_table,
    evaluation_table,
    not_run,
    scratch_table,
    text_table,
)


def rows_of(jobs: list[Job]) -> list[str]:
    """The rows of the table below its head."""
    return not_run(jobs).splitlines()[2:]


def test_missing_runs_are_grouped_by_size_and_recipe_with_ranges_of_seeds():
    jobs = [job("core", "30m", recipe, seed, CORE) for seed in (9, 2, 3, 4, 7) for recipe in ("bf16", "deepseek_v3")]
    jobs.append(job("core", "80m", "bf16", 5, CORE))
    assert rows_of(jobs) == [
        "| core | 30m | `bf16` | 2–4, 7, 9 |",
        "| core | 30m | `deepseek_v3` | 2–4, 7, 9 |",
        "| core | 80m | `bf16` | 5 |",
    ]


def test_two_seeds_in_a_row_are_no_range():
    assert rows_of([job("core", "30m", "bf16", seed, CORE) for seed in (1, 2)]) == ["| core | 30m | `bf16` | 1, 2 |"]


def test_missing_variations_of_one_seed_are_named():
    jobs = [replace(job("rate", "30m", "bf16", 0, RATE), name=f"rate-bf16-{times}") for times in (256, 384)]
    assert rows_of(jobs) == ["| rate | 30m | `bf16` | rate-bf16-256, rate-bf16-384 |"]


def test_without_missing_runs_that_is_said():
    assert not_run([]) == "All jobs were run."


def test_no_line_is_long():
    assert max(map(len, not_run(all_jobs()).splitlines())) < 500


def result(one: Job, **facts: object) -> dict[str, object]:
    """A result of a run that ended with a held-out loss of 2, or of 2.01 with FP8."""
    loss = 2.0 if one.recipe == "bf16" else 2.01
    return {
        "job": one.to_json(), "state": "done", "facts": facts, "steps": [8], "loss": [loss], "speed": [100],
        "val_steps": [8], "val_loss": [loss], "imbalance": [[1.5]],
    }  # fmt: skip


def again(recipe: str, seed: int) -> Job:
    """A run from scratch that is repeated."""
    one = job("again", "30m", recipe, seed, CORE)
    return replace(one, name=f"{one.name}-1")


def test_passes_are_over_the_text_that_a_run_read():
    long = json.loads(LONG_FACTS.read_text())["tokens"]["train"]
    runs = [result(job("core", "30m", "bf16", seed, CORE)) for seed in (0, 1)]
    runs += [result(job("ablation", "30m", "bf16", 0, SHORT)), result(job("long", "30m", "bf16", 0, LONG))]
    runs += [result(job("billion", "30m", recipe, 0, BILLION), text_tokens=long) for recipe in ("bf16", "deepseek_v3")]
    text = text_table(Results(runs))
    assert text.split("\n\n")[1].splitlines()[2:] == [
        "| 100M | 106.9M | 0.94 |",
        "| 300M | 106.9M | 2.81 |",
        f"| 1,000M | {long / 1e6:.1f}M | {BILLION / long:.2f} |",
    ]
    assert f"has {long:,} tokens to train on" in text


def test_the_longer_text_is_long_enough_for_four_passes():
    assert json.loads(LONG_FACTS.read_text())["tokens"]["train"] >= BILLION / 4


def test_without_long_runs_no_passes_are_listed():
    text = text_table(Results([result(job("ablation", "30m", "bf16", 0, SHORT))]))
    assert "No run is over 100M tokens or more." in text


@pytest.mark.parametrize("table", [answer_table, core_table, scratch_table])
def test_tables_of_runs_from_scratch_have_those_over_a_billion_tokens(table):
    runs = [job("core", "30m", recipe, seed, CORE) for recipe in ("bf16", "deepseek_v3") for seed in (0, 1)]
    runs += [job("billion", "30m", recipe, 0, BILLION) for recipe in ("bf16", "deepseek_v3")]
    runs.append(again("deepseek_v3", 0))
    rows = [
        row for row in table(Results(result(one, tokens=one.tokens) for one in runs)).splitlines() if "1,000M" in row
    ]
    assert rows
    assert "| +0.50% |" in rows[-1]


def evaluated(one: Job, own: float, other: float) -> dict[str, object]:
    """A result with the held-out loss of its weights in its own precision and in the other one."""
    name = "deepseek_v3" if one.recipe == "bf16" else "bf16"
    return result(one) | {
        "window_loss": [own - 0.1, own + 0.1],
        "other_window_loss": {name: [other - 0.2, other + 0.2]},
    }


def test_weights_of_either_precision_are_compared_in_both():
    pairs = (("bf16", 2.0, 2.004), ("deepseek_v3", 2.006, 2.001))
    runs = [evaluated(job("core", "30m", recipe, 0, CORE), *losses) for recipe, *losses in pairs]
    assert evaluation_table(Results(runs)).splitlines()[-1] == "| 30m | 100M | 1 | +0.20% | +0.30% | +0.05% |"
    trunks = [job("trunk", "80m", "bf16", seed, CORE) for seed in (0, 1)]
    runs = [evaluated(branch(trunk, recipe), *losses) for trunk in trunks for recipe, *losses in pairs]
    cells = " | ".join(f"{gap} ({gap}, {gap})" for gap in ("+0.20%", "+0.30%", "+0.05%"))
    assert evaluation_table(Results(runs)).splitlines()[-1] == f"| 80m, from a checkpoint | 100M | 2 | {cells} |"


def test_without_a_pair_that_was_evaluated_twice_there_is_no_table():
    jobs = [job("core", "30m", recipe, 0, CORE) for recipe in ("bf16", "deepseek_v3")]
    assert evaluation_table(Results(map(result, jobs))) == ""
    assert evaluation_table(Results([evaluated(jobs[0], 2.0, 2.0)])) == ""


def test_runs_of_a_seed_again_count_as_its_repetitions():
    runs = [result(job("core", "30m", recipe, seed, CORE)) for recipe in ("bf16", "deepseek_v3") for seed in (0, 1)]
    runs += [result(again(recipe, 0)) for recipe in ("bf16", "deepseek_v3")]
    assert "| 30m | 100M | 3 | 3 |" in scratch_table(Results(runs))


def test_the_mean_over_sizes_leaves_out_sizes_of_one_seed():
    runs = [result(job("core", "30m", recipe, seed, CORE)) for recipe in ("bf16", "deepseek_v3") for seed in (0, 1)]
    runs += [result(again(recipe, 0)) for recipe in ("bf16", "deepseek_v3")]
    before = scratch_table(Results(runs)).splitlines()[0]
    runs.append(result(job("core", "150m", "bf16", 0, CORE)))
    runs.append(result(job("core", "150m", "deepseek_v3", 0, CORE)) | {"val_loss": [9.0]})
    assert scratch_table(Results(runs)).splitlines()[0] == before
    assert "of sizes with several seeds, is +0.50%" in before


def test_bf16_again_is_compared_with_its_own_seed():
    runs = [result(job("core", "30m", "bf16", seed, CORE)) | {"val_loss": [4.0 + seed]} for seed in (0, 1)]
    runs.append(result(again("bf16", 1)) | {"val_loss": [5.05]})
    (row,) = (row for row in core_table(Results(runs)).splitlines() if "again" in row)
    assert "| +1.00% (the noise) |" in row
