"""Tests of the report of the loss experiment: what it says of the runs that are missing."""

from dataclasses import replace

from experiments.loss.jobs import CORE, RATE, Job, all_jobs, job
from experiments.loss.report import not_run


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
