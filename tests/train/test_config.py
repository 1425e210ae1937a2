"""Tests of a run's configuration: presets, values that are refused, and conversion to JSON and back."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from octile.models.config import PRESETS
from octile.train.config import (
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    changed_settings,
    describe_settings,
    preset,
    published_schedule,
)
from octile.train.step.progress import batch_ramp, schedule
from tests.train.conftest import MICRO

WITH_MTP = replace(PRESETS["tiny"](), num_nextn_predict_layers=1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_round_trip_through_json(name):
    config = replace(preset(name), out=Path("runs/x"), init_from=Path("runs/y"))
    assert TrainConfig.from_json(config.to_json()) == config


def test_an_unknown_preset_is_refused_with_the_names_that_exist():
    with pytest.raises(ValueError, match=r"unknown preset 'huge'.*tiny, small, medium, v2_lite_16b"):
        preset("huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"skip_limit": -1}, "skip_limit must be at least 0, not -1"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"seed": 2**63}, "seed must be at most 9,223,372,036,854,775,807, not 9223372036854775808"),
        ({"data": " "}, "data is empty"),
        (
            {"batch_size": 8, "micro_batches": 3},
            "batch_size 8 must be divisible by micro_batches 3: use --batch-size 9",
        ),
        ({"sequence_length": 4096}, "sequence_length 4096 exceeds"),
        ({"sequence_length": 1}, "sequence_length must be at least 2"),
        ({"sequence_length": 2, "model": WITH_MTP}, "sequence_length must be at least 3"),
        ({"batch_size": 2**26}, "batch_size 67108864 × sequence_length 128 must be at most 2,147,483,647 tokens"),
        ({"out": Path("a\udcff")}, "out must be "),
        ({"recipe": "\udcff.toml"}, "recipe must be "),
    ],
)
def test_values_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(preset("tiny"), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "optim.lr must be at least 0, not -1.0"),
        ({"lr": float("nan")}, "optim.lr must be finite, not nan"),
        ({"lr": math.inf}, "optim.lr must be finite, not inf"),
        ({"warmup": 1.5}, "optim.warmup must be at most 1, not 1.5"),
        ({"warmup": 0.7, "decay": 0.7}, "together more than the run"),
        ({"betas": (0.9, 1.0)}, "optim.betas must be below 1, not 1.0"),
        ({"clip": 0.0}, "optim.clip must be above 0"),
        ({"ema_decay": 2.0}, "optim.ema_decay must be below 1, not 2.0"),
    ],
)
def test_optimizer_values_out_of_range_are_refused_by_option(change, message):
    with pytest.raises(ValueError, match=message):
        replace(preset("tiny").optim, **change)


def test_json_that_is_not_a_configuration_is_refused():
    with pytest.raises(ValueError, match="not a run's configuration"):
        TrainConfig.from_json("{}")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("steps",), "10", "steps must be a whole number, not '10'"),
        (("steps",), True, "steps must be a whole number, not True"),
        (("deterministic",), 1, "deterministic must be true or false, not 1"),
        (("out",), 7, "out must be a path or null, not 7"),
        (("speed",), 1, "speed is unknown: there are preset, "),
        (("optim", "betas"), [0.9], r"optim.betas must be a list of 2, each a number, not \[0.9\]"),
        (("optim", "lr"), float("inf"), "optim.lr must be finite, not inf"),
        (("optim",), [], r"optim must be an object, not \[\]"),
        (("model", "rope_theta"), 1, "rope_theta must be above 1, not 1"),
        (("model", "rope_scaling"), {"factor": 0}, "rope_scaling.factor must be at least 1, not 0"),
        (("model", "hidden_size"), 10**18, "hidden_size must be at most 1,048,576, not 10{18}"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_value_in_the_json_of_a_run_is_refused_by_field(path, value, message):
    values = json.loads(preset("tiny").to_json())
    holder = values
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_json(json.dumps(values))


def test_a_resumed_run_may_change_its_steps_but_not_its_seed():
    saved = preset("tiny")
    assert changed_settings(saved, replace(saved, steps=7)) == {}
    assert changed_settings(saved, replace(saved, micro_batches=2, skip_limit=0)) == {}
    assert changed_settings(saved, replace(saved, seed=1)) == {"seed": (0, 1)}
    assert changed_settings(saved, replace(saved, init_from=Path("runs/y"))) == {"init_from": (None, Path("runs/y"))}
    assert changed_settings(saved, replace(saved, deterministic=True)) == {"deterministic": (False, True)}


def test_reading_a_configuration_loads_no_torch():
    code = "import sys, octile.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_run_is_the_tiny_one():
    assert TrainConfig() == preset("tiny")


def test_a_preset_of_a_short_model_trains_at_its_length(monkeypatch):
    short = replace(PRESETS["tiny"](), max_position_embeddings=512)
    monkeypatch.setitem(PRESETS, "short", lambda: short)
    assert preset("short").sequence_length == 512


def test_the_published_schedule_is_that_of_14_8_trillion_tokens():
    config = published_schedule(TrainConfig(steps=148_000, model=WITH_MTP))
    rates = asdict(schedule(config))
    assert rates == pytest.approx(
        {
            "peak": 2.2e-4,
            "warmup_steps": 1258,
            "constant_steps": 98_742,
            "decay_steps": 43_000,
            "floor": 2.2e-5,
            "floor_steps": 3330,
            "last": 7.3e-6,
        }
    )
    assert config.optim.balance_end == pytest.approx(0.96622, abs=1e-5)
    assert config.optim.mtp_change == pytest.approx(0.67568, abs=1e-5)


def test_the_published_schedule_with_a_growing_batch_has_the_same_tokens():
    config = published_schedule(TrainConfig(steps=240_210, batch_size=15360), batch_ramp=True)
    ramp = batch_ramp(config)
    assert ramp.initial == 3072
    assert ramp.before(ramp.steps) * 4096 == pytest.approx(469e9, rel=1e-3)
    assert ramp.before(240_210) * 4096 == pytest.approx(14.8e12, rel=1e-4)
    rates = schedule(config)
    assert ramp.before(rates.warmup_steps + rates.constant_steps) * 4096 == pytest.approx(10e12, rel=1e-4)
    assert ramp.before(round(240_210 * config.optim.balance_end)) * 4096 == pytest.approx(14.3e12, rel=1e-4)
    assert rates.warmup_steps == 2000


WITH_INDEXER = replace(preset("tiny").model, index_n_heads=4, index_head_dim=32, index_topk=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": WITH_INDEXER}, "indexer_stage is not given: a model with an indexer needs warm_up or sparse"),
        ({"indexer_stage": "sparse"}, "indexer_stage sparse needs a model with an indexer: set model.index_n_heads"),
        ({"indexer_stage": "dense"}, "indexer_stage must be warm_up or sparse, not 'dense'"),
        (
            {"model": WITH_INDEXER, "parallel": ParallelConfig(pp=2)},
            "parallel.pp must be 1 for a model with an indexer, not 2",
        ),
        (
            {"model": WITH_INDEXER, "indexer_stage": "warm_up", "patience": 3},
            "patience must be 0 where indexer_stage is warm_up, not 3",
        ),
        (
            {"model": WITH_INDEXER, "indexer_stage": "warm_up", "sequence_length": 64},
            "sequence_length must be above model.index_topk, 64, where indexer_stage is warm_up, not 64",
        ),
    ],
)
def test_a_stage_and_an_indexer_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(preset("tiny"), **change)


@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
def test_a_stage_survives_the_json_of_a_run_and_may_not_change(stage):
    config = replace(preset("tiny"), model=WITH_INDEXER, indexer_stage=stage)
    assert TrainConfig.from_json(config.to_json()) == config
    other = replace(config, indexer_stage="sparse" if stage == "warm_up" else "warm_up")
    assert changed_settings(config, other) == {"indexer_stage": (stage, other.indexer_stage)}


def test_the_published_ramp_needs_a_fifth_of_the_batch():
    with pytest.raises(ValueError, match="batch_size must be divisible by 5 for the published ramp, not 4"):
        published_schedule(TrainConfig(), batch_ramp=True)


@pytest.mark.parametrize("ramp", [False, True])
def test_the_documented_options_are_the_published_schedule(ramp):
    page = (Path(__file__).parents[2] / "docs" / "published_schedule.md").read_text(encoding="utf-8")
    config = published_schedule(TrainConfig(batch_size=40, model=WITH_MTP), batch_ramp=ramp)
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if "| `--" in line]
    documented = {row[0]: row[2 if ramp else 1] for row in rows}
    options = {f"--optim.{name}".replace("_", "-"): value for name, value in asdict(config.optim).items()}
    options |= {"--batch-ramp": config.batch_ramp}
    for name, text in documented.items():
        assert f"{options[name]:.4g}" == text, name
    changed = {f"--optim.{f.name}".replace("_", "-") for f in fields(OptimConfig)}
    same = {f"--optim.{name}" for name in ("name", "weight-decay", "betas", "clip", "ema-decay")}
    assert documented.keys() == (changed - same) | {"--batch-ramp"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail": 0.6, "decay": 0.4}, "optim.warmup 0.05 and optim.decay 0.4 and optim.tail 0.6 are together more"),
        ({"last_tail": 0.1, "last_lr": 0.5}, "optim.last_lr must be at most optim.final_lr, 0.1, not 0.5"),
    ],
)
def test_an_impossible_tail_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_ramp": 0.5}, "initial_batch_size and batch_ramp need each other, but they are None and 0.5"),
        ({"initial_batch_size": 2}, "initial_batch_size and batch_ramp need each other, but they are 2 and 0.0"),
        ({"batch_ramp": 0.5, "initial_batch_size": 9}, "initial_batch_size must be at most batch_size, 4, not 9"),
    ],
)
def test_an_impossible_ramp_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_a_late_weight_needs_multi_token_prediction():
    with pytest.raises(ValueError, match=r"optim\.mtp_change 0\.5 has no effect"):
        replace(preset("v2_lite_16b"), optim=OptimConfig(mtp_change=0.5))


RANKS = {  # the configuration: the message
    "ep without experts": (
        {"parallel": {"dp": 2, "ep": 2}, "model": replace(MICRO, first_k_dense_replace=2, num_nextn_predict_layers=0)},
        "parallel.ep 2 needs a layer with experts, but model.first_k_dense_replace is 2, as many as there are layers",
    ),
    "ep": ({"parallel": {"dp": 4, "ep": 3}}, "parallel.ep must divide parallel.dp, 4, but it is 3"),
    "experts": (
        {"parallel": {"dp": 6, "ep": 6}, "batch_size": 6},
        r"parallel.ep 6 must divide model.n_routed_experts, 16",
    ),
    "batch": (
        {"parallel": {"dp": 4}, "batch_size": 4, "micro_batches": 2},
        "batch_size 4 must be divisible by micro_batches 2 × parallel.dp 4: use --batch-size 8 or --micro-batches 1",
    ),
    "ramp": (
        {"parallel": {"dp": 2}, "initial_batch_size": 1, "batch_ramp": 0.5},
        r"initial_batch_size must be at least 2, a sequence for each .* \(micro_batches 1, parallel.dp 2\), not 1",
    ),
    "telemetry": ({"parallel": {"dp": 2}, "telemetry_every": 5}, r"telemetry_every must be 0 on several ranks"),
    "guards": (
        {"parallel": {"dp": 2}, "guards": Path("rules.toml")},
        r"guards must not be given on several ranks \(.*\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), RANKS.values(), ids=RANKS)
def test_what_several_ranks_cannot_share_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**changes, "parallel": ParallelConfig(**changes["parallel"])})


def test_a_run_of_an_earlier_version_has_one_rank():
    saved = json.loads(TrainConfig().to_json())
    del saved["parallel"]
    assert TrainConfig.from_json(json.dumps(saved)) == TrainConfig()


def test_a_line_of_settings_joins_tuples_and_leaves_out_other_fields_of_a_folder():
    model = replace(preset("tiny").model, extra={"architectures": ["A"]}, hidden_size=384)
    line = describe_settings(replace(preset("tiny"), model=model, log=("wandb", "mlflow")))
    assert line == "preset tiny, recipe deepseek_v3, seed 0, log wandb mlflow, model.hidden_size 384"
