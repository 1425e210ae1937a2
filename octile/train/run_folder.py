"""A run's folder: where its files lie, and how they are written so that a crash loses nothing.

config.json    the whole configuration          model/         the model in Hugging Face's layout
data/          tokens and tokenizer             checkpoints/   what `--resume` continues from
metrics.jsonl  what was measured                tensorboard/   the same as TensorBoard events
summary.json   facts for the report             report.html, sample.txt
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octile.checkpoint.files import write_text
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
        """Finds the folder of a new run. It is made by what is first written into it.

        Raises:
            FileExistsError: config.out holds a run already.
        """
        run = cls(config.out or free_place(Path("runs"), f"{config.preset}-{config.recipe}"))
        if run.config_file.exists():
            raise FileExistsError(f"out {str(run.path)!r} holds a run already: add --resume, or choose another --out")
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
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.config_file, config.to_json())

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
        write_text(self.metrics_file, "".join(kept))


class MetricsWriter:
    """Appends measurements to metrics.jsonl and to TensorBoard; a line is in the file when `write` returns."""

    def __init__(self, run: RunFolder, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter  # late: only a run needs it

        self._file = run.metrics_file.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run.tensorboard), purge_step=steps_done + 1)

    def write(self, metrics: Metrics) -> None:
        numbers = {name: None if _is_nan(value) else value for name, value in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps(numbers, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self._board.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def free_place(parent: Path, name: str) -> Path:
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path
