"""The figure of a pipeline schedule: a row for each rank, and a cell for each action over the time that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octile.parallel.schedules import SCHEDULES, Action, ActionType, Costs, Simulation, StageCosts
from octile.parallel.schedules.actions import parts
from octile.report.style import COLOR, WIDE, save_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

LEGEND = {
    ActionType.FORWARD: ("forward F", "blue"),
    ActionType.FULL_BACKWARD: ("full backward B", "green"),
    ActionType.BACKWARD_INPUT: ("input gradient B−W", "cyan"),
    ActionType.BACKWARD_WEIGHT: ("weight gradient W", "amber"),
}
PALE = 0.45  # opacity of the cells of a rank's other stage
HEIGHT = 0.86  # of a cell, in rows
ROW, MARGIN, HEAD = 22, 70, 130  # pixels: height of a rank, width of the labels, height of the text and the legend


class Cell(NamedTuple):
    """A forward or backward pass in the figure; `is_pale` if it is of the rank's other stage."""

    rank: int
    action: Action
    start: float
    width: float
    is_pale: bool


def save_schedule(path: Path, simulation: Simulation) -> Path:
    """Draw a schedule and write it as SVG or PNG by the suffix of `path`, whose folder is created if necessary.

    Raises:
        ValueError: path has another suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return save_drawing(path, *figure_size(simulation), lambda figure: draw_schedule(figure, simulation))


def figure_size(simulation: Simulation) -> tuple[float, float]:
    """Width and height in pixels, so wide that the numbers of micro-batches fit into the shortest cell."""
    digits = len(str(simulation.schedule.n_micro_batches - 1))
    width = simulation.makespan * (5 + 5 * digits) / min(cell.width for cell in cells(simulation))
    return max(WIDE, MARGIN + width), HEAD + ROW * simulation.schedule.n_ranks


def draw_schedule(figure: Figure, simulation: Simulation) -> None:
    """Draw a schedule under its size, its costs, and its bubble and activations compared with the formulas."""
    from matplotlib.collections import PolyCollection

    schedule = simulation.schedule
    axes = figure.subplots()
    drawn = draw_cells(axes, simulation)
    axes.set_yticks(range(schedule.n_ranks), [f"rank {rank}" for rank in range(schedule.n_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time", loc="right")
    axes.set_title("\n".join(describe(simulation)), loc="left", fontsize=11)
    for is_pair, edge, width in ((False, "paper", 0.8), (True, "ink", 1.2)):
        spans = [(rank, span) for rank, row in enumerate(simulation.spans) for span in row]
        outlined = [(rank, span) for rank, span in spans if (span.action.sub_actions is not None) == is_pair]
        boxes = [corners(rank, span.start, span.end - span.start) for rank, span in outlined]
        axes.add_collection(PolyCollection(boxes, facecolor="none", edgecolor=COLOR[edge], linewidth=width))
    for cell in drawn:
        middle, number = cell.start + cell.width / 2, str(cell.action.microbatch_index)
        color = COLOR["ink" if cell.is_pale else "paper"]
        text = axes.text(middle, cell.rank, number, color=color, fontsize=8, ha="center", va="center_baseline")
        text.set_in_layout(False)  # thousands of numbers would slow down the layout
    entries = list(_legend(simulation))
    figure.legend(handles=entries, loc="outside lower left", ncols=len(entries), frameon=False, fontsize=9)


def draw_cells(axes: Axes, simulation: Simulation) -> list[Cell]:
    """Fill the cells of a schedule, a row for each rank, in the time of the simulation, and return them."""
    from matplotlib.collections import PolyCollection

    drawn = list(cells(simulation))
    axes.set_xlim(0, simulation.makespan)
    axes.set_ylim(simulation.schedule.n_ranks - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for kind, (_, color) in LEGEND.items():
        for is_pale in (False, True):
            alike = [cell for cell in drawn if (cell.action.computation_type, cell.is_pale) == (kind, is_pale)]
            boxes = [corners(cell.rank, cell.start, cell.width) for cell in alike]
            alpha = PALE if is_pale else 1
            axes.add_collection(PolyCollection(boxes, facecolor=COLOR[color], alpha=alpha, linewidth=0))
    return drawn


def corners(rank: int, start: float, width: float) -> list[tuple[float, float]]:
    """The corners of a cell."""
    low, high = rank - HEIGHT / 2, rank + HEIGHT / 2
    return [(start, low), (start + width, low), (start + width, high), (start, high)]


def _legend(simulation: Simulation) -> Iterator[Patch]:
    """The entries of the legend for what a figure contains."""
    from matplotlib.patches import Patch

    schedule, drawn = simulation.schedule, list(cells(simulation))
    kinds = {cell.action.computation_type for cell in drawn}
    yield from (Patch(color=COLOR[color], label=label) for kind, (label, color) in LEGEND.items() if kind in kinds)
    if any(span.action.sub_actions for spans in simulation.spans for span in spans):
        yield Patch(facecolor="none", edgecolor=COLOR["ink"], label="overlapped pair F&B")
    if any(cell.is_pale for cell in drawn):
        enters = "micro-batches that enter at the last rank"
        what = enters if len(schedule.placement) > 1 else "the rank's second stage"
        yield Patch(color=COLOR["muted"], alpha=PALE, linewidth=0, label=f"pale: {what}")


def cells(simulation: Simulation) -> Iterator[Cell]:
    """The cells of a figure. The time of an overlapped pair is divided among its two passes as F is to B."""
    schedule, costs = simulation.schedule, simulation.costs
    for rank, spans in enumerate(simulation.spans):
        for span in spans:
            passes = parts(span.action)
            share = (span.end - span.start) / sum(map(costs.of, passes))
            start = span.start
            for action in passes:
                is_reverse = schedule.direction(action.microbatch_index or 0) == 1
                width = costs.of(action) * share
                yield Cell(rank, action, start, width, is_reverse or action.stage_index >= schedule.n_ranks)
                start += width


def describe(simulation: Simulation) -> tuple[str, str, str]:
    """Describe a simulated schedule in three lines: sizes and times, bubble, memory."""
    schedule, costs = simulation.schedule, simulation.costs
    ends = ", half of them from each end" if len(schedule.placement) > 1 else ""
    return (
        f"{SCHEDULES[schedule.name].title}: {schedule.n_stages} stages on {schedule.n_ranks} ranks, "
        f"{schedule.n_micro_batches} micro-batches{ends}; {describe_costs(costs)}",
        f"bubble: {compare_bubble(simulation)}, idle for {simulation.bubble / simulation.makespan:.1%} "
        f"of {simulation.makespan:g}",
        f"activations on a rank: {compare_activations(simulation)} (unit: one stage, one micro-batch); "
        f"parameters: {SCHEDULES[schedule.name].copies}×",
    )


def describe_costs(costs: Costs | StageCosts) -> str:
    """The times of actions by their symbols."""
    if isinstance(costs, StageCosts):
        return "times differ between stages"
    text = f"F = {costs.forward:g}, B = {costs.backward:g}, W = {costs.weight_gradient:g}, F&B = {costs.overlapped:g}"
    return f"{text}, communication {costs.communication:g}" if costs.communication else text


def compare_bubble(simulation: Simulation) -> str:
    """The bubble compared with its formula: "6 = (PP/2−1)(F&B+B−3W)", or both values if they differ.

    Formulas are for stages that take the same time; where they do not, the bubble stands alone.
    """
    if isinstance(simulation.costs, StageCosts):
        return f"{simulation.bubble:g}"
    kind = SCHEDULES[simulation.schedule.name]
    by_formula = kind.bubble(simulation.schedule.n_stages, simulation.costs)
    return _compare(simulation.bubble, kind.bubble_formula, by_formula)


def compare_activations(simulation: Simulation) -> str:
    """The most activations of a rank compared with their formula: "9 = PP+1"."""
    schedule, kind = simulation.schedule, SCHEDULES[simulation.schedule.name]
    by_formula = kind.activations(schedule.n_stages, schedule.n_micro_batches)
    return _compare(max(simulation.activations), kind.activations_formula, by_formula)


def _compare(value: float, formula: str, by_formula: float) -> str:
    shown, expected = f"{value:g}", f"{by_formula:g}"
    return f"{shown} = {formula}" if shown == expected else f"{shown} (formula: {formula} = {expected})"
