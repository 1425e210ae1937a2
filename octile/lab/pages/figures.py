"""Shared parts of the lab's figures: colors, legends, heat maps, names of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.report.style import COLOR, key_axis, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GEMM_COLOR = {"fprop": "blue", "dgrad": "green", "wgrad": "vermilion"}
MAX_PHONE_WIDTH = 980 * 0.7  # pixels; wider figures are for a desktop
SNR_DEEPEST, SNR_PALEST, SNR_STEP = 10.0, 40.0, 5.0  # dB: the ends of every heat map's color scale, legend's step
HEAT_ROW, HEAT_KEY, HEAT_FRAME = 19, 12, 130  # pixels: a row, the legend's bar, and everything else
SNR_MEANING = (
    "SNR is the signal-to-noise ratio in dB, the power of a result over the power of its error: at 20 dB the error is a"
    " tenth of the result (root mean square), at 40 dB a hundredth, and 6 dB more is half the error."
)
TERMS = (
    f"{SNR_MEANING} fprop, dgrad and wgrad are the three GEMMs of a linear layer: fprop computes its output, y = x ·"
    " wᵀ, dgrad the gradient of its input, dx = dy · w, and wgrad the gradient of its weight, dw = dyᵀ · x."
)


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
    """A heat map of SNRs in dB: cells[row][column], None for an empty cell."""

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

    @property
    def height(self) -> int:
        """The height of its figure in pixels."""
        return HEAT_FRAME + HEAT_ROW * len(self.rows)


def draw_heat(figure: Figure, heat: Heat, title: str) -> None:
    """Draw a heat map, each cell with its value, and below it the legend of its colors.

    A color stands for the same SNR on every page: SNR_DEEPEST and less have the deepest orange, SNR_PALEST and more the
    palest.
    """
    axes, key = figure.subplots(2, 1, height_ratios=[HEAT_ROW * len(heat.rows), HEAT_KEY])
    style_axes(axes, None, title)
    axes.grid(visible=False)
    for y, row in enumerate(heat.cells):
        for x, value in enumerate(row):
            if value is not None:
                _shade(axes, (x - 0.48, y - 0.45), 0.96, 0.9, value)
                axes.annotate(f"{value:.1f}", (x, y), ha="center", va="center", fontsize=10)
    axes.set_yticks(range(len(heat.rows)), short_names(heat.rows), fontsize=10)
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(heat.columns)), heat.columns)
    axes.set_xlim(-0.5, len(heat.columns) - 0.5)
    axes.tick_params(axis="x", length=0, top=False)
    axes.spines["bottom"].set_visible(False)
    _draw_key(key)


def _draw_key(axes: Axes) -> None:
    """Draw the legend of a heat map: the colors of SNRs in steps of SNR_STEP."""
    half = SNR_STEP / 2
    for number in range(round((SNR_PALEST - SNR_DEEPEST) / SNR_STEP) + 1):
        snr = SNR_DEEPEST + number * SNR_STEP
        _shade(axes, (snr - 0.96 * half, 0), 0.96 * SNR_STEP, 1.0, snr)
    axes.set_xlim(SNR_DEEPEST - half, SNR_PALEST + half)
    middle = (SNR_DEEPEST + SNR_PALEST) / 2
    labels = f"≤ {SNR_DEEPEST:g} dB", f"{middle:g} dB", f"≥ {SNR_PALEST:g} dB"
    key_axis(axes, [SNR_DEEPEST, middle, SNR_PALEST], labels, fontsize=10)


def _shade(axes: Axes, corner: tuple[float, float], width: float, height: float, snr: float) -> None:
    """Draw a rectangle in the color of an SNR."""
    from matplotlib.patches import Rectangle

    share = (SNR_PALEST - min(max(snr, SNR_DEEPEST), SNR_PALEST)) / (SNR_PALEST - SNR_DEEPEST)
    axes.add_patch(
        Rectangle(corner, width, height, facecolor=COLOR["vermilion"], alpha=0.04 + 0.66 * share, linewidth=0)
    )


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names of layers: model.layers.0.mlp.up_proj → 0 · mlp.up_proj."""
    return [name.removeprefix("model.layers.").replace(".", " · ", 1) for name in names]
