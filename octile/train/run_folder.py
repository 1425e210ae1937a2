"""A run's folder: where its files lie, and how they are written so that a crash loses nothing.

config.json    the whole configuration          model/         the model in Hugging Face's layout
data/          tokens and tokenizer             checkpoints/   what `--resume` continues from
metrics.jsonl  what was measured                tensorboard/   the same as TensorBoard events
summary.json   facts for the report             report.html, sample.txt
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octile.train.config import TrainConfig

Metrics = dict[str, Any]


class Stopped(Exception):
    """A signal ended a run early; its checkpoint is written."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.summary_file = path / "summary.json"
        self.sample_file = path / "sample.txt"
        self.data = path / "data"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """Makes the folder of a new run. It counts as a run once `write_config` was called.

        Raises:
            FileExistsError: config.out holds a run already.
        """
        run = cls(config.out or _free_place(Path("runs"), f"{config.preset}-{config.recipe}"))
        if run.config_file.exists():
            raise FileExistsError(f"out {str(run.path)!r} holds a run already: add --resume, or choose another --out")
        run.path.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was started before.

        Raises:
            FileNotFoundError: there is no run in it.
        """
        run = cls(path)
        if not run.config_file.is_file():
            raise FileNotFoundError(f"{str(path)!r} holds no run: there is no {run.config_file}")
        return run

    def write_config(self, config: TrainConfig) -> None:
        write_atomically(self.config_file, config.to_json())

    def read_config(self) -> TrainConfig:
        try:
            return TrainConfig.from_json(self.config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.config_file} is damaged: {error}") from None

    def forget_after(self, step: int) -> None:
        """Cuts metrics.jsonl back to what was measured up to a step: the rest is about to be measured again."""
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # the line that a crash cut short
        write_atomically(self.metrics_file, "".join(kept))


class MetricsWriter:
    """Appends measurements to metrics.jsonl and to TensorBoard; a line is in the file when `write` returns."""

    def __init__(self, run: RunFolder):
        from torch.utils.tensorboard import SummaryWriter  # late: only a run needs it

        self._file = run.metrics_file.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run.tensorboard), purge_step=None)

    def write(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self._board.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._file.close()
        self._board.close()


def write_atomically(path: Path, text: str) -> None:
    """The file holds either what it held before or the whole text."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _free_place(parent: Path, name: str) -> Path:
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path
