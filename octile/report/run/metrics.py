"""Reads a run folder, in whatever state the run left it.

metrics.jsonl has one JSON object a line; a line's keys tell its kind:

    training      {"step", "loss", "main_loss", "mtp_loss", "balance_loss", "lr", "grad_norm", "tokens", …}
                  and "indexer_loss" with indexers
    validation    {"step", "val_loss", "val_tokens": predicted tokens, of which val_loss is the mean}
                  and "ema_val_loss" of averaged weights; that of step 0 is of the weights that a run began with
    experts       {"step", "expert_load": {layer: [tokens of each expert]}}
    tile scales   {"step", "tile_scales": {operand: {"log2": […], "count": […]}}}
    stops         {"step", "stopped": why this step ended the run}
    guards        {"step", "guard": what `octile.lab.guards` records of a rule that fired}, any number at a step

A run that was stopped and resumed writes some steps twice. A training line at step s discards all earlier lines about
later steps, and of two lines about one step the later one counts. A damaged line (`octile.report.run.lines`), such as
the last one of a killed run, is counted and left out.

telemetry.jsonl, of a run with telemetry, has a line for each operand and each GEMM of a measured step
(`octile.lab.telemetry`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octile.report.run.lines import Record, parse_line
from octile.validation import CHECKSUM

Floats = NDArray[np.float64]

KINDS = {
    "training": "loss",
    "validation": "val_loss",
    "experts": "expert_load",
    "tile_scales": "tile_scales",
    "stops": "stopped",
}

TELEMETRY = "telemetry.jsonl"
TELEMETRY_NAMES = ("step", "layer", "product", "operand")
TELEMETRY_STATISTICS = ("quantization_snr_db", "underflows%", "overflows%", "cur_amax")  # that reports show


@dataclass(frozen=True)
class Run:
    """The records of a run.

    Attributes:
        config: config.json.
        summary: summary.json, or empty. All its keys are optional: `preset`, `recipe`, `machine`, `parameters`,
            `active_parameters` (per token), `bytes_per_token` (of the held-out text), `held_out_share` (of the text's
            bytes, if a part of it is held out) and `held_out_text` (how much that is). `examples` has numbers of texts,
            and of tokens to train on. `prompt` is the beginning of sample.txt. `model_step` and `model_val_loss` are
            the step after which model/ was, and its held-out loss, `initial_val_loss` that of the weights that the run
            began with, and `ema_val_loss` that of model_ema/. `stopped_after_validations` is the patience that ended
            the run early.
        sample: sample.txt, or None.
        training, validation, experts, tile_scales, stops: the records of each kind in order of their steps, each step
            once.
        guards: {"step", "guards": the rules that fired at this step}, in order of the steps.
        telemetry: the rows of telemetry.jsonl with those of their statistics that reports show, in order of the steps.
        unreadable_lines: for each of the two files, how many lines could not be read.
    """

    config: Record
    summary: Record
    sample: str | None
    training: tuple[Record, ...]
    validation: tuple[Record, ...]
    experts: tuple[Record, ...]
    tile_scales: tuple[Record, ...]
    stops: tuple[Record, ...]
    guards: tuple[Record, ...]
    telemetry: tuple[Record, ...]
    unreadable_lines: dict[str, int]

    def series(self, key: str) -> tuple[Floats, Floats]:
        """Steps and values (float64, NaN where a value is not a number) of the records that have `key`."""
        records = [r for r in (*self.training, *self.validation) if key in r]
        return np.array([r["step"] for r in records], dtype=np.float64), np.array([as_float(r[key]) for r in records])

    def fact(self, key: str) -> Any:
        """A value from the summary, else from the configuration at any depth, else None."""
        return find(self.summary, key) if find(self.summary, key) is not None else find(self.config, key)

    @property
    def broken_steps(self) -> list[int]:
        """The steps whose training loss was NaN or infinite."""
        return [r["step"] for r in self.training if not math.isfinite(as_float(r["loss"]))]

    @property
    def initial_val_loss(self) -> float:
        """The held-out loss before the first step in nats per token; NaN if it was not measured."""
        return next((as_float(r["val_loss"]) for r in self.validation if r["step"] == 0), math.nan)

    @property
    def last_step(self) -> int:
        """The last step that has a training or validation record; 0 before the first."""
        return max((r["step"] for r in (*self.training, *self.validation)), default=0)

    @property
    def seconds(self) -> float:
        """Seconds spent on the steps up to the last one that was recorded; 0 before the first."""
        return next((as_float(r["seconds"]) for r in reversed(self.training) if "seconds" in r), 0.0)


def read_run(folder: Path) -> Run:
    """Read a run folder: config.json, metrics.jsonl, and summary.json, sample.txt and telemetry.jsonl if they exist.

    Raises:
        FileNotFoundError: the folder, its config.json or its metrics.jsonl is missing.
        ValueError: config.json or summary.json is not a JSON object.
    """
    folder = Path(folder)
    for path in (folder, folder / "config.json", folder / "metrics.jsonl"):
        if not path.exists():
            raise FileNotFoundError(f"run must be a folder with config.json and metrics.jsonl: {path} does not exist")
    config = _read_object(folder / "config.json")
    config.pop(CHECKSUM, None)  # which is no setting
    summary = _read_object(folder / "summary.json") if (folder / "summary.json").exists() else {}
    sample_path = folder / "sample.txt"
    sample = sample_path.read_text(encoding="utf-8", errors="replace") if sample_path.exists() else None
    kinds, unreadable = _replay((folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace"))
    telemetry, unreadable_telemetry = _read_telemetry(folder / TELEMETRY)
    unreadable_lines = {"metrics.jsonl": unreadable, TELEMETRY: unreadable_telemetry}
    return Run(config, summary, sample, **kinds, telemetry=telemetry, unreadable_lines=unreadable_lines)


def _replay(text: str) -> tuple[dict[str, tuple[Record, ...]], int]:
    history: dict[str, dict[int, Record]] = {kind: {} for kind in (*KINDS, "guards")}
    latest, unreadable = -1, 0
    for line in filter(str.strip, text.splitlines()):
        record = parse_line(line)
        if record is None:
            unreadable += 1
            continue
        step = record["step"]
        if "loss" in record and step < latest:
            latest = step
            history = {kind: {s: r for s, r in by_step.items() if s <= step} for kind, by_step in history.items()}
        if "loss" in record:  # rules fire after it: those of an earlier run of this step are gone
            history["guards"].pop(step, None)
        latest = max(latest, step)
        for kind, key in KINDS.items():
            if record.get(key, {}) != {}:
                history[kind][step] = record
        if isinstance(guard := record.get("guard"), dict):
            history["guards"].setdefault(step, {"step": step, "guards": []})["guards"].append(guard)
    return {kind: tuple(by_step[s] for s in sorted(by_step)) for kind, by_step in history.items()}, unreadable


def _read_telemetry(path: Path) -> tuple[tuple[Record, ...], int]:
    """The rows of telemetry.jsonl, of those about one step, GEMM and operand the last, and the unreadable lines."""
    rows: dict[tuple[Any, ...], Record] = {}
    unreadable = 0
    if not path.exists():
        return (), unreadable
    with path.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            row = parse_line(line, is_telemetry=True)
            if row is None:
                unreadable += 1
                continue
            key = row["step"], row["layer"], row["product"], row.get("operand")
            rows[key] = {name: row[name] for name in (*TELEMETRY_NAMES, *TELEMETRY_STATISTICS) if name in row}
    return tuple(sorted(rows.values(), key=lambda row: row["step"])), unreadable


def _read_object(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(value).__name__}")
    return value


def find(tree: Mapping[str, Any], key: str) -> Any:
    """The value of `key` nearest to the root of a nested mapping, or None."""
    level = [tree]
    while level:
        for node in level:
            if node.get(key) is not None:
                return node[key]
        level = [child for node in level for child in node.values() if isinstance(child, Mapping)]
    return None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested configuration as rows (dotted name, value as JSON text), in the order of its keys."""
    rows = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append(
                (
                    f"{prefix}{key}",
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str),
                )
            )
    return rows


def as_float(value: Any) -> float:
    """A number as it is; anything else (null, text) as NaN."""
    return float(value) if isinstance(value, int | float) else math.nan


def last_known(values: Floats) -> float:
    """The last finite value of a series, NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def smooth(values: Floats) -> Floats:
    """Smooth a noisy series by applying a moving average twice.

    The window is narrow at the beginning, where a loss falls steeply, and grows to n/40 samples on either side (at
    least 3, but at most n/10 in a short series).

    Args:
        values: [n] float64; NaN and infinite values have no weight and stay NaN.
    """
    n = len(values)
    if n == 0:
        return values
    index = np.arange(n)
    half = np.minimum(max(n // 40, min(3, n // 10)), index // 3)
    windows = np.stack([index - half, np.minimum(index + half + 1, n)], axis=1).ravel()
    known = np.isfinite(values)

    def window_sums(series: Floats) -> Floats:  # no running sum: one huge value would make all later ones inexact
        return np.add.reduceat(np.append(series, 0.0), windows)[::2]

    trend, weights = values, np.maximum(window_sums(known.astype(np.float64)), 1)
    for _ in range(2):
        trend = np.where(known, window_sums(np.where(known, trend, 0.0)) / weights, np.nan)
    return trend
