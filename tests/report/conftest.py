"""Shared by the tests of reports: a small run as `octile train` writes it, and a parser of HTML pages."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octile.report import rl as rl_page
from octile.report.compare import page as compare_page
from octile.report.run import page as run_page
from octile.report.svg import Chart

CONFIG = {
    "preset": "tiny",
    "recipe": "deepseek_v3",
    "steps": 40,
    "model": {"vocab_size": 4096, "rope_scaling": None},
    "optim": {"lr": 0.003, "betas": [0.9, 0.95], "clip": 1.0},
}
SUMMARY = {
    "parameters": 8_131_072,
    "active_parameters": 3_204_096,
    "bytes_per_token": 3.2,
    "held_out_share": 0.0961,
    "held_out_text": "2,310 tokens in 6 spans",
    "machine": "2 CPU cores",
    "prompt": "def ",
}


def training(step: int, **changes: Any) -> dict[str, Any]:
    """Make a training record: a loss that falls from 8.3 towards 2.9 and oscillates."""
    main = 2.9 + 5.4 * math.exp(-step / 12) + 0.05 * math.sin(2.4 * step)
    return {
        "step": step,
        "loss": main + 0.3 * (main + 0.4),
        "main_loss": main,
        "mtp_loss": main + 0.4,
        "balance_loss": 1e-4,
        "lr": 0.003 * min(1, step / 5),
        "grad_norm": 0.5 + 2 / step,
        "tokens": 2048 * step,
        "tokens_per_s": 6000.0 + step,
        "flops_per_s": 6e12 + 1e9 * step,
        "mfu": 0.25,
        "seconds": 0.35 * step,
    } | changes


def validation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "val_loss": loss, "val_tokens": 16384}


def experts(step: int, **layers: list[int]) -> dict[str, Any]:
    return {"step": step, "expert_load": {f"model.layers.{name[1:]}.mlp": load for name, load in layers.items()}}


def tile_scales(step: int) -> dict[str, Any]:
    operands = {"x": ([-8, -7, -6], [10, 80, 10]), "w": ([-13, -12], [60, 40]), "dy": ([-30, -28, -12], [20, 60, 20])}
    return {"step": step, "tile_scales": {o: {"log2": log2, "count": count} for o, (log2, count) in operands.items()}}


def telemetry(step: int, layer: str, product: str, operand: str | None = None, **changes: Any) -> dict[str, Any]:
    """Make a row of telemetry of an operand, or of a GEMM; `changes` has underflows and saturated for their keys."""
    row = {"step": step, "layer": f"model.layers.{layer}", "product": product}
    if operand is None:
        return row | {"outputs": 1024, "quantization_snr_db": 30.0, "quantization_bias": 0.0} | changes
    errors = {"underflows%": changes.pop("underflows", 0.0), "overflows%": changes.pop("saturated", 0.0)}
    return row | {"operand": operand, "cur_amax": 1.0, "snr_db": None, **errors} | changes


def measured_step(step: int) -> list[dict[str, Any]]:
    """Make the rows of telemetry of a step: wgrad of layer 1 has the lowest SNR, and its dy the most underflows."""
    rows = []
    for layer in range(4):
        for product, operand, amax in (("fprop", "x", 8.0), ("dgrad", "dy", 1e-3), ("wgrad", "dy", 2e-3)):
            lost = 0.5 if (layer, product) == (1, "wgrad") else 0.01 * layer
            name = f"{layer}.mlp.down_proj"
            rows.append(telemetry(step, name, product, operand, cur_amax=amax, underflows=lost))
            rows.append(telemetry(step, name, product, quantization_snr_db=30.0 - 10 * lost - 1 / step))
    return rows


def complete_run() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, 41):
        lines.append(training(step))
        if step % 10 == 0:
            lines.append(validation(step, 2.9471 + 1 / step))
            lines.append(experts(step, L1=[100, 100, 100, 100], L3=[50, 175, 75, 100]))
            lines.append(tile_scales(step))
    return lines


def write_run(
    folder: Path,
    metrics: list[dict[str, Any]] | str,
    config: Any = CONFIG,
    summary: Any = SUMMARY,
    sample: str = "",
    telemetry: list[dict[str, Any]] | str = "",
) -> Path:
    """Write a run folder from records, or from the text of metrics.jsonl and telemetry.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(_lines(metrics))
    (folder / "config.json").write_text(json.dumps(config))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    if sample:
        (folder / "sample.txt").write_text(sample)
    if telemetry:
        (folder / "telemetry.jsonl").write_text(_lines(telemetry))
    return folder


def _lines(records: list[dict[str, Any]] | str) -> str:
    return records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return `write_run` with a folder of this test."""
    return partial(write_run, tmp_path / "run")


def draw_no_figures(patch: pytest.MonkeyPatch) -> None:
    """Leave the figures of the reports of runs empty: they take most of the time that a page takes."""
    leave_empty(patch, run_page, compare_page, rl_page)


def leave_empty(patch: pytest.MonkeyPatch, *pages: ModuleType) -> None:
    """Leave the figures of pages empty, given the modules that make their charts."""
    for page in pages:
        patch.setattr(page, "make_chart", lambda title, caption, *_, **__: Chart(title, caption, "<svg></svg>"))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_no_figures(monkeypatch)


@dataclass
class Page(HTMLParser):
    """A parsed HTML page: elements with their attributes, and the visible text."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""
    styles: str = ""
    _inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._inside:
            self.styles += data
        else:
            self.text += data + " "

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @property
    def loads(self) -> list[str]:
        """Return every address that a browser would load, also from styles."""
        fetching = {"src", "href", "xlink:href", "data", "srcset", "poster", "action", "background"}
        found = [v or "" for _, attributes in self.elements for name, v in attributes.items() if name in fetching]
        styles = [self.styles, *(v or "" for _, attributes in self.elements for v in attributes.values())]
        return found + [part.split(")")[0].strip("'\"") for text in styles for part in text.split("url(")[1:]]


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page
