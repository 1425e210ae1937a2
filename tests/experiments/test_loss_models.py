"""Tests of the models, recipes and jobs of the loss experiment."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.loss.jobs import ABLATIONS, all_jobs
from experiments.loss.recipes import ALIGNMENT, VARIATIONS, accumulator_context, raw_accumulator, recipe
from experiments.loss.runs import read_runs
from experiments.loss.sizes import MODELS, run_config, share_in_8_bits
from octile.formats import E4M3
from octile.ops.matmul import matmul_nt
from octile.recipe import TENSOR, Recipe
from octile.scaled import quantize
from octile.train.config import TrainConfig

RUNS = Path(__file__).parents[2] / "experiments" / "loss"


@pytest.mark.parametrize("size", MODELS)
def test_most_operations_are_8_bit_gemms(size):
    assert share_in_8_bits(MODELS[size]) >= 0.85


def test_the_largest_sums_over_1024_and_more():
    assert MODELS["150m"].hidden_size >= 1024


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match="size must be one of 30m, 80m, 150m or toy, not '1b'"):
        run_config("1b", 1e6)


def test_jobs_have_names_of_their_own():
    names = [job.name for job in all_jobs()]
    assert len(set(names)) == len(names)


def test_the_control_is_compared_with_bf16_from_the_same_trunk():
    branches = [job for job in all_jobs() if job.group == "branch"]
    (control,) = (job for job in branches if job.recipe == "control")
    assert [job.after for job in branches if (job.recipe, job.seed) == ("bf16", control.seed)] == [control.after]


@pytest.mark.one_case
@pytest.mark.parametrize("job", all_jobs(), ids=lambda job: job.name)
def test_a_job_can_be_configured(job):
    config = job.config()
    assert config.steps * config.batch_size * config.sequence_length == pytest.approx(job.tokens, rel=0.01)
    assert recipe(job.recipe).name == job.recipe


@pytest.mark.slow
def test_a_jobs_changes_reach_the_optimizer_and_the_model():
    jobs = {job.name: job.config() for job in all_jobs()}
    without = jobs["balance-nothing"]
    assert (without.optim.balance_speed, without.model.aux_loss_alpha) == (0.0, 0.0)
    assert jobs["rate-bf16-4"].optim.lr == 4 * jobs["rate-bf16-1"].optim.lr


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name not in VARIATIONS])
def test_the_other_recipes_are_built_in(name):
    assert recipe(name) == replace(Recipe.named(name), transposed_weights="cached")


def test_the_control_flushes_small_gradients_to_zero():
    formats = recipe("control").formats
    assert formats.dy.amax == formats.wgrad_dy.amax == "unscaled"
    assert torch.tensor(0.9 * 2**-10).to(torch.float8_e4m3fn) == 0


@pytest.mark.parametrize("shape", [(16, 32, 48), (37, 70, 50), (3, ALIGNMENT - 1, 1)])
def test_gemms_without_promotion_take_any_shape(shape):
    m, k, n = shape
    x, w = (quantize(torch.randn(rows, k), TENSOR, E4M3, "float32") for rows in (m, n))
    operands = (x.data, x.scale, x.block, w.data, w.scale, w.block, torch.float32)
    with accumulator_context("no_promotion"):
        found = matmul_nt(*operands)
    torch.testing.assert_close(found, matmul_nt(*operands), rtol=1e-5, atol=1e-4)


def test_gemms_without_promotion_of_no_rows_are_empty():
    x, w = (quantize(torch.randn(rows, 16), TENSOR, E4M3, "float32") for rows in (1, 4))
    found = raw_accumulator(x.data[:0], x.scale, (1, 16), w.data, w.scale, w.block)
    assert found.shape == (0, 4)


@pytest.mark.parametrize("size", ["30m", "80m"])
def test_a_run_is_configured_as_the_recorded_ones(size):
    results = read_runs(RUNS / "one-rounding/runs")
    config = next(c for one in results if (c := one["facts"]["config"])["preset"] == f"loss-{size}")
    asked = run_config(size, config["steps"] * config["batch_size"] * config["sequence_length"])
    assert config.pop("prompt") == "def "  # the default then; no run of these has a sample
    recorded = TrainConfig.from_json(json.dumps(config))
    assert replace(recorded, recipe=asked.recipe, seed=asked.seed) == asked
