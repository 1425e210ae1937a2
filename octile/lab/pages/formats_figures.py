"""Figures of `octile lab formats` that need no tensors: values, gaps, rounding errors and sizes of each format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from octile.lab.pages.figures import is_wide
from octile.lab.pages.page import power
from octile.report.run.metrics import Floats
from octile.report.style import COLOR, label_ends, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Facts = Mapping[str, Any]  # `octile.lab.formats.Facts` as a dictionary

FORMAT_COLOR = {
    "fp32": "ink",
    "bf16": "green",
    "fp16": "cyan",
    "e5m6": "purple",
    "e4m3": "blue",
    "e5m2": "vermilion",
    "int8": "amber",
    "e2m1": "rose",
    "ue8m0": "muted",
}


def label(name: str) -> str:
    """Return the name of a format as it is written on pages: "e4m3" → "E4M3"."""
    return name.upper()


def color(name: str) -> str:
    """Return the color of a format."""
    return COLOR[FORMAT_COLOR[name]]


def _octave_axis(axes: Axes, low: int, high: int, name: str, every: int) -> None:
    """Set up an x axis over log₂ values, with powers of two as labels."""
    axes.set_xlim(low, high)
    ticks = range(low + -low % every, high + 1, every)
    axes.set_xticks(list(ticks), [power(2.0**tick) for tick in ticks])
    axes.set_xlabel(name, loc="right")


def _rows(axes: Axes, names: list[str], size: float = 11) -> None:
    """Set up one row per format, the first at the top, with names in the formats' colors."""
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.set_yticks(range(len(names)), [label(name) for name in names], fontsize=size)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_color(color(name))
    axes.grid(axis="y", visible=False)


def draw_ranges(figure: Figure, rows: list[Facts]) -> None:
    """Draw a bar per format from its smallest to its largest positive value, on a logarithmic axis."""
    axes = figure.subplots()
    style_axes(axes, None, "smallest to largest positive value (pale: subnormal)")
    _octave_axis(axes, -150, 130, "magnitude", 50 if figure.get_figwidth() * 72 < 600 else 25)
    axes.grid(axis="x")
    for at, row in enumerate(rows):
        smallest, normal, largest = (np.log2(row[key]) for key in ("smallest", "smallest_normal", "largest"))
        axes.barh(at, normal - smallest, left=smallest, height=0.5, color=color(row["name"]), alpha=0.35)
        axes.barh(at, largest - normal, left=normal, height=0.5, color=color(row["name"]))
    _rows(axes, [row["name"] for row in rows])


def describe_ranges(rows: list[Facts]) -> str:
    """Describe the range of E4M3 compared with that of FP32, in doublings."""
    by_name = {row["name"]: row for row in rows}
    return (
        f"E4M3 covers {by_name['e4m3']['octaves']:.1f} doublings of the {by_name['fp32']['octaves']:.0f} that FP32"
        " covers. That is enough for the values of one tile, which is why every tile has a scale."
    )


def draw_number_line(figure: Figure, values: Mapping[str, Floats]) -> None:
    """Draw each format scaled so that its largest value is 1, as in a tile with a scale."""
    axes = figure.subplots()
    style_axes(axes, "share of the tile's largest value", "every positive value, largest value = 1")
    axes.set_xlim(-0.005, 1.005)
    for at, (name, points) in enumerate(values.items()):
        axes.vlines(points / points[-1], at - 0.3, at + 0.3, color=color(name), linewidth=0.8)
    _rows(axes, list(values))


def describe_number_line(values: Mapping[str, Floats]) -> str:
    """Describe how many of its positive values each format has below a sixteenth of its largest."""
    below = [f"{label(name)} has {int((points < points[-1] / 16).sum())}" for name, points in values.items()]
    return (
        "INT8 values are evenly spaced; values of a float are denser near zero. Below a sixteenth of the largest value,"
        f" {', '.join(below)}."
    )


def draw_log_line(figure: Figure, values: Mapping[str, Floats], rows: list[Facts]) -> None:
    """Draw every positive value of each format as a line on a logarithmic axis, subnormal ones pale."""
    axes = figure.subplots()
    style_axes(axes, None, "every positive value (pale: subnormal)")
    _octave_axis(axes, -20, 17, "value", 10 if figure.get_figwidth() * 72 < 600 else 5)
    normal = {row["name"]: row["smallest_normal"] for row in rows}
    for at, (name, points) in enumerate(values.items()):
        for part, alpha in ((points[points >= normal[name]], 1.0), (points[points < normal[name]], 0.45)):
            axes.vlines(np.log2(part), at - 0.3, at + 0.3, color=color(name), linewidth=0.8, alpha=alpha)
    _rows(axes, list(values))


def describe_log_line(rows: list[Facts]) -> str:
    """Describe the number of values in a doubling, and the smallest values."""
    by_name = {row["name"]: row for row in rows}
    e4m3, e5m2 = by_name["e4m3"], by_name["e5m2"]
    return (
        f"A float has the same number of values in every doubling: E4M3 has {e4m3['between_1_and_2'] + 1} and E5M2"
        f" {e5m2['between_1_and_2'] + 1}. Among the subnormal numbers there are fewer, down to the smallest,"
        f" {power(e4m3['smallest'])} and {power(e5m2['smallest'])}. The smallest positive value of INT8 is 1."
    )


def draw_gaps(figure: Figure, gaps: Mapping[str, tuple[Floats, Floats]]) -> None:
    """Draw gaps: format → its positive values, and the gap from each to the next."""
    axes = figure.subplots()
    narrow = figure.get_figwidth() * 72 < 600
    style_axes(axes, None, "from a value to the next one")
    _octave_axis(axes, -20, 17, "value", 10 if narrow else 5)
    for name, (values, gap) in gaps.items():
        axes.step(np.log2(values), np.log2(gap), where="post", color=color(name))
    low = min(float(np.log2(gap.min())) for _, gap in gaps.values())
    axes.set_ylim(low - 1, 14.5)
    ticks = range(int(low) + 1, 15, 5)
    axes.set_yticks(list(ticks), [power(2.0**tick) for tick in ticks])
    ends = {name: (float(np.log2(values[-1])), float(np.log2(gap[-1]))) for name, (values, gap) in gaps.items()}
    for name, end in ends.items():
        if name == "e2m1":  # its line ends among the others, so the label stands at its start
            start = float(np.log2(gaps[name][0][0])), float(np.log2(gaps[name][1][0]))
            axes.annotate(label(name), start, (-5, 0), textcoords="offset points", ha="right", va="center",
                          color=color(name))  # fmt: skip
        elif end[0] < 12:  # its line ends inside the figure
            below = 0 if name == "e4m3" else 6  # free of other lines
            axes.annotate(label(name), end, (6, -below), textcoords="offset points", va="center", color=color(name))
    label_ends(figure, axes, [(y, label(name), color(name)) for name, (x, y) in ends.items() if x >= 12])


def describe_gaps(rows: list[Facts]) -> str:
    """Describe the gap to the next value between 1 and 2, and its growth."""
    epsilon = {row["name"]: row["epsilon"] for row in rows}
    return (
        f"Between 1 and 2 the gap is epsilon: {power(epsilon['fp16'])} in FP16, {power(epsilon['e4m3'])} in E4M3 and"
        f" {power(epsilon['e5m2'])} in E5M2. It doubles with every doubling of the value. For subnormal numbers, on"
        " the left, and for INT8 it is constant."
    )


def draw_relative_error(figure: Figure, octaves: list[int], errors: Mapping[str, Floats]) -> None:
    """Draw the largest relative rounding error of each format in each octave, both axes logarithmic."""
    axes = figure.subplots()
    style_axes(axes, None, "largest relative error of rounding (log scale)")
    _octave_axis(axes, octaves[0], octaves[-1] + 1, "magnitude", 10 if figure.get_figwidth() * 72 < 600 else 5)
    for name, error in errors.items():
        axes.step([*octaves, octaves[-1] + 1], [*error, error[-1]], where="post", color=color(name))
    axes.set_yscale("log", base=2)
    low = min(float(error.min()) for error in errors.values())
    axes.set_ylim(low / 2, 1.5)
    ticks = [2.0**-k for k in range(0, int(-np.log2(low)) + 1, 2)]
    axes.set_yticks(ticks, [f"{100 * tick:.3g}%" for tick in ticks])
    axes.minorticks_off()
    middle = octaves.index(0) if 0 in octaves else len(octaves) // 2
    for name, error in errors.items():
        octave, over = {"int8": (octaves.index(6), -15), "e2m1": (octaves.index(5), -26)}.get(name, (middle, 4))
        axes.annotate(label(name), (octaves[octave] + 0.5, error[octave]), (0, over), textcoords="offset points",
                      color=color(name), ha="center", va="bottom")  # fmt: skip


def describe_relative_error(errors: Mapping[str, Floats]) -> str:
    """Describe the bounds of the relative rounding errors."""
    e2m1, e4m3, e5m2, bf16 = (float(errors[name].min()) for name in ("e2m1", "e4m3", "e5m2", "bf16"))
    return (
        f"Within its range, a float's relative rounding error has a constant bound: {e2m1:.1%} for E2M1, {e5m2:.1%} for"
        f" E5M2, {e4m3:.1%} for E4M3 and {bf16:.2%} for BF16. It grows to 100% where values underflow or overflow. The"
        " bound for INT8 halves with every doubling, so INT8 is precise only near its largest value."
    )


def draw_bytes(figure: Figure, shares: Mapping[str, tuple[str, float]]) -> None:
    """Draw shares: label → (format, bits per value)."""
    axes = figure.subplots()
    style_axes(axes, None, "bits per value, and the share of FP32")
    axes.set_ylim(len(shares) - 0.4, -0.6)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 40 if is_wide(figure) else 52)  # leaves room for the longest text
    axes.set_xticks([0, 8, 16, 24, 32])
    for at, (name, bits) in enumerate(shares.values()):
        axes.barh(at, bits, height=0.55, color=color(name))
        text = f"{bits:.5g} ({bits / 32:.1%})"
        axes.annotate(text, (bits, at), (6, 0), textcoords="offset points", va="center")


def describe_bytes(shares: Mapping[str, tuple[str, float]]) -> str:
    """Describe what scales add to the bits per value."""
    tile, nvfp4 = (shares[name][1] for name in ("E4M3, 1×128 tiles", "E2M1, 1×16 (NVFP4)"))
    return (
        f"One scale per 128 values adds a quarter of a bit to each ({tile:.2f} bits instead of 8); one scale per"
        " 128×128 block adds almost nothing. 4-bit formats need more scales: with one per 16 values, NVFP4 has"
        f" {nvfp4:.4g} bits."
    )


def draw_staircase(figure: Figure, x: Floats, rounded: Mapping[str, Floats]) -> None:
    """Draw x rounded to each format, one panel per format; x and its rounded values are [n] float64."""
    wide = figure.get_figwidth() * 72 >= 600
    panels = figure.subplots(*((1, len(rounded)) if wide else (len(rounded), 1)), sharex=True, sharey=True)
    for axes, (name, y) in zip(panels, rounded.items(), strict=True):
        n = len(np.unique(y[(y > 1) & (y < 2)]))
        style_axes(axes, None, f"{label(name)}: {n:,} between 1 and 2")
        axes.plot(x, x, color=COLOR["muted"], linewidth=0.8, linestyle=":")
        axes.plot(x, y, color=color(name), linewidth=1.2)
        axes.set_xticks([1, 1.5, 2])
        axes.set_yticks([1, 1.5, 2])
        axes.title.set_color(color(name))


def describe_staircase(rounded: Mapping[str, Floats]) -> str:
    """Describe how many values each format has between 1 and 2."""
    n = {name: len(np.unique(y[(y > 1) & (y < 2)])) for name, y in rounded.items()}
    return (
        f"10,000 numbers between 1 and 2, rounded to each format. Strictly between 1 and 2, E5M2 has {n['e5m2']}"
        f" values, E4M3 {n['e4m3']}, BF16 {n['bf16']} and FP16 {n['fp16']:,}."
    )


def draw_lost_update(figure: Figure, weights: Mapping[str, Floats]) -> None:
    """Draw the weight over the updates, one line per format; weights: format → [updates + 1]."""
    axes = figure.subplots()
    times = len(next(iter(weights.values()))) - 1
    style_axes(axes, "updates", "the weight")
    labels: dict[float, list[str]] = {}
    for name, path in weights.items():
        dashed = name == "bf16"  # its line coincides with another
        axes.plot(path, color=color(name), linestyle="--" if dashed else "-", zorder=3 if dashed else 2)
        labels.setdefault(float(path[-1]), []).append(name)
    axes.set_xlim(0, times)
    axes.set_ylim(0.9, 2.1)
    label_ends(
        figure,
        axes,
        [(at, f"{', '.join(map(label, names))}: {at:.4g}", color(names[0])) for at, names in labels.items()],
    )


def describe_lost_update(weights: Mapping[str, Floats], update: float, epsilon: Mapping[str, float]) -> str:
    """Describe which formats lose an update that is added many times."""
    times = len(next(iter(weights.values()))) - 1
    return (
        f"{update:g} is added {times:,} times to a weight of 1. In BF16, whose next value after 1 is 1 +"
        f" {power(epsilon['bf16'])}, each sum is rounded back to 1, so training would make no progress. FP16 loses part"
        f" of each update and reaches {weights['fp16'][-1]:.4g}; FP32 reaches {weights['fp32'][-1]:.4g}. That is why"
        " master weights are FP32."
    )
