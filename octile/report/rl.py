"""The page of a run of reinforcement learning: reward, length, divergence, entropy, and how far the engine differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octile.report.page import render
from octile.report.run.lines import Record
from octile.report.run.metrics import as_float, flatten
from octile.report.style import COLOR, PHONE, THIRD, WIDE, label_ends, noisy_line, step_axis, style_axes
from octile.report.svg import Chart, make_chart
from octile.text import escape_control_characters, format_duration, format_quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"reward": "blue", "accuracy": "green", "format": "purple"}  # of the first figure: key and color


@dataclass(frozen=True)
class _Curve:
    """A figure of one metric over the steps.

    Attributes:
        title: its title.
        unit: label of its axis.
        about: what the metric is, for the caption.
    """

    title: str
    unit: str
    about: str


CURVES = {
    "length": _Curve("Length", "tokens", "The mean number of tokens of a completion"),
    "kl": _Curve("KL divergence", "nats per token", "The estimated divergence from the model at the beginning"),
    "entropy": _Curve("Entropy", "nats per token", "The entropy of the policy, estimated by its own samples,"),
    "delta_largest": _Curve("Δ log-prob", "nats", "The largest difference of a log-probability in engine and trainer"),
    "grad_norm": _Curve("Gradient norm", "norm before clipping", "The norm of the gradient"),
    "equal_groups": _Curve("Equal groups", "share", "The share of groups whose rewards are all equal"),
    "clipped": _Curve("Clipped tokens", "share", "The share of tokens whose ratio was clipped"),
}


def render_rl_report(
    title: str, steps: Sequence[Record], texts: Sequence[Record], summary: Record, config: Mapping[str, object]
) -> str:
    """Render the page, which needs no network. The same arguments always give the same page.

    Args:
        title: the title of the page.
        steps: the metrics of steps, at least one.
        texts: the records of texts: {"step", "texts": [{"prompt", "completion", "answer", "reward"}]}.
        summary: what `octile rl` writes as summary.json.
        config: the configuration.
    """
    charts = {"reward": _reward_chart(steps)}
    charts |= {key: _chart(curve, key, steps) for key, curve in CURVES.items() if key in steps[0]}
    samples = [(record["step"], [_escaped(text) for text in record["texts"]]) for record in texts]
    return render(
        "rl.html.jinja",
        title=title,
        lead=f"A language model that was trained by rewards for {len(steps):,} step{'s' * (len(steps) != 1)} (GRPO).",
        notices=[],
        facts=_facts(summary),
        charts=charts,
        samples=samples,
        configuration=flatten(config),
    )


def _facts(summary: Record) -> list[tuple[str, str, str]]:
    different = summary["different_log_probs"]
    return [
        ("Reward at the beginning", f"{summary['first_reward']:.3f}", "in step 1"),
        ("Reward at the end", f"{summary['last_reward']:.3f}", f"mean of the last {summary['last_steps']} steps"),
        ("Tokens", format_quantity(summary["tokens"]), "sampled"),
        ("Other bits", f"{different:,}", "tokens whose log-probability differs between engine and trainer"),
        ("Time", format_duration(summary["seconds"]), "of steps"),
    ]


def _escaped(text: Record) -> dict[str, str]:
    return {name: escape_control_characters(str(value)) for name, value in text.items()}


def _series(steps: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array([float(line["step"]) for line in steps]), np.array([as_float(line[key]) for line in steps])


def _reward_chart(steps: Sequence[Record]) -> Chart:
    keys = [key for key in PARTS if key in steps[0]]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        style_axes(axes, "step", "mean over the completions of a step")
        ends = []
        for key in keys:
            trend = noisy_line(axes, *_series(steps, key), COLOR[PARTS[key]])
            ends.append((float(trend[-1]), key, COLOR[PARTS[key]]))
        step_axis(axes, steps[-1]["step"])
        label_ends(figure, axes, ends)

    first, last = (f"{line['reward']:.3f}" for line in (steps[0], steps[-1]))
    caption = f"The reward was {first} in step {steps[0]['step']:,} and {last} in step {steps[-1]['step']:,}."
    return make_chart("Reward", caption, draw, (WIDE, 340), (PHONE, 300))


def _chart(curve: _Curve, key: str, steps: Sequence[Record]) -> Chart:
    numbers, values = _series(steps, key)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        style_axes(axes, "step", curve.unit)
        noisy_line(axes, numbers, values, COLOR["blue"])
        step_axis(axes, steps[-1]["step"])
        if (values == 0).all():
            axes.set_ylim(-0.05, 1)

    caption = f"{curve.about} was {values[0]:.3g} in step {numbers[0]:,.0f} and {values[-1]:.3g} in the last one."
    if key == "delta_largest" and (values == 0).all():
        caption = "All log-probabilities have the same bits in engine and trainer, in all steps."
    return make_chart(curve.title, caption, draw, (THIRD, 220))
