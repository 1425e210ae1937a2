"""Figures of a run over its steps: loss, learning rate, gradient norm, throughput.

Each figure has two functions: `draw_…` draws it, `caption_…` writes its caption from the data. Both are called only
when the run has recorded at least one finite value for the figure.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from octile.report.run.metrics import Floats, Run, as_float, last_known, smooth
from octile.report.style import COLOR, label_ends, line, noisy_line, plain_log_ticks, step_axis, style_axes
from octile.text import format_quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LOSS_FOR_PERPLEXITY = 20.0  # nats per token; far worse than guessing, so that a perplexity is meaningless

MOSTLY_CLIPPED = 0.9  # share of the clipped steps from which clipping is explained

SCHEDULED = {  # values that a configuration can change during a run: label and color
    "batch_size": ("batch", "blue"),
    "mtp_loss_weight": ("MTP weight", "purple"),
    "balance_speed": ("γ", "green"),
}


def main_loss(run: Run) -> tuple[Floats, Floats]:
    """Steps and values of the training loss that is comparable with the held-out loss.

    This is the loss of next-token prediction alone, or the whole loss if that was not recorded.
    """
    steps, values = run.series("main_loss")
    return (steps, values) if len(steps) else run.series("loss")


def mtp_loss(run: Run) -> tuple[Floats, Floats]:
    """Steps and values of multi-token prediction's loss; none if the model has no such layer, which records zeros."""
    steps, values = run.series("mtp_loss")
    has_layer = run.fact("num_nextn_predict_layers") != 0
    return (steps, values) if has_layer else (steps[:0], values[:0])


def draw_loss(figure: "Figure", run: Run) -> None:
    """Draw the training losses with their trends, the held-out losses, and the first step with a non-finite loss."""
    axes = figure.subplots()
    style_axes(axes, "step", "loss (nats per token; lower is better)")
    labels, extent = [], []
    for (steps, values), color, text in (
        (main_loss(run), "blue", "training"),
        (mtp_loss(run), "purple", "MTP"),
    ):
        if not np.isfinite(values).any():
            continue
        trend = noisy_line(axes, steps, values, COLOR[color])
        labels.append((last_known(trend), text, COLOR[color]))
        extent += [np.nanmin(trend), np.nanmax(trend), *np.quantile(_finite(values), [0.002, 0.998])]
    for key, color, text in (("val_loss", "vermilion", "held-out"), ("ema_val_loss", "green", "EMA")):
        steps, values = run.series(key)
        if not np.isfinite(values).any():
            continue
        dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(steps) <= 60 else {}
        axes.plot(steps, values, color=COLOR[color], linewidth=1, **dots)
        labels.append((last_known(values), f"{text} {last_known(values):.3f}", COLOR[color]))
        extent += [_finite(values).min(), _finite(values).max()]
    step_axis(axes, run.last_step)
    low, high = min(extent), max(extent)
    axes.set_ylim(low - 0.06 * (high - low) - 0.05, high + 0.06 * (high - low) + 0.05)
    if run.broken_steps:
        axes.axvline(run.broken_steps[0], color=COLOR["muted"], linewidth=1, linestyle=":")
        axes.annotate("loss is not finite", (run.broken_steps[0], 1), (-5, -6), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha="right", va="top", color=COLOR["muted"])  # fmt: skip
    label_ends(figure, axes, labels)


def caption_loss(run: Run) -> str:
    """Return the caption: the held-out loss from first to last, or the training loss without one."""
    steps, held_out = run.series("val_loss")
    steps, held_out = steps[np.isfinite(held_out)], held_out[np.isfinite(held_out)]
    has_mtp = np.isfinite(mtp_loss(run)[1]).any()
    mtp = " MTP is the loss of multi-token prediction: the token after the next, given the next one."
    ahead = mtp if has_mtp else ""
    average = _finite(run.series("ema_val_loss")[1])
    if len(average):
        ahead = f" EMA is the held-out loss of the averaged weights, {average[-1]:.2f} in the end.{ahead}"
    if len(held_out) >= 2:
        first, last = held_out[0], held_out[-1]
        caption = f"The loss on held-out text went from {first:.2f} (step {steps[0]:,.0f}) to {last:.2f} nats per token"
        if max(first, last) < MAX_LOSS_FOR_PERPLEXITY:
            perplexities = [format_quantity(math.exp(loss)) for loss in (first, last)]
            caption += f", the perplexity from {perplexities[0]} to {perplexities[1]}"
        return f"{caption}.{ahead}"
    trend = _finite(smooth(main_loss(run)[1]))
    moved = f"went from {trend[0]:.2f} to {trend[-1]:.2f} nats per token" if len(trend) else "was never finite"
    measured = f"was measured once: {held_out[0]:.2f}" if len(held_out) else "has not been measured yet"
    return f"The training loss {moved}; the loss on held-out text {measured}.{ahead}"


def draw_learning_rate(figure: "Figure", run: Run) -> None:
    """Draw the learning rate over the steps."""
    axes = figure.subplots()
    style_axes(axes, "step", "learning rate (× 10⁻³)")
    steps, values = run.series("lr")
    line(axes, steps, values * 1e3, color=COLOR["blue"])
    step_axis(axes, run.last_step)
    axes.set_ylim(0, 1.08 * float(np.nanmax(values)) * 1e3 or 1)


def caption_learning_rate(run: Run) -> str:
    """Return the caption: the peak and the last learning rate."""
    steps, values = run.series("lr")
    if len(steps) == 1:
        return f"The learning rate was {values[0]:.3g} at step {steps[0]:,.0f}."
    peak = np.nanargmax(values)
    return (
        f"The learning rate has its peak of {values[peak]:.3g} at step {steps[peak]:,.0f}"
        f" and is {last_known(values):.3g} at the last step."
    )


def draw_schedule(figure: "Figure", run: Run) -> None:
    """Draw the values that the configuration changes during the run."""
    axes = figure.subplots()
    style_axes(axes, "step", "share of the maximum")
    ends = []
    for key, (name, color) in SCHEDULED.items():
        steps, values = run.series(key)
        if len(steps) and np.nanmax(values) > 0:
            shares = values / np.nanmax(values)
            line(axes, steps, shares, color=COLOR[color])
            ends.append((float(shares[-1]), name, COLOR[color]))
    step_axis(axes, run.last_step)
    axes.set_ylim(-0.04, 1.12)
    label_ends(figure, axes, ends)


def caption_schedule(run: Run) -> str:
    """Return the caption: the first and the last of each value."""
    words = []
    for key, (name, _) in SCHEDULED.items():
        steps, values = run.series(key)
        changes = np.flatnonzero(np.diff(values)) + 1
        if len(changes):
            words.append(f"{name} from {values[0]:g} to {values[-1]:g} (last change at step {steps[changes[-1]]:,.0f})")
        elif len(values):
            words.append(f"{name} {values[0]:g}, unchanged so far")
    return f"The values that the configuration changes during the run: {', '.join(words)}."


def has_gradient(run: Run) -> bool:
    """Whether a step recorded a gradient norm above zero, which a logarithmic axis can show."""
    _, values = run.series("grad_norm")
    return bool((np.isfinite(values) & (values > 0)).any())


def draw_gradient(figure: "Figure", run: Run) -> None:
    """Draw the gradient norm on a logarithmic axis, and the norm to which it is clipped."""
    axes = figure.subplots()
    style_axes(axes, "step", "norm before clipping (log scale)")
    steps, values = run.series("grad_norm")
    values = np.where(values > 0, values, np.nan)
    noisy_line(axes, steps, values, COLOR["blue"])
    axes.set_yscale("log")
    plain_log_ticks(axes)
    step_axis(axes, run.last_step)
    limit = as_float(run.fact("clip"))
    if math.isfinite(limit):
        axes.axhline(limit, color=COLOR["muted"], linewidth=1, linestyle=":")
        label_ends(figure, axes, [(limit, "clip", COLOR["muted"])])


def caption_gradient(run: Run) -> str:
    """Return the caption: the largest and the median norm, the share of clipped steps, and what a large one means."""
    steps, values = run.series("grad_norm")
    known = np.isfinite(values)
    peak = np.nanargmax(np.where(known, values, np.nan))
    caption = f"The gradient norm was {values[peak]:.2g} at step {steps[peak]:,.0f}"
    if len(steps) > 1:
        caption += f", its maximum, and {np.median(values[known]):.2g} in the median"
    limit = as_float(run.fact("clip"))
    if math.isfinite(limit):
        clipped = np.mean(values[known] > limit)
        caption += f". {clipped:.0%} of the steps were clipped to norm {limit:g}"
        if clipped >= MOSTLY_CLIPPED:
            whose = "Muon's and AdamW's" if run.config.get("optim", {}).get("name") == "muon" else "AdamW's"
            caption += (
                f": almost all gradients have this norm then, and the same weight in {whose} moments. A factor that "
                f"all gradients have in common does not change {whose} updates, so clipping does not slow the run down"
            )
    return caption + "."


def draw_throughput(figure: "Figure", run: Run) -> None:
    """Draw the tokens per second over the steps."""
    axes = figure.subplots()
    style_axes(axes, "step", "tokens per second")
    steps, values = run.series("tokens_per_s")
    noisy_line(axes, steps, values, COLOR["blue"])
    step_axis(axes, run.last_step)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def caption_throughput(run: Run) -> str:
    """Return the caption: the median and the middle 90% of the speeds."""
    values = _finite(run.series("tokens_per_s")[1])
    if len(values) == 1:
        return f"The only step so far processed {values[0]:,.0f} tokens per second."
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return (
        f"The median step processed {middle:,.0f} tokens per second;"
        f" 90% of the steps lie within {low:,.0f}–{high:,.0f}."
    )


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]
