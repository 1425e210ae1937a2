"""The figure of the outcome: for each recipe its gaps, their mean, and both confidence intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from octile.report.compare.summary import FEW_SEEDS
from octile.report.style import COLOR, recipe_style, style_axes
from octile.text import format_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octile.report.compare.result import CompareResult

ROW, FRAME = 58, 90  # pixels
MAX_BARS = 20  # that the axis reaches to either side


def height(result: CompareResult) -> int:
    """The height of the figure in pixels."""
    return FRAME + ROW * (1 + len(result.names))


def draw_outcomes(figure: Figure, result: CompareResult) -> None:
    """Draw a row per recipe: the gap of each seed, their mean and both intervals; and a row for the noise."""
    axes = figure.subplots()
    style_axes(axes, None, "final held-out loss vs. BF16 (%)")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    if result.nudge:
        noise, what = [-result.noise_band, result.noise_band], "bf16, nudged: the noise to either side"
    else:
        noise = [result.gap(curve) for curve in result.baselines[1:]]
        what = "bf16, other seed" if len(noise) == 1 else "bf16, other seeds"
    _row(axes, 0, noise, what, COLOR["ink"], "")
    reach = [result.bar, *map(abs, noise)]
    for at, name in enumerate(result.names, 1):
        outcome = result.outcome(name)
        color = recipe_style(name)["color"]
        for interval, width, alpha in ((outcome.over_text, 1.4, 1.0), (outcome.over_seeds, 9, 0.22)):
            if interval:
                ends = [100 * interval.low, 100 * interval.high]
                axes.plot(ends, [at, at], color=color, linewidth=width, alpha=alpha, solid_capstyle="butt")
        _row(axes, at, outcome.gaps, name, color, format_percent(outcome.gap) if math.isfinite(outcome.gap) else "")
        if math.isfinite(outcome.gap):
            axes.plot([100 * outcome.gap] * 2, [at - 0.13, at + 0.13], color=color, linewidth=2.2)
        if abs(outcome.gap) <= MAX_BARS * result.bar:  # a larger gap is written as text and does not stretch the axis
            reach += [abs(gap) for gap in outcome.gaps]
            reach += [max(-i.low, i.high) for i in (outcome.over_text, outcome.over_seeds) if i]
    limit = 112 * min(max(gap for gap in reach if math.isfinite(gap)), MAX_BARS * result.bar)
    axes.set_xlim(-limit, limit)
    axes.set_ylim(len(result.names) + 0.45, -0.6)
    axes.set_yticks([])
    axes.axvline(0, color=COLOR["ink"], linewidth=1.2, zorder=0)
    for bar in (-result.bar, result.bar):
        axes.axvline(100 * bar, color=COLOR["muted"], linewidth=1, linestyle=":", zorder=0)


def caption_outcomes(result: CompareResult) -> str:
    """Return the caption: what dots and lines are, and what the number of seeds can prove."""
    seeds = max((len(result.runs(name)) for name in result.names), default=0)
    if seeds > 1:
        over = f"the wide line is the 95% interval over {seeds} seeds. " + (
            "Two seeds can hardly prove anything"
            if seeds <= FEW_SEEDS
            else "A recipe is significantly within the bar if the whole interval lies between the dotted lines"
        )
    else:
        over = "with one seed there is no interval over seeds"
    texts = any(result.outcome(name).over_text for name in result.names)
    text = " the thin line is the 95% interval over held-out text;" if texts else ""
    return f"Each dot is one seed, the tick their mean;{text} {over}."


def _row(axes, at, gaps, name, color, text):  # type: ignore[no-untyped-def]
    known = [100 * gap for gap in gaps if math.isfinite(gap)]
    axes.plot(known, [at] * len(known), "o", color=color, markersize=5.5, alpha=0.85)
    axes.annotate(f"{name} {text}" if text else name, (0, at), (0, 20), xycoords=("axes fraction", "data"),
                  textcoords="offset points", color=color, va="center",
                  bbox={"facecolor": COLOR["paper"], "edgecolor": "none", "pad": 2})  # fmt: skip
