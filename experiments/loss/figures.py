"""Figures of runs that differ in more than their recipe, which `octile compare` does not draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octile.report.style import COLOR, WIDE, label_ends, line, save_drawing, step_axis, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("ink", "blue", "vermilion", "green", "amber", "purple", "rose", "cyan", "olive", "brown")
STYLES = ("-", "--", ":", "-.")
TICKS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
COLOR_RANGE = 2.0  # doublings and halvings of the mean load between the outermost colors
COLUMNS, PANEL_HEIGHT = 2, 190  # panels in a row of `save_loads`; pixels

# name, steps, values
Line = tuple[str, Sequence[float], Sequence[float]]
# load over the mean, indexed by step, layer and expert
Loads = Sequence[Sequence[Sequence[float]]]


def save_lines(
    path: Path,
    what: str,
    groups: Sequence[Sequence[Line]],
    limits: tuple[float, float],
    mark: tuple[float, str] | None = None,
) -> None:
    """Draw lines over steps on a logarithmic axis, with their names at their ends and a dotted line at the mark.

    The lines of a group share a color. The axis ends at the largest value or at the upper limit, whichever is smaller;
    a cross marks each value beyond it.
    """
    values = np.array([value for group in groups for _, _, values in group for value in values], dtype=np.float64)
    low, high = limits[0], min(1.05 * values.max(), limits[1]) if np.isfinite(values).all() else limits[1]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        style_axes(axes, "step", what)
        step_axis(axes, max(steps[-1] for group in groups for _, steps, _ in group))
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.set_yticks([tick for tick in TICKS if low <= tick <= high], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        labels = []
        if mark:
            axes.axhline(mark[0], color=COLOR["muted"], linewidth=1, linestyle=":")
            labels.append((*mark, COLOR["muted"]))
        for color, group in zip(COLORS, groups, strict=False):
            for style, (name, steps, values) in zip(STYLES, group, strict=False):
                x, y = np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
                beyond = ~(y <= high)
                y[beyond] = high
                line(axes, x, y, color=COLOR[color], linestyle=style)
                axes.plot(x[beyond], y[beyond], "x", color=COLOR[color], markersize=7, clip_on=False)
                labels.append((float(y[-1]), name, COLOR[color]))
        label_ends(figure, axes, labels)

    save_drawing(path, WIDE, 420, draw)


def save_loads(path: Path, runs: Mapping[str, tuple[Sequence[float], Loads]]) -> None:
    """Draw the load of every expert over its layer's mean as colors, over the steps, with one panel per run."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list("load", [COLOR["blue"], COLOR["paper"], COLOR["vermilion"]])
    rows = -(-len(runs) // COLUMNS)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(rows, COLUMNS, squeeze=False)
        for axes in panels.flat[len(runs) :]:
            axes.set_visible(False)
        for axes, (name, (steps, loads)) in zip(panels.flat, runs.items(), strict=False):
            load_TLE = np.array(loads, dtype=np.float64)
            n_layers, n_experts = load_TLE.shape[1:]
            shown = np.log2(np.maximum(load_TLE, 2**-COLOR_RANGE)).reshape(len(steps), -1).T
            image = axes.imshow(shown, scale, aspect="auto", interpolation="none", vmin=-COLOR_RANGE, vmax=COLOR_RANGE,
                                extent=(0, steps[-1], n_layers * n_experts, 0))  # fmt: skip
            style_axes(axes, None, name)
            axes.grid(visible=False)
            axes.set_yticks([(layer + 0.5) * n_experts for layer in range(n_layers)])
            axes.set_yticklabels([f"layer {layer + 1}" for layer in range(n_layers)])
            for layer in range(1, n_layers):
                axes.axhline(layer * n_experts, color=COLOR["muted"], linewidth=0.8)
        bar = figure.colorbar(image, ax=panels, location="bottom", aspect=60, shrink=0.5)
        bar.set_ticks([-2, -1, 0, 1, 2], labels=["a quarter and less", "half", "the mean", "twice", "4 times and more"])

    save_drawing(path, WIDE, 70 + PANEL_HEIGHT * rows, draw)
