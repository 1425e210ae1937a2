"""Shared parts of the lab's figures: colors, legends, heat maps, names of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.report.style import COLOR, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GEMM_COLOR = {"fprop": "blue", "dgrad": "green", "wgrad": "vermilion"}
MAX_PHONE_WIDTH = 980 * 0.7  # pixels; wider figures are for a desktop


def is_wide(figure: Figure) -> bool:
    """Whether a figure is the desktop form of a chart rather than the phone form."""
    return bool(figure.get_figwidth() * 72 > MAX_PHONE_WIDTH)


def legend(figure: Figure, colors: Mapping[str, str], wide: bool) -> None:
    """Add a legend below a figure of dots: each label in its color."""
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=COLOR[color], marker="o", linestyle="") for color in colors.values()]
    box = figure.legend(
        marks, list(colors), loc="outside lower left", ncols=len(colors) if wide else 2, frameon=False, fontsize=10,
        handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    for text, color in zip(box.get_texts(), colors.values(), strict=True):
        text.set_color(COLOR[color])


@dataclass(frozen=True)
class Heat:
    """A heat map: cells[row][column], None for an empty cell. The smallest value gets the deepest color."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[float | None]]

    @property
    def known(self) -> list[tuple[float, str, str]]:
        """The values that are not None, with the names of their row and column."""
        return [
            (value, row, column)
            for row, cells in zip(self.rows, self.cells, strict=True)
            for column, value in zip(self.columns, cells, strict=True)
            if value is not None
        ]


def draw_heat(figure: Figure, heat: Heat, title: str) -> None:
    """Draw a heat map, each cell with its value, shaded from the best (pale) to the worst (deep)."""
    axes = figure.subplots()
    style_axes(axes, None, title)
    axes.grid(visible=False)
    _shade(axes, heat)
    axes.set_yticks(range(len(heat.rows)), short_names(heat.rows), fontsize=10)
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(heat.columns)), heat.columns)
    axes.set_xlim(-0.5, len(heat.columns) - 0.5)
    axes.tick_params(axis="x", length=0, top=False)
    axes.spines["bottom"].set_visible(False)


def _shade(axes: Axes, heat: Heat) -> None:
    from matplotlib.patches import Rectangle

    low, high = min(heat.known)[0], max(heat.known)[0]
    for y, row in enumerate(heat.cells):
        for x, value in enumerate(row):
            if value is None:
                continue
            share = (high - value) / (high - low) if high > low else 0.0
            cell = Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, facecolor=COLOR["vermilion"], alpha=0.06 + 0.64 * share)
            axes.add_patch(cell)
            axes.annotate(f"{value:.1f}", (x, y), ha="center", va="center", fontsize=10)


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names of layers: model.layers.0.mlp.up_proj → 0 · mlp.up_proj."""
    return [name.removeprefix("model.layers.").replace(".", " · ", 1) for name in names]
