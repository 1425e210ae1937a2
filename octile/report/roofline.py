"""Draws the roofline of `octile bench gemm`: the speed of each GEMM over its arithmetic intensity.

    python -m octile.report.roofline gemm.json roofline.svg     draws recorded results, without a GPU

A GEMM with an arithmetic intensity of I operations per byte can reach at most I × the memory bandwidth, and at most the
peak of the tensor cores.

Sources: Williams, Waterman, Patterson: Roofline (CACM 52(4), 2009); limits from the data sheets of the GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octile.report.style import COLOR, WIDE, save_drawing, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIMITS = {  # GPU: dense FP8 TFLOP/s, memory TB/s
    "H200": (1979.0, 4.8),
    "H100": (1979.0, 3.35),
}
PEER = "DeepGEMM"
KINDS = {  # prefix of a row's `what`: (label, color); the first match counts
    "FP8, grouped": ("grouped", "green"),
    "FP8, masked": ("masked", "amber"),
    "FP8, wgrad": ("wgrad, grouped", "purple"),
    "FP8 1D1D": ("1×128 with 1×128", "vermilion"),
    "FP8": ("1×128 with 128×128", "blue"),
}


class Point(NamedTuple):
    """A GEMM: operations per byte, and TFLOP/s of octile and of the peer (None: not measured)."""

    kind: str
    case: str
    intensity: float
    speed: float
    peer: float | None


def points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The GEMMs of recorded rows."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        figures = found.setdefault((row["case"], row["what"]), {})
        figures[row["unit"]] = row["value"]
        if row["against"] and row["against"]["peer"] == PEER:
            figures[PEER] = row["against"]["value"]
    return [
        Point(
            next(kind for kind in KINDS if what.startswith(kind)),
            case,
            1e3 * figures["TFLOP/s"] / figures["GB/s"],
            figures["TFLOP/s"],
            figures.get(PEER),
        )
        for (case, what), figures in found.items()
    ]


def save_roofline(results: Path, picture: Path) -> Path:
    """Draw a results file of `octile bench gemm`.

    Args:
        results: the JSON file.
        picture: the file to write, .svg or .png.

    Raises:
        ValueError: the limits of the results' GPU are unknown, or picture has another suffix.
    """
    recorded = json.loads(results.read_text(encoding="utf-8"))
    gpu = recorded["machine"]["gpu"]
    limits = next((limits for name, limits in LIMITS.items() if name in (gpu or "")), None)
    if limits is None:
        raise ValueError(f"results must be of one of {', '.join(LIMITS)}, whose limits are known, not of {gpu}")
    title = f"{gpu}, {recorded['machine']['date']}"
    return save_drawing(picture, WIDE, 440, lambda figure: draw(figure, points(recorded["rows"]), limits, title))


def draw(figure: Figure, found: Sequence[Point], limits: tuple[float, float], title: str) -> None:
    """Draw all GEMMs on logarithmic axes, and next to them the compute-bound ones on a linear axis."""
    flops, bandwidth = limits
    ridge = flops / bandwidth
    whole, bound = figure.subplots(1, 2, width_ratios=(3, 2))
    intensities, speeds = [point.intensity for point in found], [point.speed for point in found]
    left, right = min([ridge, *intensities]) / 1.5, max([ridge, *intensities]) * 1.5
    for axes, start in ((whole, left), (bound, ridge)):
        axes.set_xscale("log")
        _dots(axes, [point for point in found if point.intensity >= start])
        axes.plot([start, ridge, right], [start * bandwidth, flops, flops], color=COLOR["ink"], linewidth=1.2)
        axes.set_xlim(start, right)
    whole.set_yscale("log")
    whole.set_ylim(min([left * bandwidth, *speeds]) / 1.5, 1.6 * flops)
    bound.set_ylim(0, 1.1 * flops)
    bound.set_xticks([500, 1000, 2000, 4000])
    style_axes(whole, None, f"TFLOP/s · {title}")
    style_axes(bound, "operations per byte", "compute-bound")
    for which in (whole.xaxis, whole.yaxis, bound.xaxis, bound.yaxis):
        which.set_major_formatter(lambda value, _: f"{value:,.0f}")
        which.set_minor_formatter(lambda value, _: "")

    _annotate(whole, f"{flops:,.0f} TFLOP/s, data sheet", (right, flops), (0, 5), "right")
    middle = (left * ridge) ** 0.5
    _annotate(whole, f"{bandwidth:g} TB/s", (middle, middle * bandwidth), (-6, 4), "right")
    kinds = {point.kind for point in found}
    lines = [(label, color) for kind, (label, color) in KINDS.items() if kind in kinds]
    if any(point.peer is not None for point in found):
        lines.append((f"dot: octile, circle: {PEER}", "muted"))
    for i, (text, color) in enumerate(reversed(lines)):
        _annotate(whole, text, (right, whole.get_ylim()[0]), (-4, 8 + 16 * i), "right", color)


def _dots(axes: Axes, found: Sequence[Point]) -> None:
    """Draw a dot for octile and a circle for the peer, with a line between the two of one GEMM."""
    for point in found:
        color = COLOR[KINDS[point.kind][1]]
        if point.peer is not None:
            axes.plot([point.intensity] * 2, [point.speed, point.peer], color=color, linewidth=0.8, alpha=0.6)
            axes.plot(point.intensity, point.peer, "o", color=color, markerfacecolor="none", markersize=5)
        axes.plot(point.intensity, point.speed, "o", color=color, markersize=4.5, markeredgewidth=0)


def _annotate(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], ha: str, color: str = "muted"
) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", ha=ha, color=COLOR[color])


if __name__ == "__main__":
    print(save_roofline(Path(sys.argv[1]), Path(sys.argv[2])))
