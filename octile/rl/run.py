"""The folder of a run of reinforcement learning, how it begins, and how it is resumed.

    config.json      the configuration, with "command": "octile rl"
    start/           the model that the run began with, which the reference is
    metrics.jsonl    a line a step; the texts of step 1 and of each hundredth step
    loggers.json     the ids that loggers have given the run; tensorboard/, wandb/: what they write
    checkpoints/     what `--resume` continues from
    model/           the model after the last step, in Hugging Face's layout
    summary.json     rewards of the first and of the last steps
    report.html      curves, and the texts

Everything is written so that a process may be killed at any moment. `start` is complete when config.json is written,
and a run without a checkpoint begins again from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from octile.atomic_files import write_json
from octile.checkpoint.files import remove
from octile.checkpoint.hugging_face import checkpoint_folder, has_fp8_weights, load, save
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.models.deepseek_v3 import DeepseekV3
from octile.rl.config import COMMAND, DIGESTS, RLConfig, changed_settings
from octile.rl.trainer import RLTrainer
from octile.tokenizer import FILES as TOKENIZER_FILES
from octile.train.config import shown
from octile.train.run.folder import START, RunFolder, check_unused, new_folder
from octile.train.run.machine import computed_on, warn_of_another_machine
from octile.train.run.tokens import MODEL_FILES
from octile.validation import CHECKSUM, read_json, take_checksum, with_checksum

COPIED_FILES = *TOKENIZER_FILES, *MODEL_FILES


def create_folder(config: RLConfig) -> RunFolder:
    """Return the folder of a new run; without `out`, one under runs/ that is made at once.

    Raises:
        FileExistsError: out holds a run or a comparison already, or is a file.
    """
    assert config.model is not None
    if config.out is None:
        name = checkpoint_folder(config.model).resolve()
        return RunFolder(new_folder(Path("runs"), f"{(name.parent if name.name == 'model' else name).name}-rl"))
    check_unused(config.out)
    return RunFolder(config.out)


def write_start(config: RLConfig, run: RunFolder) -> None:
    """Copy the model that a run begins with, exactly, with its tokenizer.

    Raises:
        FileNotFoundError, ValueError: as for `octile.checkpoint.hugging_face.load`.
    """
    assert config.model is not None
    for name in COPIED_FILES:  # of another model, if the first step of a run in this folder has failed
        remove(run.path / START / name)
    save_model(load(config.model), run.path / START, checkpoint_folder(config.model), is_exact=True)


def save_model(model: DeepseekV3, folder: Path, source: Path, is_exact: bool = False) -> None:
    """Write a model in Hugging Face's layout, in FP8 if the folder that it was read from has FP8 weights.

    Args:
        model: the model.
        folder: where it is written.
        source: the folder that it was read from, which has the tokenizer.
        is_exact: whether weights that are not in FP8 are stored in FP32 instead of BF16.
    """
    weights: Literal["fp8", "bf16", "float32"] = "float32" if is_exact else "bf16"
    if has_fp8_weights(source):
        weights = "fp8"
    save(model, folder, weights, [file for name in COPIED_FILES if (file := source / name).exists()])


def write_config(run: RunFolder, config: RLConfig) -> None:
    """Write config.json, with its checksum. It marks the folder as a run."""
    write_json(run.config_file, with_checksum(config.to_values()))


def read_config(out: Path) -> RLConfig:
    """Read the configuration of a run.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: it is a run of another command, or config.json is damaged or was edited.
    """
    run = RunFolder.open(out)
    values = read_json(run.config_file)
    if values.get("command") != COMMAND:
        raise ValueError(f"out {str(out)!r} holds no run of {COMMAND}: its config.json is that of another command")
    if take_checksum(values):
        raise ValueError(f"{run.config_file} was changed after the run began: change it back, or begin a new run")
    values.pop(CHECKSUM, None)
    try:
        return RLConfig.from_values(values)
    except ValueError as error:
        raise ValueError(f"{run.config_file} is damaged: {error}") from None


def continued(saved: RLConfig, requested: RLConfig) -> RLConfig:
    """Return the configuration of a resumed run.

    Raises:
        FileNotFoundError: a file that it needs is gone.
        ValueError: a setting or a file differs that a resumed run keeps.
    """
    config = requested.with_digests()
    if not (changes := changed_settings(saved, config)):
        return config
    words = [
        f"the file of {DIGESTS[name]} has other contents"
        if name in DIGESTS
        else f"{name} is {shown(new)} instead of {shown(old)}"
        for name, (old, new) in changes.items()
    ]
    raise ValueError(
        f"a resumed run keeps its configuration: {', '.join(words)}; leave it as it was, or begin a new run"
    )


def save_state(run: RunFolder, trainer: RLTrainer, config: RLConfig) -> None:
    """Write the checkpoint of the last step.

    Raises:
        OSError: the disk is full or not writable; the checkpoint before is unchanged then.
    """
    tensors, state = trainer.state()
    settings = {"config": config.to_values(), "computed_on": computed_on(trainer.device)}
    save_checkpoint(run.checkpoints, trainer.steps_done, tensors, {**state, **settings})


class Checkpoint:
    """The newest intact checkpoint of a run.

    Attributes:
        name: its folder's name; None if there is none.
        steps_done: the steps that lie before it.
    """

    def __init__(self, run: RunFolder):
        folder = latest_checkpoint(run.checkpoints) if run.checkpoints.exists() else None
        self.name = None if folder is None else folder.name
        self._tensors, self._state = dict[str, Tensor](), dict[str, Any]()
        if folder is not None:
            self._tensors, self._state = load_checkpoint(folder, check=False)  # it was checked when it was chosen
        self.steps_done = int(self._state.get("steps_done", 0))

    def check(self, config: RLConfig, device: torch.device) -> None:
        """Refuse to do fewer steps than were done, and warn if this machine computes other bits.

        Raises:
            ValueError: the run has done more steps.
        """
        if self.steps_done > config.steps:
            raise ValueError(f"steps must be at least {self.steps_done}, which the run has done, not {config.steps}")
        if self.name is not None:
            warn_of_another_machine(self.name, self._state, device)

    def restore(self, trainer: RLTrainer) -> None:
        """Restore a trainer, if there is a checkpoint."""
        if self.name is not None:
            trainer.restore(self._tensors, self._state)
