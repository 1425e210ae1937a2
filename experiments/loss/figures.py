"""Figures of the report that `octile compare` has no tool for: runs that differ in more than their recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octile.report.figures import COLOR, WIDE, dress, label_ends, line, save_drawing, step_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("ink", "blue", "vermilion", "green", "amber", "purple", "rose", "cyan", "olive", "brown")
STYLES = ("-", "--", ":", "-.")

# name, steps, values; of a group: those share a colour
Line = tuple[str, Sequence[float], Sequence[float]]


def save_lines(path: Path, what: str, groups: Sequence[Sequence[Line]], limits: tuple[float, float]) -> None:
    """Draws lines over steps, their names at their ends; what lies outside of the limits is not seen."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        dress(axes, "step", what)
        step_axis(axes, max(steps[-1] for group in groups for _, steps, _ in group))
        axes.set_ylim(*limits)
        labels = []
        for color, group in zip(COLORS, groups, strict=False):
            for style, (name, steps, values) in zip(STYLES, group, strict=False):
                y = np.array(values, dtype=np.float64)
                line(axes, np.array(steps, dtype=np.float64), y, color=COLOR[color], linestyle=style)
                labels.append((float(y[-1]), name, COLOR[color]))
        label_ends(figure, axes, labels)

    save_drawing(path, WIDE, 420, draw)
