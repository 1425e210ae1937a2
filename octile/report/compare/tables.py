"""The tables of a comparison: their rows, for the page and for the terminal."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import numpy as np

from octile.report.compare.result import MIN_MEASUREMENTS_OUTSIDE, CompareResult, Curve
from octile.report.compare.summary import span
from octile.report.style import palette_name
from octile.text import format_bytes, format_percent

if TYPE_CHECKING:
    from octile.report.table import ScreenTable

TableRow = dict[str, str]
MOODS = {"good": "green", "bad": "red"}


def format_compare_table(result: CompareResult) -> ScreenTable:
    """The outcome of each run and recipe as a table for the terminal."""
    table = _table()
    table.add_column("gap to\nBF16", justify="right")
    table.add_column("outcome", min_width=8)
    for name in ("gap, last\nquarter", "held-out\nloss", "tokens/s", "weights,\noptimizer"):
        table.add_column(name, justify="right")
    for row in outcome_rows(result):
        keys = ("name", "gap", "outcome", "smoothed", "loss", "speed", "memory")
        table.add_row(*(row[key] for key in keys), style=MOODS.get(row["mood"]))
    return table


def format_details_table(result: CompareResult) -> ScreenTable:
    """The intervals, gradients and worst tokens of each recipe as a table for the terminal."""
    from rich.text import Text

    table = _table()
    for name in ("95% over\nseeds", "95% over\nheld-out text", "leaves the\nnoise at", "gradient\nangle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst\ntokens")
    for row in detail_rows(result):
        keys = ("name", "over_seeds", "over_text", "leaves", "angle", "tokens")
        table.add_row(*(Text(row[key]) for key in keys))
    return table


def _table() -> ScreenTable:
    """An empty table with a column for the recipe, narrow enough for 80 characters."""
    from rich.box import SIMPLE_HEAD

    from octile.report.table import ScreenTable

    table = ScreenTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    return table


def outcome_rows(result: CompareResult) -> list[TableRow]:
    """A row for each BF16 run and for each recipe, which has the mean of its seeds."""
    rows = []
    for number, curve in enumerate(result.baselines):
        base = number == 0 or bool(result.nudge)  # with a nudge, each seed is a baseline and none measures noise
        gap = [] if base else [result.gap(curve)]
        smoothed = [] if base else [result.smoothed_gap(curve)]
        kind = "baseline" if base else "noise band"
        rows.append(_row([curve], f"bf16, seed {curve.seed}", gap, smoothed, kind, ""))
    for name in result.names:
        outcome, runs = result.outcome(name), list(result.runs(name))
        label = f"{name}, {len(runs)} seeds" if len(runs) > 1 else name
        is_open = outcome.within_bar or (outcome.is_significant is None and abs(outcome.gap) <= outcome.noise_band)
        mood = "good" if outcome.is_shown else "" if is_open else "bad"
        rows.append(_row(runs, label, [outcome.gap], [outcome.smoothed], outcome.verdict, mood))
    return rows


def detail_rows(result: CompareResult) -> list[TableRow]:
    """A row for each recipe."""
    rows = []
    for name in result.names:
        outcome = result.outcome(name)
        angles = [f"{check.whole().degrees:.1f}" for check in result.gradients if check.recipe == name]
        tokens = [group.name for each in result.tokens if each.recipe == name for group in each.worst[:3]]
        rows.append(
            {
                "color": palette_name(name),
                "name": name,
                "over_seeds": span(outcome.over_seeds) if len(outcome.gaps) > 1 else "one seed",
                "bootstrap": span(outcome.over_seeds_bootstrap),
                "over_text": span(outcome.over_text),
                "leaves": _leaving(result, name),
                "angles": " → ".join(angles) or "–",
                "angle": f"{angles[-1]}°" if angles else "–",
                "tokens": "\n".join(tokens) or "–",
            }
        )
    return rows


def _leaving(result: CompareResult, name: str) -> str:
    """From which step a recipe stays outside the noise; too few measurements cannot show that it does."""
    if (step := result.leaves_band_at(name)) is not None:
        return f"step {step:,}"
    measured = np.intersect1d(result.band()[0], result.mean_gaps(name)[0])
    return "never" if len(measured) >= MIN_MEASUREMENTS_OUTSIDE else "not measured"


def _row(runs: list[Curve], name: str, gap: list[float], smoothed: list[float], outcome: str, mood: str) -> TableRow:
    diverged = any(curve.diverged_at is not None for curve in runs)  # then the last loss is not a final one
    loss = sum(curve.final_val_loss for curve in runs) / len(runs)
    speed = statistics.median_high(curve.tokens_per_s for curve in runs)
    memory = runs[0].state_bytes
    return {
        "color": palette_name(runs[0].recipe),
        "name": name,
        "loss": f"{loss:.4f}" if math.isfinite(loss) and not diverged else "–",
        "gap": _percent(gap),
        "smoothed": _percent(smoothed),
        "speed": f"{speed:,.0f}" if math.isfinite(speed) else "–",
        "memory": format_bytes(memory) if memory is not None else "–",
        "outcome": outcome,
        "mood": mood,
    }


def _percent(fractions: list[float]) -> str:
    return format_percent(fractions[0]) if fractions and math.isfinite(fractions[0]) else "–"
