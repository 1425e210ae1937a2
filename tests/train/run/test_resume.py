"""Tests of what a resumed run takes from its folder and its checkpoint, without a step of training."""

import json
import re
from pathlib import Path

import pytest
import torch

import octile
from octile.checkpoint.store import Store
from octile.checkpoint.training import save_checkpoint
from octile.train.compare.run import FINISHED, train_compared_run
from octile.train.run import machine
from octile.train.run.machine import computed_on
from octile.train.run.resume import OTHER_ORDER, check_settings, open_run
from octile.train.source_digest import source_digest
from tests.train.conftest import micro, silent_console

CPU = torch.device("cpu")
DAMAGED = {  # what is written into the configuration of state.json: the message
    "a field of another type": ({"sequence_length": "x"}, "config: sequence_length must be a whole number, not 'x'"),
    "an unknown field": ({"color": 1}, "config: color is unknown: there are preset, "),
    "fields that do not fit": ({"micro_batches": 3}, "config: batch_size 4 must be divisible by micro_batches 3: "),
    "no model": ({"model": None}, "config: model must be an object, not None"),
}


def checkpoint(tmp_path: Path, name: str = "checkpoints", **changes) -> Path:
    """Write the checkpoint of a run's second step, with changes of the configuration in its state.json."""
    config = {**json.loads(micro().to_json()), **changes}
    state = {"steps_done": 2, "tokens": 256, "seconds": 1.0, "config": config, "computed_on": computed_on(CPU)}
    return save_checkpoint(tmp_path / name, 2, {}, state)


@pytest.mark.parametrize(("changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_configuration_of_a_checkpoint_is_named_with_its_file(tmp_path, changes, message):
    folder = checkpoint(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{folder}/state.json is damaged: {message}')}"):
        check_settings(micro(), Store(str(folder)), CPU, print)


EDITED = {  # in config.json: the line
    "skip_limit": (3, "skip_limit: 10 before, 3 now"),
    "patience": (5, "patience: 0 before, 5 now"),
    "validate_every": (7, "validate_every: 3 before, 7 now"),
    "checkpoint_every": (0, "checkpoint_every: 2 before, 0 now"),
    "telemetry_every": (2, "telemetry_every: 0 before, 2 now"),
    "prompt": ("class ", "prompt: None before, 'class ' now"),
    "steps": (9, "steps: 6 before, 9 now: the schedules of learning rate, batch and weights follow the new number"),
}


@pytest.mark.parametrize(("name", "value", "line"), [(name, *rest) for name, rest in EDITED.items()], ids=EDITED)
def test_every_changed_setting_is_printed(tmp_path, name, value, line):
    lines: list[str] = []
    folder = Store(str(checkpoint(tmp_path)))
    check_settings(micro(**{name: value}, out=tmp_path / "moved"), folder, CPU, lines.append)
    assert lines == [line]


@pytest.mark.parametrize(("steps", "note"), [(2, ""), (3, f": {OTHER_ORDER}")])
def test_another_order_of_sums_is_said_only_if_steps_follow(tmp_path, steps, note):
    lines: list[str] = []
    folder = Store(str(checkpoint(tmp_path, steps=steps)))
    check_settings(micro(steps=steps, micro_batches=2), folder, CPU, lines.append)
    assert lines == [f"micro_batches: 1 before, 2 now{note}"]


@pytest.mark.parametrize("before", ["0.0.9 (source 0123456789ab)", f"{octile.__version__} (source 0123456789ab)"])
def test_a_checkpoint_of_another_version_or_source_of_octile_causes_a_warning(tmp_path, monkeypatch, before):
    now = machine.OCTILE
    monkeypatch.setattr(machine, "OCTILE", before)
    folder = Store(str(checkpoint(tmp_path)))
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="was computed with octile") as warned:
        check_settings(micro(), folder, CPU, print)
    assert [str(warning.message) for warning in warned] == [
        f"step_00000002 was computed with octile {before}, this machine has {now}: steps that it computes may not be "
        "bit-identical to those of an uninterrupted run"
    ]


def test_a_checkpoint_names_the_version_and_the_source_of_octile():
    assert computed_on(CPU)["octile"] == f"{octile.__version__} (source {source_digest()})"


def test_guards_that_were_added_are_printed_without_their_text(tmp_path):
    lines: list[str] = []
    folder = Store(str(checkpoint(tmp_path, telemetry_every=2)))
    check_settings(micro(telemetry_every=2, guards=Path("rules.toml"), guards_text="…"), folder, CPU, lines.append)
    assert lines == ["guards: None before, rules.toml now: they were added after the run began"]


@pytest.mark.parametrize(("changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_run_without_its_folder_says_where_its_damaged_configuration_is(tmp_path, changes, message):
    folder = checkpoint(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{folder}/state.json is damaged: {message}')}"):
        open_run(tmp_path / "lost", str(tmp_path / "checkpoints"))


@pytest.mark.parametrize(("changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_comparison_says_where_its_damaged_configuration_is(store, tmp_path, changes, message):
    folder = checkpoint(tmp_path, FINISHED, **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{folder}/state.json is damaged: {message}')}"):
        train_compared_run(micro(), store, silent_console(), folder=tmp_path)
