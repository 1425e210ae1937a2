"""`octile plan experts`: what redundant experts and their placement do for the busiest GPU of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from octile.checkpoint.files import check_output_file
from octile.report.console import Console
from octile.report.table import Table, screen_table
from octile.validation import Range, Seed, check_fields

if TYPE_CHECKING:
    from octile.report.experts import GpuLoads

COLUMNS = ("placement", "slots of a GPU", "worst layer", "mean layer", "waiting")
MAX_GPUS, MAX_SLOTS = 1024, 16384  # of a picture that can be read, and is drawn in seconds


@dataclass(frozen=True)
class Options:
    """Draw the load of each GPU with one copy of each expert, and with redundant experts.

    Attributes:
        load: a run folder, or its metrics.jsonl, whose newest record of the experts' tokens is taken. If not given,
            loads are drawn for DeepSeek-V3's 58 layers of 256 experts.
        skew: σ of the log-normal distribution from which loads are drawn if no load is given; 1 if not given.
        seed: seed of the loads that are drawn.
        num_replicas: slots of all GPUs together, at least as many as experts.
        num_groups: groups of experts that the gate chooses among (n_group).
        num_nodes: nodes; groups are divided among them if their number allows it.
        num_gpus: GPUs of all nodes together.
        out: the figure to write, .svg or .png.
    """

    load: Path | None = None
    skew: Annotated[float, Range(at_least=0, at_most=10)] | None = None
    seed: Seed = 0
    num_replicas: Annotated[int, Range(at_least=1, at_most=MAX_SLOTS)] = 288
    num_groups: Annotated[int, Range(at_least=1)] = 8
    num_nodes: Annotated[int, Range(at_least=1)] = 4
    num_gpus: Annotated[int, Range(at_least=1, at_most=MAX_GPUS)] = 32
    out: Path = Path("plan/experts.svg")

    def __post_init__(self) -> None:
        check_fields(self)
        check_output_file("out", self.out, ".svg", ".png")
        if self.load is not None and self.skew is not None:
            raise ValueError("skew has no effect with --load, since no loads are drawn: give one of them")


def run(options: Options) -> None:
    """Write the figure, and print the table.

    Raises:
        FileNotFoundError, ValueError: there is no such load, or the sizes do not fit it.
    """
    from octile.plan.experts import balanced, consecutive, read_load, skewed_load
    from octile.report.experts import save_gpu_loads

    if options.load is None:
        load_LE = skewed_load(1.0 if options.skew is None else options.skew, options.seed)
    else:
        load_LE = read_load(options.load)
    before = consecutive(load_LE, options.num_gpus)
    after = balanced(load_LE, options.num_replicas, options.num_groups, options.num_nodes, options.num_gpus)
    save_gpu_loads(options.out, before, after)
    console = Console()
    layers, experts = load_LE.shape
    text = (
        f"layers: {layers}, experts: {experts}, slots: {options.num_replicas}, GPUs: {options.num_gpus}, "
        f"nodes: {options.num_nodes}; the busiest GPU's load / the mean, and the share of time that GPUs wait for it"
    )
    console.print_line(text)
    console.print(screen_table(compare_loads(before, after)))
    if experts < options.num_gpus:
        text = f"with one copy of each, {options.num_gpus - experts} of {options.num_gpus} GPUs have no expert"
        console.print_line(text)
    console.print_line(f"picture: {options.out}")


def compare_loads(before: GpuLoads, after: GpuLoads) -> Table:
    """Return a table with a row for each placement."""
    rows = []
    for name, loads in (("one copy of each", before), ("redundant experts", after)):
        imbalance, waiting = loads.imbalance(), loads.waiting()
        size = str(loads.load.shape[2])
        rows.append((name, size, f"{imbalance.max():.2f}", f"{imbalance.mean():.2f}", f"{waiting:.1%}"))
    return Table(COLUMNS, rows)
