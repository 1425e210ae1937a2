"""`octile plan schedule`: the figure of a pipeline schedule, and a table that compares all schedules at its size."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from octile.checkpoint.files import check_output_file
from octile.parallel.schedules import SCHEDULES, Costs, Simulation, make_schedule, simulate
from octile.report.console import Console
from octile.report.schedule import compare_activations, compare_bubble, describe_costs, save_schedule
from octile.report.table import Table, screen_table
from octile.validation import Range, check_fields

COLUMNS = ("schedule", "ranks", "time", "idle", "bubble", "activations", "parameters")
MAX_SIZE = 5_000  # stages × micro-batches of a picture that takes seconds to draw and can be read
MAX_SPREAD = 50_000  # that times the longest cost, of the shortest: the width of the picture


@dataclass(frozen=True)
class Options:
    """Draw a pipeline schedule with its bubble and activations, and compare all schedules at its size.

    Attributes:
        schedule: gpipe, 1f1b, zb1p, dualpipe (micro-batches from both ends), dualpipev (half as many ranks as stages)
            or chimera.
        stages: stages of the pipeline (PP).
        micro_batches: micro-batches of a step.
        costs: times of a stage's actions for one micro-batch, all in one unit.
        out: the figure to write, .svg or .png.
    """

    schedule: Literal["gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev", "chimera"] = "dualpipe"
    stages: Annotated[int, Range(at_least=1)] = 8
    micro_batches: Annotated[int, Range(at_least=1)] = 20
    costs: Costs = field(default_factory=Costs)
    out: Path = Path("plan/schedule.svg")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stages * self.micro_batches > MAX_SIZE:
            raise ValueError(
                f"stages × micro_batches must be at most {MAX_SIZE:,}, not {self.stages * self.micro_batches:,}"
            )
        costs = [cost for cost in asdict(self.costs).values() if cost]
        spread, most = max(costs) / min(costs), MAX_SPREAD / (self.stages * self.micro_batches)
        if spread > most:
            raise ValueError(
                f"costs: the longest may be {most:,.0f} times the shortest in a picture of {self.stages:,} stages × "
                f"{self.micro_batches:,} micro-batches, not {spread:,.4g} times"
            )
        check_output_file("out", self.out, ".svg", ".png")


def run(options: Options) -> None:
    """Write the figure, and print the table.

    Raises:
        ValueError: the schedule does not allow the sizes.
    """
    chosen = simulate(make_schedule(options.schedule, options.stages, options.micro_batches), options.costs)
    save_schedule(options.out, chosen)
    console = Console()
    sizes = f"{options.stages} stages (PP), {options.micro_batches} micro-batches (M)"
    console.print_line(f"{sizes}; {describe_costs(options.costs)}")
    table, notes = compare_schedules(options.stages, options.micro_batches, options.costs)
    console.print(screen_table(table))
    for note in notes:
        console.print_line(note)
    console.print_line(f"picture: {options.out}")


def compare_schedules(stages: int, micro_batches: int, costs: Costs) -> tuple[Table, list[str]]:
    """Simulate all schedules at one size.

    Returns:
        A table with a row for each schedule that allows the size; and notes: why the others do not, and which formulas
        do not hold for these sizes and times.
    """
    simulations, notes = simulate_all(stages, micro_batches, costs)
    return Table(COLUMNS, [_row(simulation) for simulation in simulations]), notes


def simulate_all(stages: int, micro_batches: int, costs: Costs) -> tuple[list[Simulation], list[str]]:
    """Simulate all schedules at one size; return those that allow it, and the notes of `compare_schedules`."""
    simulations, refused, inexact = [], [], []
    for name, kind in SCHEDULES.items():
        try:
            schedule = kind.make(stages, micro_batches)
        except ValueError as error:
            refused.append(f"not at this size: {error}")
            continue
        simulations.append(simulate(schedule, costs))
        if not kind.is_exact(stages, micro_batches, costs):
            inexact.append(f"the bubble of {name} is exactly that of its formula if {kind.condition}")
    if costs.communication:
        inexact.append("formulas leave out communication")
    return simulations, refused + inexact


def _row(simulation: Simulation) -> tuple[str, ...]:
    kind = SCHEDULES[simulation.schedule.name]
    return (
        kind.title,
        str(simulation.schedule.n_ranks),
        f"{simulation.makespan:g}",
        f"{simulation.bubble / simulation.makespan:.1%}",
        compare_bubble(simulation),
        compare_activations(simulation),
        f"{kind.copies}×",
    )
