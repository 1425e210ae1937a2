"""Figures of a run's experts and scales: how the experts shared the tokens, and how large the tile scales were.

Each figure has two functions: `draw_…` draws it, `caption_…` writes its caption from the data. Both are called only
when the run has recorded at least one value for the figure.
"""

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from octile.report.run.metrics import Floats, Record, Run, last_known, smooth
from octile.report.style import COLOR, key_axis, label_ends, line, step_axis, style_axes
from octile.text import format_quantity, superscript

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPAN = 2.5  # the color scale reaches from 1/SPAN to SPAN times the mean load, in every run
ABOVE, BELOW = (0.88, 0.38, 0.12), (0.16, 0.52, 0.86)  # RGB of the heat map, readable on light and dark paper
OPERANDS = {
    "x": ("activations x", "blue"),
    "w": ("weights w", "green"),
    "dy": ("output gradients dy", "vermilion"),
}


def layer_name(path: str, run: Run) -> str:
    """The name of a layer in a figure: model.layers.3.mlp → "layer 3", and "MTP" for the layer after the last."""
    number = re.search(r"layers\.(\d+)", path)
    if number and number[1] == str(run.fact("num_hidden_layers")):
        return "MTP"
    return f"layer {number[1]}" if number else path


def recent_load(run: Run) -> dict[str, Floats]:
    """The load of each expert relative to the mean of its layer, over the last quarter of the records.

    Returns:
        For each layer float64 [E]; NaN if no expert of the layer got a token.
    """
    recent = [r["expert_load"] for r in run.experts[-max(1, len(run.experts) // 4) :]]
    loads = {}
    for layer, last in recent[-1].items():
        records = [r[layer] for r in recent if len(r.get(layer, ())) == len(last)]
        counts = np.array(records, dtype=np.float64).sum(axis=0)
        loads[layer] = counts / counts.mean() if counts.sum() else np.full(len(counts), np.nan)
    return loads


def has_load(run: Run) -> bool:
    """Whether an expert received a token in the last quarter of the records."""
    return bool(run.experts) and any(np.isfinite(load).any() for load in recent_load(run).values())


def has_scales(run: Run) -> bool:
    """Whether the last record of tile scales counts a tile."""
    return bool(run.tile_scales) and any(sum(h["count"]) for h in run.tile_scales[-1]["tile_scales"].values())


def draw_load(figure: "Figure", run: Run) -> None:
    """Draw the load of each expert over its layer's mean as a heat map with its legend."""
    loads = recent_load(run)
    shares = np.full((len(loads), max(map(len, loads.values()))), np.nan)
    for row, load in enumerate(loads.values()):
        shares[row, : len(load)] = load
    axes, key = figure.subplots(2, 1, height_ratios=[12, 1])
    style_axes(axes, "expert", "load of each expert (× the mean of its layer)")
    axes.grid(False)
    axes.imshow(_tint(shares), aspect="auto", interpolation="none", origin="upper")
    rows, columns = shares.shape
    if columns <= 64:  # lines between the cells, if they are large enough
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(which="minor", color=COLOR["paper"], linewidth=1.5, axis="both")
    every = math.ceil(rows / 16)
    axes.set_yticks(range(0, rows, every), [layer_name(layer, run) for layer in loads][::every])
    axes.tick_params(which="both", length=0)
    axes.spines["bottom"].set_visible(False)
    worst = np.array([np.nanmax(load) if np.isfinite(load).any() else np.nan for load in loads.values()])
    for row in range(0, rows, every):
        text = f"{worst[row]:.2f}×" if math.isfinite(worst[row]) else "–"
        axes.annotate(text, (columns - 0.5, row), (5, 0), textcoords="offset points",
                      va="center", color=COLOR["muted"], annotation_clip=False)  # fmt: skip
    axes.annotate("max", (1, 1), (5, 8), xycoords="axes fraction", textcoords="offset points",
                  va="baseline", color=COLOR["muted"])  # fmt: skip
    ramp = np.linspace(-math.log2(SPAN), math.log2(SPAN), 101)[None]
    key.imshow(_tint(2**ramp), aspect="auto", interpolation="none", extent=(0, 1, 0, 1))
    key_axis(key, [0, 0.5, 1], [f"{1 / SPAN:g}× or less", "the mean", f"{SPAN:g}× or more"])


def caption_load(run: Run) -> str:
    """Return the caption: the maximum load, and the experts without tokens."""
    loads = {layer: load for layer, load in recent_load(run).items() if np.isfinite(load).any()}
    worst = max(loads, key=lambda layer: loads[layer].max())
    idle = sum(int((load == 0).sum()) for load in loads.values())
    unused = f" {idle} expert{'s' * (idle != 1)} received no token." if idle else " Every expert received tokens."
    averaged = ", averaged over the last quarter of the run" if len(run.experts) >= 4 else ""
    most = f"{loads[worst].max():.2f}×"
    return f"The maximum expert load is {most} the mean, in {layer_name(worst, run)}{averaged}.{unused}"


def draw_balance(figure: "Figure", run: Run) -> None:
    """Draw the maximum expert load over the mean, over the steps, a line per layer."""
    axes = figure.subplots()
    style_axes(axes, "step", "maximum expert load / mean")
    steps, ratios = _balance(run)
    final = {layer: last_known(smooth(ratio)) for layer, ratio in ratios.items()}
    ordered = sorted(final, key=lambda layer: final[layer])
    marked = {ordered[0]: "green", ordered[-1]: "vermilion"}  # of many layers, only the best and the worst are labeled
    if len(ordered) == 3:
        marked[ordered[1]] = "blue"
    for layer, ratio in ratios.items():
        if layer not in marked:
            line(axes, steps, smooth(ratio), color=COLOR["muted"], alpha=0.5 if len(ratios) <= 8 else 0.2)
    for layer, color in marked.items():
        line(axes, steps, smooth(ratios[layer]), color=COLOR[color])
    axes.axhline(1, color=COLOR["muted"], linewidth=1, linestyle=":")
    step_axis(axes, run.last_step)
    label_ends(figure, axes, [(final[layer], layer_name(layer, run), COLOR[color]) for layer, color in marked.items()]
               + [(1, "balanced", COLOR["muted"])])  # fmt: skip


def caption_balance(run: Run) -> str:
    """Return the caption: the ratio of the least balanced layer at first and at the last."""
    _, ratios = _balance(run)
    every = np.stack([smooth(ratio) for ratio in ratios.values()])
    known = every[:, np.isfinite(every).any(0)]
    later = f" at first and {np.nanmax(known[:, -1]):.2f}× at the last" if known.shape[1] > 1 else ""
    return (
        f"The maximum expert load of the least balanced layer was {np.nanmax(known[:, 0]):.2f}× the mean{later}"
        " (smoothed); 1× is perfect balance."
    )


def _balance(run: Run) -> tuple[Floats, dict[str, Floats]]:
    steps = np.array([r["step"] for r in run.experts], dtype=np.float64)
    return steps, {
        layer: np.array([_max_over_mean(r["expert_load"].get(layer, ())) for r in run.experts])
        for layer in run.experts[-1]["expert_load"]
    }


def _max_over_mean(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else math.nan


def _tint(shares: Floats) -> Floats:
    """RGBA colors [..., 4]: orange above the mean, blue below, transparent at the mean."""
    with np.errstate(divide="ignore"):
        deviation = np.clip(np.log2(shares) / math.log2(SPAN), -1, 1)
    color = np.where(deviation[..., None] > 0, ABOVE, BELOW)
    return np.concatenate([color, np.nan_to_num(np.abs(deviation))[..., None]], axis=-1)


def draw_scales(figure: "Figure", run: Run) -> None:
    """Draw the histogram of the tile scales per operand, the last record as bars and the first as an outline."""
    from matplotlib.ticker import MaxNLocator

    first, last = run.tile_scales[0]["tile_scales"], run.tile_scales[-1]["tile_scales"]
    operands = [operand for operand in OPERANDS if operand in last] or list(last)
    side_by_side = figure.get_figwidth() > 1.5 * figure.get_figheight()
    grid = (1, len(operands)) if side_by_side else (len(operands), 1)
    panels = figure.subplots(*grid, sharex=True, squeeze=False).flat
    for axes, operand in zip(panels, operands, strict=True):
        text, color = OPERANDS.get(operand, (operand, "blue"))
        bins, share = _share(last[operand])
        style_axes(axes, "scale of a tile" if side_by_side or operand == operands[-1] else None, f"{text} (% of tiles)")
        axes.bar(bins, share, width=0.86, color=COLOR[color], alpha=0.75)
        if first is not last and operand in first:
            axes.step(*_share(first[operand]), where="mid", color=COLOR["ink"], linewidth=1)
        axes.margins(y=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.xaxis.set_major_formatter(lambda exponent, _: _power_of_2(exponent))


def caption_scales(run: Run) -> str:
    """Return the caption: the widest range of scales, and what one scale for the tensor would lose."""
    last = run.tile_scales[-1]["tile_scales"]
    ranges = {operand: _central_range(*_share(histogram)) for operand, histogram in last.items()}
    widest = max(ranges, key=lambda operand: ranges[operand][1] - ranges[operand][0])
    low, high = ranges[widest]
    below_normal = high - low >= 15  # 448 / 2¹⁵ < 2⁻⁶: the whole tile would be subnormal
    lost = ": with one scale for the whole tensor, small values would keep few bits or none" if below_normal else ""
    outline = " The outline shows the first record." if len(run.tile_scales) > 1 else ""
    return (
        "Every block of values has a scale. 99% of the scales of the"
        f" {OPERANDS.get(widest, (widest, ''))[0]} lie between {_power_of_2(low)} and {_power_of_2(high)},"
        f" a factor of {format_quantity(2.0 ** (high - low))}{lost}.{outline}"
    )


def _central_range(log2: Floats, share: Floats) -> tuple[float, float]:
    """The smallest and the largest exponent of the middle 99% of the scales."""
    if not share.any():
        return 0.0, 0.0
    below = np.cumsum(share)
    low, high = np.searchsorted(below, [0.5, 99.5])
    return float(log2[low]), float(log2[min(high, len(log2) - 1)])


def _power_of_2(exponent: float) -> str:
    return f"2{superscript(round(exponent))}"


def _share(histogram: Record) -> tuple[Floats, Floats]:
    """The exponents from the smallest to the largest, and the percentage of tiles with each as their scale."""
    log2 = np.array(histogram["log2"], dtype=np.int64)
    if not len(log2):
        return np.zeros(0), np.zeros(0)
    count = np.zeros(log2.max() - log2.min() + 1)
    count[log2 - log2.min()] = histogram["count"]
    return np.arange(log2.min(), log2.max() + 1.0), 100 * count / max(count.sum(), 1)
