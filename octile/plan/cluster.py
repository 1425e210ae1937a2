"""`octile plan cluster`: memory, time and cost of training a model on a cluster, and the best layouts.

The model of the cluster adds up the kernels of a step at their measured rates (work.py, durations.py), simulates the
pipeline's schedule with these times (step.py), and searches the layouts that fit (search.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from octile.checkpoint.files import check_output_file
from octile.models.config import PRESETS, ModelConfig
from octile.options import Given
from octile.parallel.schedules import SCHEDULES, Costs, StageCosts
from octile.plan.exchange import experts_at_equal_cost
from octile.plan.hardware import Cluster, read_cluster
from octile.plan.layout import Layout, Masters, ScheduleName
from octile.plan.memory import why_not_fitting
from octile.plan.replicas import ReplicaTimes, Scatter, simulate_replicas
from octile.plan.schedule import compare_schedules, simulate_all
from octile.plan.search import Search, search
from octile.plan.step import StepPlan, plan_step
from octile.plan.trace import write_trace
from octile.report.console import Console
from octile.report.plan import save_plan
from octile.report.schedule import describe_costs
from octile.report.table import Table, screen_table
from octile.validation import Range, check_fields

SHOWN = 8  # layouts of a search that are printed
SEQUENCES_PER_GPU = 8  # of a batch where none is published
WEIGHTS: dict[Masters, str] = {
    "sharded": "weights: BF16 on every rank, FP32 masters sharded; octile train has FP32 on every rank "
    "(--masters replicated)",
    "replicated": "weights: FP32 on every rank, as octile train has them",
}
Count = Annotated[int, Range(at_least=1, at_most=2**24)]


@dataclass(frozen=True)
class Options:
    """Plan the training of a model on a cluster: memory, time and cost of a step, and the best layouts.

    The fastest layout with the given --pp, --ep, --schedule, --batch-size, --micro-batch-size and --sequence-length is
    planned; those that are not given are searched. Batch and sequence length are not: they are those of the published
    layout if all GPUs are planned and the cluster's file has one for the preset, otherwise 8 sequences per GPU and at
    most 4,096 tokens. Without any of the six options the published layout itself is planned, where there is one.

    Attributes:
        preset: the model: tiny, small, medium, v2_lite_16b, v2_236b or v3_671b.
        model: a config.json of DeepSeek-V3's family, or a folder with one: it is planned instead of a preset.
        cluster: h800_2048, h100_8, h200_8 or h200_2048, or a TOML file like those in octile/plan/clusters.
        gpus: GPUs of the cluster, if not all.
        pp: ranks of the pipeline.
        ep: ranks of expert parallelism.
        schedule: schedule of the pipeline: gpipe, 1f1b, zb1p, dualpipe, dualpipev or chimera.
        batch_size: sequences of a step.
        micro_batch_size: sequences of a micro-batch on one rank.
        sequence_length: tokens of a sequence.
        optimizer: adamw, or muon for the matrices of the layers (`octile train --optim.name`).
        masters: sharded: weights in BF16 on every rank, FP32 masters divided among ranks, as published; replicated:
            FP32 weights on every rank, as `octile train` has them.
        scatter: how the GPUs' times differ from the planned ones: simulated if anything is given.
        out: the picture of the step to write, .svg or .png.
        trace: the Chrome trace of the step to write.
        json: print JSON and write no file.
    """

    preset: str = "v3_671b"
    model: Path | None = None
    cluster: str = "h800_2048"
    gpus: Count | None = None
    pp: Count | None = None
    ep: Count | None = None
    schedule: ScheduleName | None = None
    batch_size: Count | None = None
    micro_batch_size: Count | None = None
    sequence_length: Count | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    masters: Masters = "sharded"
    scatter: Scatter = field(default_factory=Scatter)
    out: Path = Path("plan/step.svg")
    trace: Path = Path("plan/trace.json")
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        if not self.json:
            check_output_file("out", self.out, ".svg", ".png")
            check_output_file("trace", self.trace, ".json")

    def read(self) -> Cluster:
        """The cluster with the number of GPUs that is asked for.

        Raises:
            ValueError, FileNotFoundError: as for `read_cluster`; or there are fewer GPUs.
        """
        cluster = read_cluster(self.cluster)
        if self.gpus is None:
            return cluster
        if self.gpus > cluster.gpus:
            raise ValueError(f"gpus must be at most the {cluster.gpus:,} of cluster {cluster.name}, not {self.gpus:,}")
        return replace(cluster, gpus=self.gpus)

    @property
    def name(self) -> str:
        """The name of the model: the preset's or its path."""
        return self.preset if self.model is None else str(self.model)

    def read_model(self) -> ModelConfig:
        """The model of the preset or of the config.json.

        Raises:
            ValueError, FileNotFoundError: as for `ModelConfig.read`; or its attention is sparse.
        """
        if self.model is None:
            return PRESETS[self.preset]()
        model = ModelConfig.read(self.model)
        if model.has_indexer:
            raise ValueError(f"model must have attention that is not sparse, since no plan has it: {self.model} has")
        return model

    @property
    def layout(self) -> dict[str, Any]:
        """The fields of the layout that are given."""
        names = ("pp", "ep", "schedule", "batch_size", "micro_batch_size", "sequence_length")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Result:
    """What the command found: the planned step, the search and the simulation of all GPUs, if it was asked for."""

    plan: StepPlan
    search: Search
    replicas: ReplicaTimes | None


def read(given: Given) -> Options:
    """Make the options of a command.

    Raises:
        ValueError: a value is invalid, or two options exclude each other.
    """
    given.check_one_of("preset", "model")
    options: Options = given.build()
    return options


def run(options: Options) -> None:
    """Plan, and print or write the result.

    Raises:
        ValueError, FileNotFoundError: the cluster is unknown, or a layout does not divide it or does not fit.
    """
    result = make_plan(options)
    if options.json:
        print(json.dumps(as_json(options, result), indent=2))
        return
    plan = result.plan
    title = f"{options.name} on {plan.cluster.gpus:,} {plan.cluster.gpu.name}: {plan.layout}"
    save_plan(options.out, title, plan.simulation, plan.seconds_by_kind, plan.memory)
    write_trace(options.trace, plan)
    _print(title, result)
    console = Console()
    console.print_line(f"picture: {options.out}\ntrace: {options.trace}")


def make_plan(options: Options) -> Result:
    """Plan what the options ask for.

    Raises:
        ValueError, FileNotFoundError: as for `run`.
    """
    cluster, model = options.read(), options.read_model()
    if options.scatter.is_given:
        options.scatter.check(cluster.gpus)
    whole = read_cluster(options.cluster).gpus
    published = cluster.published(options.preset) if options.model is None and cluster.gpus == whole else None
    length = min(Layout.sequence_length, model.max_position_embeddings)
    default = published or Layout(batch_size=SEQUENCES_PER_GPU * cluster.gpus, sequence_length=length)
    default = replace(default, optimizer=options.optimizer, masters=options.masters)
    given = options.layout
    plan = None
    if published is not None and not given:
        plan = plan_step(model, default, cluster)
        if reason := why_not_fitting(plan.memory, cluster):
            raise ValueError(f"{published} does not fit: {reason}")
    with Console(stderr=True, quiet=options.json).status("planning layouts"):
        found = search(model, cluster, replace(default, **given), tuple(given))
    if plan is None:
        if not found.plans:
            named = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
            asked = f" with {named}" if given else ""
            number = f"the {cluster.gpus:,}" if cluster.gpus == whole else f"{cluster.gpus:,} of the {whole:,}"
            on = f"{number} GPUs of {cluster.name}"
            raise ValueError(f"no layout of {options.name}{asked} can run on {on}: {found.nearest}")
        plan = found.plans[0]
    replicas = None
    if options.scatter.is_given:
        schedule, costs = plan.simulation.schedule, plan.simulation.costs
        replicas = simulate_replicas(schedule, costs, plan.layout.dp(cluster), plan.layout.ep, options.scatter)
    return Result(plan, found, replicas)


def as_json(options: Options, result: Result) -> dict[str, Any]:
    """The result as JSON: numbers, whose keys have the unit; MFU is a share of 1."""
    plan = result.plan
    content: dict[str, Any] = {
        "preset": options.name,
        "cluster": plan.cluster.name,
        "gpus": plan.cluster.gpus,
        "layout": asdict(plan.layout) | {"dp": plan.layout.dp(plan.cluster)},
        "step_seconds": plan.seconds,
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        "gpu_hours_per_trillion_tokens": plan.gpu_hours_per_trillion_tokens,
        "dollars_per_trillion_tokens": plan.dollars_per_trillion_tokens,
        "mfu": plan.mfu,
        "causal_mfu": plan.causal_mfu,
        "bubble_seconds": plan.simulation.bubble,
        "pair_seconds": plan.pair_seconds,
        "seconds": plan.seconds_by_kind,
        "memory_bytes": plan.memory,
        "best": [
            {
                "layout": asdict(other.layout),
                "step_seconds": other.seconds,
                "gpu_hours_per_trillion_tokens": other.gpu_hours_per_trillion_tokens,
                "why_not_best": result.search.why_not_best(other),
            }
            for other in result.search.plans
        ],
        "ruled_out": [{"layout": asdict(no.layout), "reason": no.reason} for no in result.search.ruled_out],
        "schedules": _schedules_as_json(plan),
    }
    if plan.cluster.network is not None:
        per_node, in_all = experts_at_equal_cost(plan.model, plan.cluster)
        content["experts_at_equal_cost"] = {"per_node": per_node, "per_token": in_all}
    if result.replicas is not None:
        content["with_scatter"] = {"step_seconds": result.replicas.step + plan.seconds - result.replicas.planned}
    return content


def _schedules_as_json(plan: StepPlan) -> list[dict[str, Any]]:
    """All schedules with the step's mean times, each with its bubble and activations, simulated and by formula."""
    if plan.layout.pp == 1:
        return []
    micro_batches = _allowed_by_all(plan.layout, plan.cluster)
    costs, milliseconds, rows = mean_costs(plan), 1e-3, []
    for simulation in simulate_all(plan.layout.stages, micro_batches, costs)[0]:
        schedule, kind = simulation.schedule, SCHEDULES[simulation.schedule.name]
        rows.append(
            {
                "schedule": kind.title,
                "ranks": schedule.n_ranks,
                "seconds": simulation.makespan * milliseconds,
                "bubble_seconds": simulation.bubble * milliseconds,
                "bubble_fraction": simulation.bubble / simulation.makespan,
                "bubble_formula": kind.bubble_formula,
                "bubble_by_formula_seconds": kind.bubble(schedule.n_stages, costs) * milliseconds,
                "activations": max(simulation.activations),
                "activations_formula": kind.activations_formula,
                "activations_by_formula": kind.activations(schedule.n_stages, micro_batches),
                "parameter_copies": kind.copies,
            }
        )
    return rows


def _print(title: str, result: Result) -> None:
    plan, console = result.plan, Console()
    line = console.print_line
    cluster, layout = plan.cluster, plan.layout
    line(title)
    n_micro = layout.micro_batches(cluster)
    line(
        f"DP{layout.dp(cluster)}, {n_micro:,} micro-batch{'es' * (n_micro != 1)} of {layout.micro_batch_tokens:,} "
        f"tokens, {plan.tokens:,} tokens a step\n{WEIGHTS[layout.masters]}"
    )
    price = plan.dollars_per_trillion_tokens
    rows = [
        ("a step", f"{plan.seconds:.4g} s"),
        ("tokens/s per GPU", f"{plan.tokens_per_second_per_gpu:,.0f}"),
        ("GPU hours per 10¹² tokens", f"{plan.gpu_hours_per_trillion_tokens:,.0f}"),
        *([("cost per 10¹² tokens", f"${price:,.0f}")] if price else []),
        ("MFU; without MTP, causal", f"{plan.mfu:.1%}; {plan.causal_mfu:.1%}"),
    ]
    console.print(screen_table(Table(("step", ""), rows)))
    kinds = plan.seconds_by_kind
    console.print(screen_table(Table(("busiest rank", "s", "%"), _shares(kinds, 1.0))))
    console.print(screen_table(Table(("memory of a rank", "GB", "%"), _shares(plan.memory, 1e-9))))
    if cluster.network is not None:
        per_node, in_all = experts_at_equal_cost(plan.model, cluster)
        line(
            f"a row that crosses the network can reach {per_node:.1f} experts of a node meanwhile, {in_all:.1f} in "
            f"{plan.model.topk_group} groups"
        )
    if result.replicas is not None:
        line(f"with scatter of all {cluster.gpus:,} GPUs the pipeline takes {result.replicas.loss:.1%} longer")
    if layout.pp > 1:
        costs, micro_batches = mean_costs(plan), _allowed_by_all(layout, cluster)
        table, notes = compare_schedules(layout.stages, micro_batches, costs)
        own = layout.micro_batches(cluster)
        why = "" if micro_batches == own else f" ({own}, rounded up to what all of them allow)"
        stages = f"schedules of {layout.stages} equal stages, {micro_batches} micro-batches{why}"
        line(f"{stages}; ms: {describe_costs(costs)}")
        console.print(screen_table(table))
        for note in notes:
            line(note)
    best = result.search.plans[:SHOWN]
    found = [
        (str(other.layout), f"{other.gpu_hours_per_trillion_tokens:,.0f}", result.search.why_not_best(other))
        for other in best
    ]
    console.print(screen_table(Table(("layout", "GPU hours", "why not"), found)))
    line(f"{len(result.search.plans):,} layouts fit, {len(result.search.ruled_out):,} do not:")
    for reason, count in result.search.reasons.most_common(SHOWN):
        line(f"  {count:5,} such as {reason}")


def mean_costs(plan: StepPlan) -> Costs:
    """The times of the mean stage in ms: formulas of schedules are for stages that take the same time.

    They are rounded to a tenth; those below 10 ms to three digits.
    """
    stages, n = plan.simulation.costs, len(plan.stages)
    assert isinstance(stages, StageCosts)

    def mean(values: Iterable[float]) -> float:
        time = 1e3 * sum(values) / n
        return round(time, max(1, 2 - math.floor(math.log10(time))))

    return Costs(
        forward=mean(costs.forward for costs in stages.stages),
        input_gradient=mean(costs.input_gradient for costs in stages.stages),
        weight_gradient=mean(costs.weight_gradient for costs in stages.stages),
        pair=mean(stages.pairs[stage, stage] for stage in range(n)),
    )


def _allowed_by_all(layout: Layout, cluster: Cluster) -> int:
    """The micro-batches of a layout, or the next number that every schedule allows."""
    least = 2 * layout.stages
    return -(-layout.micro_batches(cluster) // least) * least


def _shares(parts: dict[str, float], unit: float) -> list[tuple[str, str, str]]:
    total = sum(parts.values())
    return [(name, f"{value * unit:.3g}", f"{value / total:.1%}") for name, value in parts.items()]
