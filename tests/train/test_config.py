"""Tests of a run's configuration: presets, values that are refused, and conversion to JSON and back."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octile.models.config import PRESETS
from octile.train.config import TrainConfig, changed_settings, preset


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_round_trip_through_json(name):
    config = replace(preset(name), out=Path("runs/x"), init_from=Path("runs/y"))
    assert TrainConfig.from_json(config.to_json()) == config


def test_an_unknown_preset_is_refused_with_the_names_that_exist():
    with pytest.raises(ValueError, match=r"unknown preset 'huge'.*tiny, small, v2_lite_16b"):
        preset("huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"skip_limit": -1}, "skip_limit must not be negative, but is -1"),
        ({"seed": -1}, "seed must not be negative, but is -1"),
        ({"seed": 2**63}, "seed must be below"),
        ({"data": " "}, "data is empty"),
        ({"batch_size": 8, "micro_batches": 3}, "batch_size 8 must be divisible by micro_batches 3"),
        ({"sequence_length": 4096}, "sequence_length 4096 exceeds"),
        ({"sequence_length": 2}, "sequence_length must be at least 3"),
    ],
)
def test_values_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(preset("tiny"), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "optim.lr must be at least 0, not -1.0"),
        ({"lr": float("nan")}, "optim.lr must be at least 0, not nan"),
        ({"warmup": 1.5}, "optim.warmup must be a share from 0 to 1"),
        ({"warmup": 0.7, "decay": 0.7}, "together more than the run"),
        ({"betas": (0.9, 1.0)}, "optim.betas must be from 0 to below 1"),
        ({"clip": 0.0}, "optim.clip must be above 0"),
        ({"ema_decay": 2.0}, "optim.ema_decay must be from 0 to below 1"),
    ],
)
def test_optimizer_values_out_of_range_are_refused_by_option(change, message):
    with pytest.raises(ValueError, match=message):
        replace(preset("tiny").optim, **change)


def test_json_that_is_not_a_configuration_is_refused():
    with pytest.raises(ValueError, match="not a run's configuration"):
        TrainConfig.from_json("{}")


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
