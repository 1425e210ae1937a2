"""Metrics of a run: a line a measurement, written so that a crash loses none that was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octile.checkpoint.files import write_text
from octile.extras import require
from octile.report.run.lines import parse_line
from octile.train.run.folder import TELEMETRY, RunFolder

Metrics = dict[str, Any]


class MetricsWriter:
    """Appends measurements to metrics.jsonl and to TensorBoard; a line is in the file when `write` returns."""

    def __init__(self, run: RunFolder, steps_done: int):
        require("tensorboard", extra="train")
        from torch.utils.tensorboard import SummaryWriter

        self._file = run.metrics_file.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run.tensorboard), purge_step=steps_done + 1)

    def write(self, metrics: Metrics) -> None:
        """Append a line, which must have a `step`; NaN and infinity become null. Its numbers go to TensorBoard too."""
        line = {name: None if _is_not_finite(value) else value for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self.draw(name, value, metrics["step"])

    def draw(self, name: str, value: float, step: int) -> None:
        """Add a number to TensorBoard only."""
        self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._tensorboard.close()


class NoMetrics(MetricsWriter):
    """Writes nothing, on the ranks of a run that have nothing to write."""

    def __init__(self, run: RunFolder, steps_done: int):
        pass

    def write(self, metrics: Metrics) -> None:
        """Do nothing."""

    def draw(self, name: str, value: float, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def read_lines(file: Path) -> list[Metrics]:
    """The lines of metrics.jsonl or telemetry.jsonl, without damaged ones, such as one that a crash cut short."""
    return _parse_lines(file)[0]


def truncate_after(run: RunFolder, step: int) -> list[str]:
    """Delete the measurements of later steps, which a resumed run is going to measure again.

    Damaged lines are deleted, too, such as the last line of a killed run. Returns a sentence for each file that had
    some, and for measurements that are gone or lack the last steps.
    """
    notes = []
    if step and not run.metrics_file.exists():
        notes.append(f"there is no {run.metrics_file}: the measurements of the steps 1 to {step:,} are missing")
    for file in (run.metrics_file, run.telemetry_file):
        if file.exists():
            lines, damaged = _parse_lines(file)
            write_text(file, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
            if damaged:
                notes.append(_describe_damage(file, len(lines), damaged))
            last = max((line["step"] for line in lines), default=0)
            if file == run.metrics_file and last < step:
                notes.append(f"{file} has no measurements of the steps {last + 1:,} to {step:,}")
    return notes


def _parse_lines(file: Path) -> tuple[list[Metrics], list[int]]:
    """The whole lines of a file, and the numbers of the damaged ones, counted from 1."""
    lines, damaged = [], []
    for number, text in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not text.strip():
            continue
        line = parse_line(text, is_telemetry=file.name == TELEMETRY)
        if line is None:
            damaged.append(number)
        else:
            lines.append(line)
    return lines, damaged


def _describe_damage(file: Path, whole: int, damaged: list[int]) -> str:
    if damaged[0] > whole:
        return f"{file.name} was damaged after line {whole}: it is cut there"
    which = f"line {damaged[0]} was" if len(damaged) == 1 else f"{len(damaged)} lines from line {damaged[0]} on were"
    return f"{which} damaged in {file.name}: left out"


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
