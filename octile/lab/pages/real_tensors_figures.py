"""Figures of `octile lab formats` that need activations and gradients: underflow in FP16, and INT8 vs. E4M3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octile.lab.pages.figures import is_wide, legend, short_names
from octile.lab.pages.formats_figures import FORMAT_COLOR, color, label
from octile.lab.pages.page import power
from octile.report.run.metrics import Floats
from octile.report.style import COLOR, label_ends, style_axes, thin_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = NDArray[np.intp]

FP16_ZERO, FP16_NORMAL, FP16_MAX = (
    -25,
    -14,
    16,
)  # log₂ of magnitudes: smaller values become 0, are subnormal, or larger ones overflow


@dataclass(frozen=True)
class Gradients:
    """A layer's output gradients in FP16, without and with a loss scale.

    Attributes:
        layer: the layer's name.
        log2, count: a histogram of log₂|dy|: the lower edge of each bin of one octave, and its number of values.
        scale: the loss scale.
        lost, lost_scaled: the share that becomes 0 in FP16, without and with the loss scale.
        overflowed_scaled: the share that overflows with the loss scale.
        lost_in_tiles: the share that becomes 0 in E4M3 with 1×128 tiles, without a loss scale.
    """

    layer: str
    log2: Floats
    count: Floats
    scale: float
    lost: float
    lost_scaled: float
    overflowed_scaled: float
    lost_in_tiles: float


def draw_underflow(figure: Figure, data: Gradients) -> None:
    """Draw the histogram of the gradients without and with a loss scale, and the ranges of FP16."""
    axes = figure.subplots()
    style_axes(axes, "magnitude of a gradient", "share of the gradients per octave (%)")
    share = 100 * data.count / data.count.sum()
    shift = np.log2(data.scale)
    axes.bar(data.log2 + 0.5, share, width=0.9, color=COLOR["vermilion"], alpha=0.75)
    axes.bar(data.log2 + 0.5 + shift, share, width=0.9, color=COLOR["blue"], alpha=0.75)
    low, high = min(data.log2[0], FP16_ZERO - 3), max(data.log2[-1] + shift, FP16_MAX) + 2
    axes.set_xlim(low, high)
    top = share.max() * 1.3
    axes.set_ylim(0, top)
    axes.axvspan(low, FP16_ZERO, color=COLOR["muted"], alpha=0.16, linewidth=0)
    axes.axvspan(FP16_MAX, high, color=COLOR["muted"], alpha=0.16, linewidth=0)
    axes.axvline(FP16_NORMAL, color=COLOR["muted"], linewidth=1, linestyle=":")
    for at, text, side in (
        (FP16_ZERO, "0 in FP16 ", "right"),
        (FP16_NORMAL, " full precision", "left"),
        (FP16_MAX, " Inf", "left"),
    ):
        axes.annotate(text, (at, top), va="top", ha=side, color=COLOR["muted"])
    ticks = [tick for tick in range(-60, 61, 10) if low <= tick <= high]
    axes.set_xticks(ticks, [power(2.0**tick) for tick in ticks])
    peak = int(np.argmax(share))
    for offset, text, name in ((0.0, "without scale", "vermilion"), (shift, f"× {power(data.scale)}", "blue")):
        axes.annotate(text, (data.log2[peak] + 0.5 + offset, share[peak]), (0, 3), textcoords="offset points",
                      ha="center", va="bottom", color=COLOR[name])  # fmt: skip


def describe_underflow(data: Gradients) -> str:
    """Describe the share of the gradients that becomes zero in FP16, with a loss scale, and in tiles."""
    overflow = f" {data.overflowed_scaled:.1%} overflow." if data.overflowed_scaled else " None overflows."
    return (
        f"In FP16, {data.lost:.1%} of the gradients of {data.layer} become zero. Multiplying the loss by"
        f" {power(data.scale)} shifts all gradients to the right, where {data.lost_scaled:.2%} become zero.{overflow}"
        f" In E4M3 with 1×128 tiles, {data.lost_in_tiles:.2%} become zero without a loss scale."
    )


@dataclass(frozen=True)
class Int8AgainstE4M3:
    """The errors of one activation in 1×128 tiles of both formats, and the values that become 0 in all layers.

    Attributes:
        layer: the layer whose input is drawn.
        share: the share of its values by octaves below the tile's largest value.
        errors: format → mean relative error by octave, NaN for octaves without values.
        flushed: layer → (E4M3, INT8), the share of the nonzero values that become 0.
        snr_db: layer → (E4M3, INT8).
    """

    layer: str
    share: Floats
    errors: Mapping[str, Floats]
    flushed: Mapping[str, tuple[float, float]]
    snr_db: Mapping[str, tuple[float, float]]


def draw_int8(figure: Figure, data: Int8AgainstE4M3) -> None:
    """Draw the mean relative error of both formats by magnitude, and below it the share of the values."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    octaves = np.arange(len(data.share))
    shown = max(8, int(np.flatnonzero(data.share > 1e-4).max(initial=0)) + 2)
    style_axes(above, None, "mean relative error of the values (%)")
    labels = []
    for name, error in data.errors.items():
        known = np.isfinite(error) & (octaves < shown)
        above.plot(octaves[known], 100 * error[known], color=color(name), marker="o", markersize=3.5)
        labels.append((100 * error[known][-1], label(name), color(name)))
    above.set_ylim(0, 105)
    style_axes(below, "octaves below the largest value of the tile", "share of the values (%)")
    below.bar(octaves[:shown], 100 * data.share[:shown], width=0.85, color=COLOR["muted"], alpha=0.6)
    below.set_xlim(-0.6, shown - 0.4)
    below.set_xticks(range(0, shown, 2), ["largest" if at == 0 else f"÷{power(2.0**at)}" for at in range(0, shown, 2)])
    label_ends(figure, above, labels)
    thin_labels(figure, below)


def describe_int8(data: Int8AgainstE4M3) -> str:
    """Describe for which magnitudes INT8 is better, where its values become zero, and both SNRs."""
    e4m3, int8 = data.errors["e4m3"], data.errors["int8"]
    known = np.flatnonzero(np.isfinite(e4m3) & np.isfinite(int8))
    crossing = _better_from(e4m3, int8, known)
    snr_e4m3, snr_int8 = data.snr_db[data.layer]
    text = f"The input of {data.layer}. {_describe_crossing(crossing, known)}{_describe_flushed_octaves(int8, known)}"
    text += f" Over all values, the SNR is {snr_int8:.1f} dB for INT8 and {snr_e4m3:.1f} dB for E4M3"
    is_dominated = snr_int8 > snr_e4m3 and crossing is not None
    return text + (", since the SNR is dominated by large values." if is_dominated else ".")


def _better_from(e4m3: Floats, int8: Floats, known: Indices) -> int | None:
    """Return the octave from which on E4M3 is never worse than INT8 and sometimes better, or None."""
    worse = known[int8[known] < e4m3[known]]
    after = known[known > worse[-1]] if len(worse) else known
    return int(after[0]) if (e4m3[after] < int8[after]).any() else None


def _describe_crossing(crossing: int | None, known: Indices) -> str:
    if crossing is None:
        return "INT8 is at least as good as E4M3 for values of every magnitude."
    if crossing == known[0]:
        return "E4M3 is at least as good as INT8 for values of every magnitude."
    return (
        f"INT8 is better for some values less than {octaves(crossing)} below the largest of their tile, and E4M3 is"
        " better for all smaller values."
    )


def _describe_flushed_octaves(int8: Floats, known: Indices) -> str:
    """Describe from which octave on all values become zero in INT8."""
    nonzero = known[int8[known] < 1]
    flushed = known[known > nonzero[-1]] if len(nonzero) else known
    return (
        f" From {octaves(int(flushed[0]))} below the largest on, all values become zero in INT8."
        if len(flushed)
        else ""
    )


def octaves(count: int) -> str:
    """Return a number of octaves as text: "1 octave", "3 octaves"."""
    return f"{count} octave{'s' * (count != 1)}"


def draw_flushed(figure: Figure, data: Int8AgainstE4M3) -> None:
    """Draw for each layer the share of its input that becomes zero, a dot per format."""
    axes = figure.subplots()
    names = short_names(list(data.flushed))
    style_axes(axes, None, "% of the input that becomes zero")
    at = np.arange(len(names))
    shares = 100 * np.array(list(data.flushed.values()))  # [layers, 2]
    for name, values in zip(("e4m3", "int8"), shares.T, strict=True):
        axes.plot(values, at, "o", color=color(name), markersize=6)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(at, names, fontsize=10)
    axes.grid(axis="x")
    largest = max(float(shares.max()), 0.01)
    axes.set_xlim(-0.04 * largest, 1.04 * largest)  # no dot lies on a name or on the edge
    legend(figure, {label(name): FORMAT_COLOR[name] for name in ("e4m3", "int8")}, is_wide(figure))


def describe_flushed(data: Int8AgainstE4M3) -> str:
    """Describe the layer that loses most to zero in INT8, and the mean of down projections and others."""
    worst = max(data.flushed, key=lambda layer: data.flushed[layer][1])
    e4m3, int8 = data.flushed[worst]
    down = [pair[1] for layer, pair in data.flushed.items() if is_down(layer)]
    others = [pair[1] for layer, pair in data.flushed.items() if not is_down(layer)]
    means = (
        f" On average, {np.mean(down):.1%} of the inputs of down projections (SwiGLU outputs) become zero in INT8, and"
        f" {np.mean(others):.1%} of the others."
        if down and others
        else ""
    )
    return (
        f"With 1×128 tiles, up to {int8:.1%} of a layer's input become zero in INT8, and {e4m3:.2%} of the same input"
        f" in E4M3 ({worst}).{means}"
    )


def is_down(layer: str) -> bool:
    """Whether a layer is a down projection of an MLP or of experts."""
    return layer.rpartition(".")[2] in ("down_proj", "down")
