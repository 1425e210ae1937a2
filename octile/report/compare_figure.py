"""The figure of a comparison: training losses over one another, and below them the held-out gap to BF16."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octile.report.figures import COLOR, dress, label_ends, line, recipe_look, step_axis
from octile.report.metrics import Floats, last_known, smooth
from octile.report.page import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octile.report.compare import CompareResult, Curve


def draw_compare(figure: "Figure", result: "CompareResult") -> None:
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[4, 5])
    curves = (result.bf16, *result.recipes)
    step_axis(losses, max((max(c.steps + c.val_steps, default=1) for c in curves), default=1))
    _draw_losses(figure, losses, curves)
    _draw_gaps(figure, gaps, result)


def say_compare(result: "CompareResult") -> str:
    return (
        "Above: training loss, smoothed. Below: how far each recipe's held-out loss lies from BF16's. The grey band is"
        " the distance between two BF16 runs with different seeds, which is chance;"
        f" the dotted lines are the bar of ±{result.bar:.2%}."
    )


def _draw_losses(figure: "Figure", axes: "Axes", curves: "tuple[Curve, ...]") -> None:
    dress(axes, None, "training loss (nats a token; lower is better)")
    trends = [(curve, smooth(np.array(curve.train_loss))) for curve in curves]
    trends = [(curve, trend) for curve, trend in trends if np.isfinite(trend).any()]
    whole = [trend for curve, trend in trends if curve.diverged_at is None]  # a diverging loss leaves through the top
    if whole:
        low, high = min(map(np.nanmin, whole)), max(map(np.nanmax, whole))
        axes.set_ylim(low - 0.06 * (high - low) - 0.02, high + 0.06 * (high - low) + 0.02)
    labels = []
    for curve, trend in reversed(trends):  # BF16 last, on top
        line(axes, np.array(curve.steps, dtype=np.float64), trend, **recipe_look(curve.recipe))
        if curve.diverged_at is None:
            labels.append((last_known(trend), curve.recipe, recipe_look(curve.recipe)["color"]))
        else:
            _mark_end(axes, curve, curve.steps, trend, f"{curve.recipe} diverged")
    label_ends(figure, axes, labels)


def _draw_gaps(figure: "Figure", axes: "Axes", result: "CompareResult") -> None:
    dress(axes, "step", "held-out loss against BF16 (%)")
    steps, band = result.gaps(result.bf16_other_seed)
    measured = [(curve, *result.gaps(curve)) for curve in result.recipes]
    reach = 100 * _reach(result.bar, [band, *(gaps for curve, _, gaps in measured if curve.diverged_at is None)])
    axes.set_ylim(-reach, reach)
    axes.fill_between(steps, -100 * np.abs(band), 100 * np.abs(band), color=COLOR["muted"], alpha=0.16, linewidth=0)
    axes.axhline(0, color=COLOR["ink"], linewidth=1.2)
    labels = [(0.0, "bf16", COLOR["ink"])]
    for bar in (-result.bar, result.bar):
        axes.axhline(100 * bar, color=COLOR["muted"], linewidth=1, linestyle=":")
        labels.append((100 * bar, f"bar {percent(bar)}", COLOR["muted"]))
    for curve, at, gaps in measured:
        look = recipe_look(curve.recipe)
        axes.plot(at, 100 * gaps, marker="o", markersize=3.5, **look)
        if curve.diverged_at is not None:
            _mark_end(axes, curve, at, 100 * gaps)
        elif np.isfinite(gaps).any():
            labels.append((100 * last_known(gaps), f"{curve.recipe} {percent(last_known(gaps))}", look["color"]))
    label_ends(figure, axes, labels)


def _mark_end(axes: "Axes", curve: "Curve", steps: Sequence[float] | Floats, values: Floats, text: str = "") -> None:
    """A cross where a diverged curve ends, or at the edge of the axes if it left them, and a text over or under it."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return
    color = recipe_look(curve.recipe)["color"]
    (low, high), right = axes.get_ylim(), axes.get_xlim()[1]
    x, y = steps[known[-1]], float(np.clip(values[known[-1]], low, high))
    axes.plot(x, y, marker="x", markersize=7, markeredgewidth=1.6, color=color, clip_on=False)
    over = 10 if y < low + 0.8 * (high - low) else -12
    side = "left" if x < 0.3 * right else "right" if x > 0.7 * right else "center"
    axes.annotate(text, (x, y), (0, over), textcoords="offset points", color=color, va="center", ha=side)


def _reach(bar: float, series: list[Floats]) -> float:
    """Half the height of the gap axis: the bar and the later half of all gaps, but at most ten bars."""
    later = np.abs(np.concatenate([gaps[len(gaps) // 2 :] for gaps in series]))
    later = later[np.isfinite(later)]
    return float(np.clip(1.2 * later.max(initial=0.0), 1.6 * bar, 10 * bar))
