"""The pictures of `octile lab formats` that need real tensors: FP16's underflow, and INT8 beside E4M3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octile.lab.pages.formats_figures import color, label
from octile.lab.pages.page import power
from octile.report.run.metrics import Floats
from octile.report.style import COLOR, label_ends, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = NDArray[np.intp]

FP16_ZERO, FP16_NORMAL, FP16_MAX = -25, -14, 16  # log₂: below the first values become 0, below the second lose bits


@dataclass(frozen=True)
class Gradients:
    """A layer's output gradients in FP16, as they are and with a loss scale.

    Attributes:
        layer: its name.
        log2, count: histogram of log₂|dy|: lower edge of each bin of one octave, number of values.
        scale: the loss scale.
        lost, lost_scaled: share that FP16 makes 0 without and with the scale.
        overflowed_scaled: share that overflows with it.
        lost_in_tiles: share that E4M3 in tiles of 1×128 makes 0, without any loss scale.
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
    axes = figure.subplots()
    style_axes(axes, "magnitude of a gradient", "share of the gradients an octave (%)")
    share = 100 * data.count / data.count.sum()
    moved = np.log2(data.scale)
    axes.bar(data.log2 + 0.5, share, width=0.9, color=COLOR["vermilion"], alpha=0.75)
    axes.bar(data.log2 + 0.5 + moved, share, width=0.9, color=COLOR["blue"], alpha=0.75)
    low, high = min(data.log2[0], FP16_ZERO - 3), max(data.log2[-1] + moved, FP16_MAX) + 2
    axes.set_xlim(low, high)
    top = share.max() * 1.3
    axes.set_ylim(0, top)
    axes.axvspan(low, FP16_ZERO, color=COLOR["muted"], alpha=0.16, linewidth=0)
    axes.axvspan(FP16_MAX, high, color=COLOR["muted"], alpha=0.16, linewidth=0)
    axes.axvline(FP16_NORMAL, color=COLOR["muted"], linewidth=1, linestyle=":")
    for at, text, side in (
        (FP16_ZERO, "0 in FP16 ", "right"),
        (FP16_NORMAL, " all bits kept", "left"),
        (FP16_MAX, " Inf", "left"),
    ):
        axes.annotate(text, (at, top), va="top", ha=side, color=COLOR["muted"])
    ticks = [tick for tick in range(-60, 61, 10) if low <= tick <= high]
    axes.set_xticks(ticks, [power(2.0**tick) for tick in ticks])
    peak = int(np.argmax(share))
    for shift, text, name in ((0.0, "as they are", "vermilion"), (moved, f"× {power(data.scale)}", "blue")):
        axes.annotate(text, (data.log2[peak] + 0.5 + shift, share[peak]), (0, 3), textcoords="offset points",
                      ha="center", va="bottom", color=COLOR[name])  # fmt: skip


def say_underflow(data: Gradients) -> str:
    overflow = f" {data.overflowed_scaled:.1%} overflow." if data.overflowed_scaled else " None overflows."
    return (
        f"FP16 turns {data.lost:.1%} of the gradients of {data.layer} into zero. Multiplying the loss by"
        f" {power(data.scale)} moves all of them to the right, where {data.lost_scaled:.2%} are lost.{overflow}"
        f" E4M3 in tiles of 1×128, each with its own scale, loses {data.lost_in_tiles:.2%} of them without that."
    )


@dataclass(frozen=True)
class Int8AgainstE4M3:
    """One activation in tiles of 1×128, in both formats; and all layers' shares of values that become 0.

    Attributes:
        layer: whose input is drawn.
        share: of its values, by octaves below the tile's largest.
        errors: format → mean relative error by octave, NaN where there is no value.
        flushed: layer → (E4M3, INT8), shares of the non-zero values.
        snr_db: layer → (E4M3, INT8).
    """

    layer: str
    share: Floats
    errors: Mapping[str, Floats]
    flushed: Mapping[str, tuple[float, float]]
    snr_db: Mapping[str, tuple[float, float]]


def draw_int8(figure: Figure, data: Int8AgainstE4M3) -> None:
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


def say_int8(data: Int8AgainstE4M3) -> str:
    e4m3, int8 = data.errors["e4m3"], data.errors["int8"]
    known = np.flatnonzero(np.isfinite(e4m3) & np.isfinite(int8))
    crossing = _better_from(e4m3, int8, known)
    snr_e4m3, snr_int8 = data.snr_db[data.layer]
    said = f"The input of {data.layer}. {_say_crossing(crossing, known)}{_say_zeroed(int8, known)}"
    said += f" Over all values INT8's SNR is {snr_int8:.1f} dB and E4M3's {snr_e4m3:.1f} dB"
    sees = snr_int8 > snr_e4m3 and crossing is not None
    return said + (": the sum of squares sees the large values." if sees else ".")


def _better_from(e4m3: Floats, int8: Floats, known: Indices) -> int | None:
    """The octave from which on E4M3 is never worse than INT8 and somewhere better; None where there is none."""
    worse = known[int8[known] < e4m3[known]]
    after = known[known > worse[-1]] if len(worse) else known
    return int(after[0]) if (e4m3[after] < int8[after]).any() else None


def _say_crossing(crossing: int | None, known: Indices) -> str:
    if crossing is None:
        return "INT8 is as good as E4M3 or better for values of every size."
    if crossing == known[0]:
        return "E4M3 is as good as INT8 or better for values of every size."
    return (
        f"INT8 is better for some of the values less than {octaves(crossing)} below the largest of their tile, E4M3 for"
        " all the smaller ones."
    )


def _say_zeroed(int8: Floats, known: Indices) -> str:
    """From where on INT8 keeps nothing."""
    kept = known[int8[known] < 1]
    zeroed = known[known > kept[-1]] if len(kept) else known
    return f" From {octaves(int(zeroed[0]))} below the largest on INT8 makes zero of all." if len(zeroed) else ""


def octaves(count: int) -> str:
    return f"{count} octave{'s' * (count != 1)}"


def draw_flushed(figure: Figure, data: Int8AgainstE4M3) -> None:
    axes = figure.subplots()
    names = shortened(list(data.flushed))
    style_axes(axes, None, "% of the input made zero")
    at = np.arange(len(names))
    for name, values in (
        ("e4m3", [pair[0] for pair in data.flushed.values()]),
        ("int8", [pair[1] for pair in data.flushed.values()]),
    ):
        axes.plot(100 * np.array(values), at, "o", color=color(name), markersize=6)
    axes.set_ylim(len(names) - 0.4, -1.2)
    axes.set_yticks(at, names, fontsize=10)
    axes.grid(axis="x")
    axes.set_xlim(left=-0.15)
    pairs = list(data.flushed.values())
    worst = max(range(len(pairs)), key=lambda row: pairs[row][1])
    for row, value, name in ((0, pairs[0][0], "e4m3"), (worst, pairs[worst][1], "int8")):
        axes.annotate(
            label(name), (100 * value, row), (0, 6), textcoords="offset points", ha="center", color=color(name)
        )


def say_flushed(data: Int8AgainstE4M3) -> str:
    worst = max(data.flushed, key=lambda layer: data.flushed[layer][1])
    e4m3, int8 = data.flushed[worst]
    down = [pair[1] for layer, pair in data.flushed.items() if is_down(layer)]
    others = [pair[1] for layer, pair in data.flushed.items() if not is_down(layer)]
    means = (
        f" Inputs of down projections, which are SwiGLU's outputs, lose {np.mean(down):.1%} to INT8 on average, the"
        f" others {np.mean(others):.1%}."
        if down and others
        else ""
    )
    return (
        f"In tiles of 1×128, INT8 turns up to {int8:.1%} of a layer's input into zero, E4M3 {e4m3:.2%} of the same one"
        f" ({worst}).{means}"
    )


def is_down(layer: str) -> bool:
    """Whether a layer is a down projection, of an MLP or of experts."""
    return layer.rpartition(".")[2] in ("down_proj", "down")


def shortened(names: Sequence[str]) -> list[str]:
    """Module paths without the parts that all share: model.layers.0.mlp.up_proj → 0 · mlp.up_proj."""
    return [name.removeprefix("model.layers.").replace(".", " · ", 1) for name in names]
