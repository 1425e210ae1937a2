"""The picture of a planned training step: the pipeline over time, and time and memory of a rank by kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octile.parallel.schedules import SCHEDULES, Simulation
from octile.report.schedule import draw_cells
from octile.report.style import COLOR, WIDE, save_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, PANELS = 14, 380  # pixels: height of a rank in the pipeline, of all else
BAR_COLORS = {  # of what a bar is made of; the same in all pictures
    "FP8 GEMMs": "blue",
    "FP8 weight gradients": "cyan",
    "BF16 GEMMs": "purple",
    "attention": "green",
    "quantization and norms": "amber",
    "SMs for exchanges": "rose",
    "exposed exchanges": "vermilion",
    "bubble": "muted",
    "activations": "blue",
    "gradients": "green",
    "weights": "amber",
    "FP8 weights": "purple",
    "moments": "rose",
}
OTHER_COLORS = ("olive", "brown")  # in turn
LABELED = 0.035  # the smallest share of a bar whose label stands inside


def save_plan(
    path: Path, title: str, simulation: Simulation, seconds: Mapping[str, float], memory: Mapping[str, float]
) -> Path:
    """Draw a planned step and write it as SVG or PNG by the suffix of `path`, whose folder is created if necessary.

    Args:
        path: path of the picture.
        title: its first line.
        simulation: simulation of the pipeline, in seconds.
        seconds: seconds of a step, by kind.
        memory: bytes of a rank, by kind.

    Raises:
        ValueError: path has another suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    size = plan_size(simulation)
    return save_drawing(path, *size, lambda figure: draw_plan(figure, title, simulation, seconds, memory))


def plan_size(simulation: Simulation) -> tuple[float, float]:
    """Width and height in pixels."""
    return WIDE, PANELS + ROW * simulation.schedule.n_ranks


def draw_plan(
    figure: Figure, title: str, simulation: Simulation, seconds: Mapping[str, float], memory: Mapping[str, float]
) -> None:
    """Draw a planned step; the arguments are those of `save_plan`."""
    ranks = simulation.schedule.n_ranks
    pipeline, time, bytes_ = figure.subplots(3, height_ratios=(ROW * ranks, 75, 75))
    pipeline.set_title(f"{title}\n{_legend_text(simulation)}", loc="left", fontsize=11)
    _draw_pipeline(pipeline, simulation)
    _draw_bar(time, seconds, "seconds of the busiest rank", 1.0)
    _draw_bar(bytes_, memory, "GB of the rank that needs most", 1e-9)


def _legend_text(simulation: Simulation) -> str:
    schedule = simulation.schedule
    return (
        f"{SCHEDULES[schedule.name].title}, {schedule.n_micro_batches} micro-batches: forward blue, backward green, "
        "input gradient cyan, weight gradient amber; a rank's other stage pale"
    )


def _draw_pipeline(axes: Axes, simulation: Simulation) -> None:
    ranks = simulation.schedule.n_ranks
    draw_cells(axes, simulation)
    axes.set_yticks(range(0, ranks, max(1, ranks // 8)))
    axes.set_ylabel("rank")
    axes.set_xlabel("seconds", loc="right")


def _draw_bar(axes: Axes, parts: Mapping[str, float], label: str, unit: float) -> None:
    """Draw parts of a whole as a bar, the largest first, each with its name and its value."""
    total, begin = sum(parts.values()), 0.0
    small = []
    for number, (name, value) in enumerate(sorted(parts.items(), key=lambda part: -part[1])):
        color = COLOR[BAR_COLORS.get(name, OTHER_COLORS[number % 2])]
        axes.barh(0, value, left=begin, color=color, edgecolor=COLOR["paper"], height=0.7)
        if value >= LABELED * total:
            text = f"{name.replace(' ', chr(10))}\n{value * unit:.3g}"
            axes.text(begin + value / 2, 0, text, ha="center", va="center", fontsize=7, color=COLOR["paper"])
        elif value:
            small.append(f"{name} {value * unit:.2g}")
        begin += value
    axes.set_xlim(0, total)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    rest = f"; {', '.join(small)}" if small else ""
    axes.set_title(f"{label}: {total * unit:.4g}{rest}", loc="left", fontsize=9)
