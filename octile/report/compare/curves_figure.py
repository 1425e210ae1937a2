"""The figure of the curves: training losses of all recipes, and below them the held-out gaps to BF16."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octile.report.run.metrics import Floats, last_known, smooth
from octile.report.style import COLOR, label_ends, line, recipe_style, step_axis, style_axes
from octile.text import format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octile.report.compare.result import CompareResult, Curve

MAX_BARS = 10  # the gap axis reaches at most this multiple of the bar


def draw_compare(figure: "Figure", result: "CompareResult") -> None:
    """Draw the training losses, and below them the held-out gaps to BF16 with the noise band and the bar."""
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[4, 5])
    curves = (result.bf16, *(result.runs(name)[0] for name in result.names))
    step_axis(losses, max((max(c.steps + c.val_steps, default=1) for c in curves), default=1))
    _draw_losses(figure, losses, curves)
    _draw_gaps(figure, gaps, result)


def caption_compare(result: "CompareResult") -> str:
    """Return the caption: what the curves are, the noise band, the bar, and which recipe leaves the band."""
    many = any(len(result.runs(name)) > 1 for name in result.names)
    if result.nudge:
        band = "the difference between BF16 and BF16 whose weights were rounded once at the start"
    else:
        band = "the difference between two BF16 runs with different seeds"
    noise = f" The gray noise band is {band} (the maximum of three neighboring measurements)."
    is_drawn = len(result.band()[0]) > 1  # of one measurement there is no area
    return (
        f"Above: training loss, smoothed{', of the first seed' if many else ''}. Below: the gap of each recipe's"
        f" held-out loss to BF16's{', the mean of its seeds, and faintly each seed' if many else ''}."
        f"{noise if is_drawn else ''} The dotted lines are the bar of ±{result.bar:.2%}.{_caption_leaving(result)}"
    )


def _caption_leaving(result: "CompareResult") -> str:
    at = {name: result.leaves_band_at(name) for name in result.names}
    left = [f"{name} at step {step:,}" for name, step in at.items() if step is not None]
    return f" A circle marks where a recipe leaves the band for good: {', '.join(left)}." if left else ""


def _draw_losses(figure: "Figure", axes: "Axes", curves: "tuple[Curve, ...]") -> None:
    style_axes(axes, None, "training loss (nats per token; lower is better)")
    trends = [(curve, smooth(np.array(curve.train_loss))) for curve in curves]
    trends = [(curve, trend) for curve, trend in trends if np.isfinite(trend).any()]
    whole = [trend for curve, trend in trends if curve.diverged_at is None]  # diverged ones may leave the axes
    if whole:
        low, high = min(map(np.nanmin, whole)), max(map(np.nanmax, whole))
        axes.set_ylim(low - 0.06 * (high - low) - 0.02, high + 0.06 * (high - low) + 0.02)
    labels = []
    for curve, trend in reversed(trends):  # BF16 last, on top
        line(axes, np.array(curve.steps, dtype=np.float64), trend, **recipe_style(curve.recipe))
        if curve.diverged_at is None:
            labels.append((last_known(trend), curve.recipe, recipe_style(curve.recipe)["color"]))
        else:
            _mark_end(axes, curve, curve.steps, trend, f"{curve.recipe} diverged")
    label_ends(figure, axes, labels)


def _draw_gaps(figure: "Figure", axes: "Axes", result: "CompareResult") -> None:
    style_axes(axes, "step", "held-out loss vs. BF16 (%)")
    steps, band = result.band()
    whole = [name for name in result.names if all(curve.diverged_at is None for curve in result.runs(name))]
    near = [name for name in whole if not abs(result.outcome(name).gap) > MAX_BARS * result.bar]
    each_run = [result.gaps(curve)[1] for name in near for curve in result.runs(name)]
    reach = 100 * _reach(result.bar, [band, *each_run])
    axes.set_ylim(-reach, reach)
    axes.fill_between(steps, -100 * band, 100 * band, color=COLOR["muted"], alpha=0.16, linewidth=0)
    axes.axhline(0, color=COLOR["ink"], linewidth=1.2)
    labels = [(0.0, "bf16", COLOR["ink"])]
    for bar in (-result.bar, result.bar):
        axes.axhline(100 * bar, color=COLOR["muted"], linewidth=1, linestyle=":")
        labels.append((100 * bar, f"bar {format_percent(bar)}", COLOR["muted"]))
    for name in result.names:
        style, runs = recipe_style(name), result.runs(name)
        at, gaps = result.mean_gaps(name)
        for curve in runs if len(runs) > 1 else ():
            each, its_gaps = result.gaps(curve)
            axes.plot(each, 100 * its_gaps, alpha=0.3, **{**style, "linewidth": 0.9})
        axes.plot(at, 100 * gaps, marker="o", markersize=3.5, **style)
        if (left := result.leaves_band_at(name)) is not None:
            height = 100 * float(gaps[np.flatnonzero(at == left)[0]])
            axes.plot(left, height, "o", markersize=10, markerfacecolor="none", color=style["color"])
        if name not in whole:
            _mark_end(axes, runs[0], at, 100 * gaps)
        elif np.isfinite(gaps).any():
            labels.append((100 * last_known(gaps), f"{name} {format_percent(last_known(gaps))}", style["color"]))
    label_ends(figure, axes, labels)


def _mark_end(axes: "Axes", curve: "Curve", steps: Sequence[float] | Floats, values: Floats, text: str = "") -> None:
    """Mark the end of a diverged curve with a cross, at the edge of the axes if it left them, and a text."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return
    color = recipe_style(curve.recipe)["color"]
    (low, high), right = axes.get_ylim(), axes.get_xlim()[1]
    x, y = steps[known[-1]], float(np.clip(values[known[-1]], low, high))
    axes.plot(x, y, marker="x", markersize=7, markeredgewidth=1.6, color=color, clip_on=False)
    over = 10 if y < low + 0.8 * (high - low) else -12
    side = "left" if x < 0.3 * right else "right" if x > 0.7 * right else "center"
    axes.annotate(text, (x, y), (0, over), textcoords="offset points", color=color, va="center", ha=side)


def _reach(bar: float, series: list[Floats]) -> float:
    """Half the height of the gap axis: the maximum of the bar and the later half of all gaps, but at most MAX_BARS.

    A recipe that ends beyond MAX_BARS is not among `series`; the label of its curve states its gap.
    """
    later = np.abs(np.concatenate([gaps[len(gaps) // 2 :] for gaps in series]))
    later = later[np.isfinite(later)]
    return float(np.clip(1.2 * later.max(initial=0.0), 1.6 * bar, MAX_BARS * bar))
