"""Figures of gradients compared with BF16's, layer by layer: the angle between them and the ratio of their norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.report.style import recipe_style, style_axes

WORST = 8  # weights of which a table shows the angles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octile.report.run.metrics import Floats


def draw_angles(figure: Figure, checks: Sequence[GradientCheck]) -> None:
    """Draw the angle to BF16's gradient by layer, in degrees, a line per step."""
    _draw(figure, checks, "angle to BF16's gradient (degrees)", lambda layer: layer.degrees, zero=True)


def draw_norms(figure: Figure, checks: Sequence[GradientCheck]) -> None:
    """Draw the norm compared with BF16's gradient by layer, in percent, a line per step."""
    _draw(figure, checks, "norm vs. BF16's gradient (%)", lambda layer: 100 * (layer.norm_ratio - 1), zero=False)


def caption_angles(checks: Sequence[GradientCheck]) -> str:
    """Return the caption of the angles: that of the whole gradient and the largest of a layer, at the last step."""
    last = checks[-1]
    layers = [layer for layer in last.by_layer() if not np.isnan(layer.degrees)]
    if not layers:
        return f"No gradient of {last.recipe} at step {last.step:,} was finite."
    worst, whole = max(layers, key=lambda layer: layer.degrees), last.whole()
    which = f"layer {worst.name}" if worst.name.isdecimal() else worst.name
    return (
        f"The angle between the gradient that {last.recipe} computes and BF16's, for each layer, at the same weights"
        f" and on the same batch. At step {last.step:,} the angle of the whole gradient is {whole.degrees:.1f}°"
        f" (cosine {whole.cosine:.4f}), the largest is {worst.degrees:.1f}° in {which}. From faint to strong:"
        f" {'steps' if len(checks) > 1 else 'step'} {', '.join(f'{check.step:,}' for check in checks)}."
    )


def caption_norms(checks: Sequence[GradientCheck]) -> str:
    """Return the caption of the norms."""
    return "The norms of the same gradients: below zero, the recipe's gradient is shorter than BF16's."


def worst_weights(checks: Sequence[GradientCheck]) -> list[WeightGradient]:
    """The weights of the last check with the largest angles."""
    known = [weight for weight in checks[-1].weights if not np.isnan(weight.degrees)]
    return sorted(known, key=lambda weight: -weight.degrees)[:WORST]


def _draw(
    figure: Figure, checks: Sequence[GradientCheck], y: str, value: Callable[[WeightGradient], float], zero: bool
) -> None:
    axes, color = figure.subplots(), recipe_style(checks[0].recipe)["color"]
    style_axes(axes, "layer", y)
    names = [layer.name for layer in checks[0].by_layer()]
    for number, check in enumerate(checks, 1):
        values: Floats = np.array([value(layer) for layer in check.by_layer()])
        if not np.isfinite(values).any():
            continue
        strength = number / len(checks)
        axes.plot(values, color=color, marker="o", markersize=3.5, alpha=0.25 + 0.75 * strength)
    if zero:
        axes.set_ylim(bottom=0)
    else:
        axes.axhline(0, color=color, linewidth=1, alpha=0.4)
    shown = range(0, len(names), max(1, len(names) // 8))
    axes.set_xticks(list(shown), [names[i] for i in shown])
