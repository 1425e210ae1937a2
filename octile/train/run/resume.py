"""What a resumed run takes from its folder, and the checks that it continues with the same bits.

A run's config.json holds everything that decides its bits but the machine. Each checkpoint repeats it, together with
what the machine adds: the device, the versions of octile and torch, and the number of CPU threads. An edited
config.json is refused, by its checksum before the first checkpoint, and another machine or version causes a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from octile.checkpoint.step_folders import STATE, finished_steps, newest_intact, why_state_unusable
from octile.checkpoint.store import Store, as_os_error
from octile.parallel.ranks import Ranks
from octile.train.config import (
    FILE_TEXTS,
    TrainConfig,
    changed_settings,
    describe_changes,
    describe_settings,
    differences,
    shown,
)
from octile.train.run.best_model import BestModel
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder, check_unused
from octile.train.run.machine import warn_of_another_machine
from octile.train.run.metrics import read_lines, truncate_after
from octile.train.state import TrainerState
from octile.train.trainer import Trainer

OTHER_ORDER = "gradients are summed in another order, so the run is not bit-identical to an uninterrupted one"
CHANGE_NOTES = {  # settings that may change when a run is resumed: what follows, where it is more than the new value
    "steps": "the schedules of learning rate, batch and weights follow the new number",
    "micro_batches": OTHER_ORDER,
    "parallel.dp": OTHER_ORDER,
    "parallel.ep": OTHER_ORDER,
    "parallel.pp": OTHER_ORDER,
    "parallel.schedule": OTHER_ORDER,
    "parallel.reduce": "gradients are rounded otherwise, so the run is not bit-identical to an uninterrupted one",
    "guards": "they were added after the run began",
}
PRINTED_ELSEWHERE = {"out", *FILE_TEXTS}  # the folder in any case, and the file of a text by its name


class SavedRun(NamedTuple):
    """What a run was begun with.

    Attributes:
        run: its folder.
        config: its configuration.
        source: where the configuration was found: a file, or a checkpoint.
    """

    run: RunFolder
    config: TrainConfig
    source: str


def open_run(out: Path, checkpoints: str | None) -> SavedRun:
    """Open a run to resume; if its folder was lost, its configuration is that of its newest checkpoint.

    Args:
        out: the run's folder, or a new one.
        checkpoints: where the run's checkpoints are, if that is given.

    Raises:
        FileNotFoundError: the folder holds no run, and there are no checkpoints.
        FileExistsError: the folder holds a comparison.
        ValueError: config.json, or each checkpoint's state.json, is damaged.
    """
    run = RunFolder(out)
    if checkpoints is None or run.config_file.exists():
        run = RunFolder.open(out)
        return SavedRun(run, run.read_config(), str(run.config_file))
    check_unused(out)
    named = f"checkpoints {checkpoints!r} cannot be used"
    try:
        store = Store(checkpoints)
        store.check_answers()
        name = newest_intact(store, finished_steps(store).items(), _why_no_config)
    except (ValueError, ImportError) as error:
        raise type(error)(f"{named}: {error}") from None
    except OSError as error:
        raise as_os_error(error, named) from None
    if name is None:
        raise FileNotFoundError(f"{str(out)!r} holds no run, and checkpoints {checkpoints!r} holds none of one")
    checkpoint = store.folder(name)
    config = TrainConfig.from_state(checkpoint.read_json(STATE), checkpoint.path_of(STATE))
    return SavedRun(run, config, store.path_of(name))


def _why_no_config(checkpoint: Store) -> str | None:
    reason = why_state_unusable(checkpoint)
    if reason is not None or "config" in checkpoint.read_json(STATE):
        return reason
    return f"{checkpoint.url} is not that of a run"


def continued(saved: SavedRun, config: TrainConfig) -> TrainConfig:
    """The configuration of a resumed run: as requested, with the recipe that the run began with.

    Raises:
        ValueError: a setting is requested that a resumed run keeps.
    """
    config = config.with_texts_of(saved.config)
    if changes := changed_settings(saved.config, config):
        raise ValueError(
            f"a resumed run keeps its configuration: {describe_changes(changes)} in {saved.source}; "
            "leave the option out, or begin a new run"
        )
    return config.with_file_texts()  # a run of an earlier version saved only the file's name


def print_settings(begun: SavedRun, steps_done: int, console: RunConsole) -> None:
    """Print the settings of a run to resume, which files have changed since it began, and what is lost with others."""
    saved = begun.config
    console.print(f"settings from {begun.source}: {describe_settings(saved)}")
    for what, file, text in (
        ("recipe", Path(saved.recipe), saved.recipe_text),
        ("guards", saved.guards, saved.guards_text),
    ):
        if text is not None and file and file.is_file() and file.read_text("utf-8", errors="replace") != text:
            console.print(f"{file} has changed since the run began: the run keeps the {what} that it began with")
    if saved.guards_text is not None and not begun.run.metrics_file.exists():
        console.print(
            f"{begun.run.metrics_file} is gone, and with it which GEMMs the run's guards have switched: they are "
            "computed as at its begin, so the run is not bit-identical to an uninterrupted one"
        )
    telemetry_file = begun.run.telemetry_file
    if saved.guards_text is not None and steps_done >= saved.telemetry_every and not telemetry_file.exists():
        console.print(
            f"there is no {telemetry_file}: if the run has measured steps under guards already, the guards' conditions "
            "count from the next measured step on, so a guard may fire later than in an uninterrupted run"
        )


def check_goal(config: TrainConfig, checkpoint: Store) -> int:
    """Return the steps that a run has done; refuse to resume it if it is to do fewer.

    Raises:
        ValueError: the run has done more steps, or the checkpoint's state.json is damaged.
    """
    state = TrainerState.read(checkpoint.read_json(STATE))
    if state.steps_done > config.steps:
        raise ValueError(
            f"the run has done {state.steps_done:,} steps ({state.tokens:,} tokens) already, and is to do only "
            f"{config.steps:,} in all: give more --steps or --tokens"
        )
    return state.steps_done


def check_settings(config: TrainConfig, checkpoint: Store, device: torch.device, say: Callable[[str], None]) -> None:
    """Compare the settings of a run with those that its checkpoint was trained with.

    Changes that a resumed run may have are printed, one a line; what follows from them, only if steps are left. A
    machine that computes other bits causes a warning.

    Raises:
        ValueError: a setting differs that may not, because config.json was edited; or state.json is damaged.
    """
    state = checkpoint.read_json(STATE)
    if "config" in state:
        trained = TrainConfig.from_state(state, checkpoint.path_of(STATE))
        has_steps_left = TrainerState.read(state).steps_done < config.steps
        if changes := changed_settings(trained, config):
            raise ValueError(
                f"config.json was changed after the run began: {describe_changes(changes)} in {checkpoint.name}; "
                "change it back, or begin a new run"
            )
        for name, (before, now) in differences(trained, config).items():
            if name not in PRINTED_ELSEWHERE:
                note = f": {CHANGE_NOTES[name]}" if has_steps_left and name in CHANGE_NOTES else ""
                say(f"{name}: {shown(before)} before, {shown(now)} now{note}")
    warn_of_another_machine(checkpoint.name, state, device)


def check_restart(begun: SavedRun, config: TrainConfig, checkpoints: RunCheckpoints, ranks: Ranks) -> None:
    """Refuse to begin a run again whose checkpoints are lost or elsewhere, or whose config.json was edited.

    Raises:
        FileNotFoundError: it had checkpoints, which are gone or elsewhere.
        ValueError: its config.json was edited.
    """
    run, address = begun.run, checkpoints.store.url
    if ranks.from_first(run.summary_file.exists, bool):
        raise FileNotFoundError(
            f"{str(run.path)!r} holds a finished run, but {address} holds none of its checkpoints: "
            "bring them back, or choose another --out"
        )
    if begun.config.checkpoints != config.checkpoints:
        raise FileNotFoundError(
            f"{address} holds no checkpoint of this run, which wrote its checkpoints to "
            f"{run.checkpoints_of(begun.config)}: copy them there first"
        )
    if ranks.from_first(run.is_config_edited, bool):
        raise ValueError(
            f"{run.config_file} was changed after the run began, and no checkpoint was written yet that says "
            "how: change it back, or begin a new run with another --out"
        )
    measured, every = ranks.from_first(lambda: _last_step(run), int), begun.config.checkpoint_every
    if checkpoints.has_completed(measured, every):
        raise FileNotFoundError(
            f"{address} holds no checkpoint of this run, which has done {measured:,} steps "
            f"and saved a checkpoint every {every:,} of them: bring the checkpoints back, give their address "
            "with --checkpoints, or begin a new run with another --out"
        )


def _last_step(run: RunFolder) -> int:
    """The last step that a run has measured; 0 if it has measured none."""
    return max((line["step"] for line in read_lines(run.metrics_file) if "loss" in line), default=0)


def restore_run(
    trainer: Trainer, best: BestModel, run: RunFolder, checkpoint: Store | None, console: RunConsole
) -> None:
    """Restore a trainer and its best model from a checkpoint, if there is one, and drop later measurements."""
    if checkpoint is None:
        console.print("no checkpoint was written yet: starting from the beginning")
    else:
        from octile.checkpoint.sharded import ShardedCheckpoint  # it takes a second to import

        found = ShardedCheckpoint(checkpoint.url, check=False)  # it was checked when it was chosen
        trainer.load(trainer.strategy.layout.own_rows(found), found.state)
        best.load(trainer.strategy.layout.own_rows(found, best=True), found.state, trainer.steps_done)
        console.print(f"resumed at step {trainer.steps_done} from {checkpoint.name}")
        if trainer.steps_done == trainer.config.steps:
            console.print(
                "all its steps are done: only the model, the sample and the report are written; to train on: --steps N"
            )
    last = -1 if checkpoint is None else trainer.steps_done  # the initial weights are measured again, too
    for note in trainer.ranks.from_first(lambda: truncate_after(run, last), list[str]):
        console.print(note)
