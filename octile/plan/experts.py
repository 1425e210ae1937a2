"""`octile plan experts`: what redundant experts and their placement do for the busiest GPU of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from octile.checkpoint.files import check_output_file
from octile.report.console import Console
from octile.report.experts import GpuLoads, save_gpu_loads
from octile.report.table import Table, screen_table
from octile.serve.ranks.placement import rebalance_experts
from octile.validation import Range, Seed, check_fields, parse_json, quoted

COLUMNS = ("placement", "slots of a GPU", "worst layer", "mean layer", "waiting")
METRICS = "metrics.jsonl"
LAYERS, EXPERTS = 58, 256  # of DeepSeek-V3
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


def skewed_load(sigma: float, seed: int) -> Tensor:
    """Draw a load of DeepSeek-V3's experts from a log-normal distribution, float64 [58, 256]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, EXPERTS, generator=generator, dtype=torch.float64).mul(sigma).exp()


def read_load(path: Path) -> Tensor:
    """Read the newest record of the experts' tokens of a run, int64 [layers, experts].

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
        ValueError: it has no such record, or a damaged one.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"load must be a run folder or its {METRICS}, but there is no file {file}")
    lines = file.read_bytes().split(b"\n")
    records = [number for number, line in enumerate(lines) if b'"expert_load"' in line]
    if not records:
        raise ValueError(f"{file} has no record of the experts' tokens; a run whose model has experts writes it")
    source = f"line {records[-1] + 1} of {file}"
    layers = parse_json(lines[records[-1]], source).get("expert_load")
    counts = list(layers.values()) if isinstance(layers, dict) else []
    is_good = all(isinstance(c, list) and c and all(type(n) is int and 0 <= n < 2**63 for n in c) for c in counts)
    if not counts or not is_good or len({len(c) for c in counts}) > 1:
        raise ValueError(f"expert_load in {source} must have equally long lists of counts, not {quoted(layers)}")
    return torch.tensor(counts)


def consecutive(load_LE: Tensor, n_gpus: int) -> GpuLoads:
    """Return the loads of GPUs that have one copy of each expert, as many consecutive ones as any other GPU."""
    n_experts = load_LE.shape[1]
    gpu_E = torch.arange(n_experts) * n_gpus // n_experts
    place_E = torch.arange(n_experts) - torch.searchsorted(gpu_E, gpu_E)
    load_LGS = torch.zeros(len(load_LE), n_gpus, int(place_E.max()) + 1, dtype=torch.float64)
    load_LGS[:, gpu_E, place_E] = load_LE.double()
    return GpuLoads(load_LGS.numpy(), torch.zeros_like(load_LGS, dtype=torch.bool).numpy())


def balanced(load_LE: Tensor, n_slots: int, n_groups: int, n_nodes: int, n_gpus: int) -> GpuLoads:
    """Return the loads of GPUs whose experts `rebalance_experts` has placed.

    Raises:
        ValueError: the sizes do not fit the load.
    """
    physical_LP, _, count_LE = rebalance_experts(load_LE, n_slots, n_groups, n_nodes, n_gpus)
    load_LP = (load_LE.double() / count_LE).gather(1, physical_LP)
    is_redundant = count_LE.gather(1, physical_LP) > 1
    return GpuLoads(*(t.view(len(load_LE), n_gpus, -1).numpy() for t in (load_LP, is_redundant)))
