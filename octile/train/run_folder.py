"""A run's folder: where its files lie, and how they are written so that a crash loses nothing.

config.json    the whole configuration          model/         the model in Hugging Face's layout
data/          tokens and tokenizer             checkpoints/   what `--resume` continues from
metrics.jsonl  what was measured                tensorboard/   the same as TensorBoard events
telemetry.jsonl  what octile.lab measured       captures/      operands that it kept
summary.json   facts for the report             report.html, sample.txt
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octile.checkpoint.files import write_text
from octile.extras import require
from octile.report.compare.file import COMPARE_FILE
from octile.train.config import TrainConfig
from octile.train.run_lock import DATA, is_left

Metrics = dict[str, Any]


class Stopped(Exception):
    """A signal ended a run early; its checkpoint is written."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.telemetry_file = path / "telemetry.jsonl"
        self.summary_file = path / "summary.json"
        self.sample_file = path / "sample.txt"
        self.data = path / DATA
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.captures = path / "captures"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """The folder of a new run; one without a name is made here, so that runs started at once do not share it.

        Raises:
            FileExistsError: config.out holds a run or a comparison already, or is a file.
        """
        run = cls(config.out or new_folder(Path("runs"), f"{config.preset}-{Path(config.recipe).stem}"))
        if run.config_file.exists():
            raise FileExistsError(f"out {str(run.path)!r} holds a run already: add --resume, or choose another --out")
        check_unused(run.path)
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
        """Cuts what was measured back to a step: the rest is about to be measured again."""
        for file in (self.metrics_file, self.telemetry_file):
            if file.exists():
                kept = [json.dumps(line) + "\n" for line in read_lines(file) if line["step"] <= step]
                write_text(file, "".join(kept))


def check_unused(path: Path) -> None:
    """Refuses a folder with results: runs and comparisons have files of the same names.

    Raises:
        FileExistsError: it holds a run or a comparison, or is a file.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"out {str(path)!r} is a file: name a folder")
    for file, what in ((RunFolder(path).config_file, "run"), (path / COMPARE_FILE, "comparison")):
        if file.exists():
            raise FileExistsError(f"out {str(path)!r} holds a {what} already: choose another --out")


def read_lines(file: Path) -> list[Metrics]:
    """The lines of metrics.jsonl or telemetry.jsonl; one that a crash cut short is left out."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class MetricsWriter:
    """Appends measurements to metrics.jsonl and to TensorBoard; a line is in the file when `write` returns."""

    def __init__(self, run: RunFolder, steps_done: int):
        require("tensorboard", extra="train")
        from torch.utils.tensorboard import SummaryWriter

        self._file = run.metrics_file.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run.tensorboard), purge_step=steps_done + 1)

    def write(self, metrics: Metrics) -> None:
        numbers = {name: None if _is_nan(value) else value for name, value in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps(numbers, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self.draw(name, value, metrics["step"])

    def draw(self, name: str, value: float, step: int) -> None:
        """Gives TensorBoard a number that has no line here."""
        self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def new_folder(parent: Path, name: str) -> Path:
    """The first of parent/name, parent/name-2, parent/name-3, … that is made here, or was left with data alone."""
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if path.is_dir() and is_left(path):
                return path
            number += 1
            path = parent / f"{name}-{number}"
