"""Tests of the study of the noise between two runs of a pair."""

import math

import pytest
import torch

from experiments.loss.job import WeightAverage
from experiments.loss.jobs import DESIGNS, NOISE_SEEDS, PARTS, PARTS_SEEDS, SCAN_SEEDS, SCANS, all_jobs
from experiments.loss.noise import averaged_gap, design_table, fall_table, parts_table
from experiments.loss.report import Results, step_below


def result(name, group, recipe, seed, loss):
    job = {"name": name, "group": group, "size": "30m", "recipe": recipe, "seed": seed}
    return {
        "job": job, "state": "done", "steps": [20, 40], "loss": [4.0, 3.1], "val_steps": [40], "val_loss": [loss],
        "averaged_window_loss": [loss, loss - 0.1],
    }  # fmt: skip


@pytest.fixture
def results():
    losses = {("bf16", 0): 2.0, ("deepseek_v3", 0): 2.01, ("bf16", 1): 2.0, ("deepseek_v3", 1): 1.99}
    runs = [result(f"noise-usual-30m-{recipe}-{s}", "noise", recipe, s, loss) for (recipe, s), loss in losses.items()]
    return Results([*runs, result("noise-scan-double-rate-30m-bf16-0", "noise-scan", "bf16", 0, 3.0)])


def test_a_design_has_the_deviation_of_its_gaps(results):
    row = next(line for line in design_table(results).splitlines() if "the last weights" in line)
    assert row.split()[-6:] == ["0.71%", "71%", "+0.50%,", "-0.50%", "2.000,", "2.000"]


def test_the_losses_of_averaged_weights_stand_beside_their_gaps(results):
    row = next(line for line in design_table(results).splitlines() if "the averaged weights" in line)
    assert row.split()[-4:] == ["+0.51%,", "-0.51%", "1.950,", "1.950"]


def test_a_part_of_the_recipe_has_its_gap_to_bf16_of_the_same_seed():
    losses = {("bf16", 0): 2.0, ("bf16", 1): 3.0, ("without_fprop", 1): 3.003}
    runs = [result(f"noise-muon-30m-{recipe}-{seed}", "noise", recipe, seed, x) for (recipe, seed), x in losses.items()]
    assert parts_table(Results(runs)).splitlines()[-1].split() == ["without_fprop", "1", "+0.10%", "+0.10%"]


def test_designs_that_have_not_run_have_no_row(results):
    assert {line.split()[0] for line in design_table(results).splitlines()[1:] if line.strip("- ")} == {"usual"}


def test_the_scan_and_each_pair_say_when_the_loss_falls(results):
    lines = fall_table(results).splitlines()
    assert any("scan, double-rate" in line and "40" in line and "3.000" in line for line in lines)
    assert any("usual, seed 1, BF16 and FP8" in line and "40, 40" in line for line in lines)


def test_a_run_of_the_scan_that_has_not_ended_says_so(results):
    for seed, state, val_loss in ((0, "done", [3.0]), (1, "diverged", [9.5]), (2, "failed", [])):
        run = result(f"noise-scan-muon-30m-bf16-{seed}", "noise-scan", "bf16", seed, 3.0)
        results.all[run["job"]["name"]] = run | {"state": state, "val_loss": val_loss}
    line = next(line for line in fall_table(results).splitlines() if "scan, muon" in line)
    assert line.split(maxsplit=5)[-1].strip() == "3.000, 9.500 (diverged, step 40), – (failed, step 40)"


def test_a_loss_that_never_falls_has_no_step(results):
    assert step_below(results.all["noise-usual-30m-bf16-0"], 3.0) == "–"


def test_the_gap_of_averaged_weights_is_that_of_their_windows(results):
    run, base = (results.all[f"noise-usual-30m-{recipe}-0"] for recipe in ("deepseek_v3", "bf16"))
    assert averaged_gap(run, base) == pytest.approx(1.96 / 1.95 - 1)
    assert math.isnan(averaged_gap({**run, "averaged_window_loss": []}, base))


@pytest.mark.parametrize(
    ("group", "n"),
    [
        ("noise", 2 * len(DESIGNS) * len(NOISE_SEEDS)),
        ("noise-scan", len(SCANS) * len(SCAN_SEEDS)),
        ("noise-parts", len(PARTS) * len(PARTS_SEEDS)),
    ],
)
def test_each_design_and_seed_is_a_job(group, n):
    assert len({job.name for job in all_jobs() if job.group == group}) == n


def test_another_batch_takes_as_many_tokens_in_the_same_micro_batches():
    configs = [job.config() for job in all_jobs() if job.group == "noise"]
    assert len({config.batch_size for config in configs}) == 2
    assert len({config.micro_batch_size for config in configs}) == 1
    assert len({config.steps * config.batch_size for config in configs}) == 1


def test_weights_are_averaged_over_the_calls_and_restored():
    model = torch.nn.Linear(3, 2)
    average, weights = WeightAverage(model), [torch.randn(2, 3) for _ in range(3)]
    for weight in weights:
        model.weight.data.copy_(weight)
        average.add()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), torch.stack(weights).mean(0))
    assert torch.equal(model.weight, weights[-1])
