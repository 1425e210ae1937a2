"""Metrics of a run: a line a measurement, written so that a crash loses none that was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from octile.atomic_files import write_text
from octile.report.run.lines import Record, parse_line
from octile.train.config import Logger
from octile.train.run.folder import TELEMETRY, RunFolder
from octile.train.run.loggers import Loggers


class MetricsWriter:
    """Appends measurements to metrics.jsonl, where a line is when `write` returns, and hands numbers to loggers.

    Args:
        run: the folder of the run.
        loggers: the loggers of the run; none if not given.
    """

    def __init__(self, run: RunFolder, loggers: Loggers | None = None):
        self._file = run.metrics_file.open("a", encoding="utf-8")
        self._loggers = loggers

    def write(self, metrics: Record) -> None:
        """Append a line, which must have a `step`; NaN and infinity become null. Its numbers go to the loggers, too."""
        line = {name: None if _is_not_finite(value) else value for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in metrics.items() if name != "step" and isinstance(value, int | float)}
        self.draw(numbers, metrics["step"])

    def draw(self, values: Mapping[str, float], step: int) -> None:
        """Hand numbers to the loggers only."""
        if values and self._loggers is not None:
            self._loggers.write(values, step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NoMetrics(MetricsWriter):
    """Writes nothing, on the ranks of a run that have nothing to write."""

    def __init__(self) -> None:
        pass

    def write(self, metrics: Record) -> None:
        """Do nothing."""

    def draw(self, values: Mapping[str, float], step: int) -> None:
        """Do nothing."""


@contextmanager
def open_metrics(
    run: RunFolder, names: Sequence[Logger] | None, settings: Mapping[str, Any], steps_done: int
) -> Iterator[MetricsWriter]:
    """Open the metrics of a run and its loggers, and close them at the end, as failed if an exception ends it.

    Args:
        run, names, settings, steps_done: as for `Loggers`.
    """
    loggers = Loggers(names, run, settings, steps_done)
    failed = True
    try:
        with closing(MetricsWriter(run, loggers)) as writer:
            yield writer
        failed = False
    finally:
        loggers.close(failed)


def read_lines(file: Path) -> list[Record]:
    """The lines of metrics.jsonl or telemetry.jsonl, without damaged ones, such as one that a crash cut short.

    There are none if there is no file.
    """
    return _parse_lines(file)[0] if file.exists() else []


def truncate_after(run: RunFolder, step: int) -> list[str]:
    """Delete the measurements of the steps after `step`, which a resumed run measures again; all of them if it is -1.

    Damaged lines are deleted, too, such as the last line of a killed run. Returns a sentence for each file that had
    some, and for measurements that are gone or lack the last steps.
    """
    notes = []
    if step > 0 and not run.metrics_file.exists():
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


def _parse_lines(file: Path) -> tuple[list[Record], list[int]]:
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
