"""The figure of the load of GPUs that share the experts of a model, with one copy of each and with redundant ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octile.report.run.metrics import Floats
from octile.report.style import COLOR, WIDE, label_ends, save_drawing, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 560  # pixels


class GpuLoads(NamedTuple):
    """The loads of GPUs in all layers.

    Attributes:
        load: [layers, GPUs, slots], of the expert in each slot; 0 in an empty one.
        is_redundant: [layers, GPUs, slots], whether its expert has other copies.
    """

    load: Floats
    is_redundant: NDArray[np.bool_]

    def imbalance(self) -> Floats:
        """Return the busiest GPU's load over the mean, of each layer; 1 where there is no load."""
        totals = self.load.sum(2)
        mean = totals.mean(1)
        return np.divide(totals.max(1), mean, out=np.ones_like(mean), where=mean > 0)

    def waiting(self) -> float:
        """Return the share of their time in which GPUs wait, if each layer takes as long as its busiest GPU's load."""
        totals = self.load.sum(2)
        longest = totals.max(1).sum()
        return float(1 - totals.mean(1).sum() / longest) if longest else 0.0


def save_gpu_loads(path: Path, before: GpuLoads, after: GpuLoads) -> Path:
    """Draw two placements and write them as SVG or PNG by the suffix of `path`, whose folder is created if necessary.

    Raises:
        ValueError: path has another suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return save_drawing(path, WIDE, HEIGHT, lambda figure: draw_gpu_loads(figure, before, after))


def draw_gpu_loads(figure: Figure, before: GpuLoads, after: GpuLoads) -> None:
    """Draw the GPUs of the layer that is worst before, side by side, and below the busiest GPU of each layer."""
    worst = int(before.imbalance().argmax())
    grid = figure.add_gridspec(2, 2, height_ratios=(1.5, 1))
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharey=left)
    for axes, loads, name in ((left, before, "one copy of each expert"), (right, after, "redundant experts")):
        _draw_gpus(axes, loads, worst)
        imbalance = loads.imbalance()[worst]
        axes.set_title(f"{name}: layer {worst}, busiest GPU {imbalance:.2f} × the mean", loc="left", fontsize=11)
    left.set_ylabel("load of a GPU / the mean")
    right.annotate(
        "vermilion: copies of one expert share its load", (1, 0.98), xycoords="axes fraction", ha="right", va="top",
        color=COLOR["vermilion"], fontsize=10,
    )  # fmt: skip
    label_ends(figure, right, [(1.0, "mean", COLOR["ink"])])

    axes = figure.add_subplot(grid[1, :])
    style_axes(axes, "layer", "the busiest GPU's load / the mean, in each layer")
    ends = []
    for loads, color, name in ((before, "muted", "one copy of each"), (after, "blue", "redundant experts")):
        imbalance = loads.imbalance()
        axes.plot(imbalance, color=COLOR[color], marker="o", markersize=3)
        ends.append((float(imbalance[-1]), name, COLOR[color]))
    axes.set_ylim(bottom=1)
    axes.set_xlim(-0.5, len(before.load) - 0.5)
    label_ends(figure, axes, ends)


def _draw_gpus(axes: Axes, loads: GpuLoads, layer: int) -> None:
    """Draw a bar for each GPU of a layer, of the loads of its slots over the mean GPU's load, the largest below."""
    load, is_redundant = loads.load[layer], loads.is_redundant[layer]
    mean = load.sum(1).mean()
    order = np.argsort(-load, axis=1, kind="stable")
    height = np.take_along_axis(load, order, 1) / (mean or 1)
    colored = np.take_along_axis(is_redundant, order, 1)
    bottom = np.cumsum(height, axis=1) - height
    gpus = np.arange(len(load))
    for slot in range(load.shape[1]):
        colors = [COLOR["vermilion" if redundant else "blue"] for redundant in colored[:, slot]]
        axes.bar(gpus, height[:, slot], 0.86, bottom[:, slot], color=colors, edgecolor=COLOR["paper"], linewidth=0.5)
    style_axes(axes, "GPU", "")
    axes.axhline(1, color=COLOR["ink"], linewidth=0.9, linestyle="--")
    axes.set_xlim(-0.6, len(load) - 0.4)
