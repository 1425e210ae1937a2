"""Recipes beside BF16: is the difference in loss one of the recipe or one of chance?

BF16 is trained twice, with two seeds; their distance on held-out text is the noise band. Each recipe starts where the
first BF16 run started and sees the same batches. With L the held-out loss:

    noise band = |L_b − L_a| / L_a          gap of a recipe = (L − L_a) / L_a

The bar is 0.25% in magnitude (DeepSeek-V3, arXiv 2412.19437, §3.3.1 and appendix B.1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octile.checkpoint.files import write_text
from octile.report.compare_figure import draw_compare, say_compare
from octile.report.figures import PHONE, WIDE, palette_name, save_drawing
from octile.report.metrics import Floats, flatten
from octile.report.page import byte_size, percent, render
from octile.report.svg import make_chart

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Curve:
    """One training run of the comparison. Losses in nats a token.

    `train_loss` [len(steps)] is the main head's raw loss of each step (the page smooths it). `state_bytes` is what
    training keeps in memory as the caller measured it, in bytes. A run that diverged says at which step.
    """

    recipe: str
    seed: int
    steps: tuple[int, ...]
    train_loss: tuple[float, ...]
    val_steps: tuple[int, ...]
    val_loss: tuple[float, ...]
    tokens_per_s: float
    state_bytes: int | None = None
    diverged_at: int | None = None

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.train_loss) or len(self.val_steps) != len(self.val_loss):
            raise ValueError(
                f"each loss of {self.recipe} needs its step, not {len(self.train_loss)} training losses at"
                f" {len(self.steps)} steps and {len(self.val_loss)} held-out losses at {len(self.val_steps)} steps"
            )

    @property
    def final_val_loss(self) -> float:
        """The last held-out loss, NaN if there is none."""
        return self.val_loss[-1] if self.val_loss else math.nan


@dataclass(frozen=True)
class CompareResult:
    """What `octile compare` measured: BF16 with seeds a and b, and the recipes, which share seed a."""

    preset: str
    bf16: Curve
    bf16_other_seed: Curve
    recipes: tuple[Curve, ...]
    bar: float = 0.0025
    machine: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def noise_band(self) -> float:
        """|L_b − L_a| / L_a at the end, a fraction."""
        return abs(self.gap(self.bf16_other_seed))

    def gap(self, curve: Curve) -> float:
        """(L − L_a) / L_a at the last step at which BF16 was measured, a fraction; NaN if the curve was not, there."""
        steps, gaps = self.gaps(curve)
        return float(gaps[-1]) if len(gaps) and steps[-1] == self.bf16.val_steps[-1] else math.nan

    def gaps(self, curve: Curve) -> tuple[Floats, Floats]:
        """Steps and relative gaps [n] float64, where both `curve` and BF16 were measured on held-out text."""
        base = dict(zip(self.bf16.val_steps, self.bf16.val_loss, strict=True))
        both = [(s, loss / base[s] - 1) for s, loss in zip(curve.val_steps, curve.val_loss, strict=True) if s in base]
        return np.array([s for s, _ in both], dtype=np.float64), np.array([gap for _, gap in both])

    def smoothed_gap(self, curve: Curve) -> float:
        """The mean gap over the last quarter of BF16's measurements, a fraction; NaN if the curve misses any."""
        recent = self.bf16.val_steps[-max(1, len(self.bf16.val_steps) // 4) :]
        gaps = dict(zip(*self.gaps(curve), strict=True))
        return sum(float(gaps.get(step, math.nan)) for step in recent) / len(recent) if recent else math.nan

    def within_bar(self, curve: Curve) -> bool:
        """Whether the recipe stayed finite and ended at most `bar` from BF16, in either direction."""
        return curve.diverged_at is None and abs(self.gap(curve)) <= self.bar

    def verdict(self, curve: Curve) -> str:
        """A recipe's outcome in a few words."""
        if curve.diverged_at is not None:
            return f"diverged at step {curve.diverged_at:,}"
        gap = self.gap(curve)
        if math.isnan(gap):
            return "not measured"
        if not self.within_bar(curve):
            return f"misses by {(abs(gap) - self.bar) * 100:.2f} points"
        return "within bar and noise" if abs(gap) <= self.noise_band else "within the bar"


def verdict_sentence(result: CompareResult) -> str:
    """The outcome of the first recipe, beside the noise, in plain words."""
    if math.isnan(result.noise_band):
        noise = "How far two BF16 runs with different seeds end apart was not measured."
    else:
        noise = f"Two BF16 runs that differ only in their seed end {result.noise_band:.2%} apart."
    if not result.recipes:
        return noise
    curve = result.recipes[0]
    if curve.diverged_at is not None or math.isnan(result.gap(curve)):
        return f"{curve.recipe}: {result.verdict(curve)}. {noise}"
    gap = result.gap(curve)
    side = "above" if gap > 0 else "below"
    if result.within_bar(curve):
        bar = f"within the bar of {result.bar:.2%}"
    else:
        bar = f"which misses the bar of {result.bar:.2%} by {(abs(gap) - result.bar) * 100:.2f} points"
    return f"On held-out text {curve.recipe} ends {abs(gap):.2%} {side} BF16, {bar}. {noise}"


def write_compare_report(folder: Path, result: CompareResult) -> Path:
    """Writes FOLDER/report.html: curves over one another, relative gaps with the noise band, and the table.

    Returns:
        the path of the page: one file that needs no network. The same result always gives the same page.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must exist: {folder} does not")
    page = render(
        "compare.html.jinja",
        title=f"{result.preset}: recipes beside BF16",
        lead=verdict_sentence(result),
        notices=[],
        chart=make_chart(
            "Loss, and its distance from BF16",
            say_compare(result),
            lambda figure: draw_compare(figure, result),
            size=(WIDE, 560),
            narrow=(PHONE, 560),
        ),
        rows=_rows(result),
        bar=f"{result.bar:.2%}",
        noise="not measured" if math.isnan(result.noise_band) else f"{result.noise_band:.2%}",
        machine=result.machine,
        configuration=flatten(result.config),
    )
    path = folder / "report.html"
    write_text(path, page)
    return path


def save_compare_figure(result: CompareResult, path: Path) -> Path:
    """Writes the figure as a file, PNG (twice the pixels, for sharp screens) or SVG by the suffix of `path`.

    Raises:
        ValueError: the suffix is another.
    """
    return save_drawing(path, WIDE, 560, lambda figure: draw_compare(figure, result))


def format_compare_table(result: CompareResult) -> "Table":
    """The outcome as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("recipe", no_wrap=True)
    table.add_column("gap to\nBF16", justify="right")
    table.add_column("outcome")
    for name in ("gap,\nsmoothed", "held-out\nloss", "tokens/s", "memory"):
        table.add_column(name, justify="right")
    for row in _rows(result):
        style = {"good": "green", "bad": "red"}.get(row["mood"])
        keys = ("name", "gap", "outcome", "smoothed", "loss", "speed", "memory")
        table.add_row(*(row[key] for key in keys), style=style)
    return table


def _rows(result: CompareResult) -> list[dict[str, str]]:
    def row(curve: Curve, name: str, outcome: str, mood: str) -> dict[str, str]:
        gap, smoothed = result.gap(curve), result.smoothed_gap(curve)
        loss = curve.final_val_loss  # a diverged run's last loss is not a final one
        return {
            "color": palette_name(curve.recipe),
            "name": name,
            "loss": f"{loss:.4f}" if math.isfinite(loss) and curve.diverged_at is None else "–",
            "gap": percent(gap) if math.isfinite(gap) and curve is not result.bf16 else "–",
            "smoothed": percent(smoothed) if math.isfinite(smoothed) and curve is not result.bf16 else "–",
            "speed": f"{curve.tokens_per_s:,.0f}",
            "memory": byte_size(curve.state_bytes) if curve.state_bytes is not None else "–",
            "outcome": outcome,
            "mood": mood,
        }

    first, second = result.bf16, result.bf16_other_seed
    rows = [
        row(first, f"bf16, seed {first.seed}", "baseline", ""),
        row(second, f"bf16, seed {second.seed}", "noise band", ""),
    ]
    for curve in result.recipes:
        rows.append(row(curve, curve.recipe, result.verdict(curve), "good" if result.within_bar(curve) else "bad"))
    return rows
