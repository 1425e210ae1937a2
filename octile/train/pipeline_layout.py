"""The pipeline that a configuration asks for: its schedule, and which layers each of its stages has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from octile.parallel.schedules import SCHEDULES, Schedule, held_activations, make_schedule, simulate
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout, ScheduleName
from octile.plan.stages import stage_layers
from octile.train.config import TrainConfig

GPUS = "h200_8"  # whose times divide the layers, whatever device a run is on


def make_pipeline_schedule(config: TrainConfig) -> Schedule | None:
    """The schedule of a run whose layers are on several ranks; None if each rank has all layers.

    Raises:
        ValueError: the schedule refuses so many ranks or micro-batches, or the model has too few layers.
    """
    parallel = config.parallel
    if parallel.pp == 1:
        return None
    n_stages = parallel.pp * (2 if parallel.schedule == "dualpipev" else 1)
    if n_stages > config.model.num_hidden_layers:
        raise ValueError(
            f"parallel.pp {parallel.pp} with parallel.schedule {parallel.schedule} needs at least {n_stages} layers, "
            f"one a stage, but model.num_hidden_layers is {config.model.num_hidden_layers}"
        )
    try:
        return make_schedule(parallel.schedule, n_stages, config.micro_batches)
    except ValueError as error:
        kind = SCHEDULES[parallel.schedule]
        raise ValueError(
            f"parallel.schedule {parallel.schedule} does not fit parallel.pp {parallel.pp} and micro_batches "
            f"{config.micro_batches}: {error} (needed: {kind.constraints}, for PP = {n_stages} stages and M "
            "micro-batches of a rank)"
        ) from None


def pipeline_layers(config: TrainConfig, schedule: Schedule) -> list[range]:
    """The layers of each stage of a run's pipeline, which take about the same time in FP8 on H200s with NVLink."""
    ep = config.parallel.ep
    gpus = schedule.n_ranks * ep
    layout = Layout(
        pp=schedule.n_ranks,
        ep=ep,
        schedule=cast(ScheduleName, schedule.name),
        batch_size=ep * schedule.n_micro_batches * config.micro_batch_size,
        micro_batch_size=config.micro_batch_size,
        sequence_length=config.sequence_length,
        masters="replicated",
        is_balanced=True,
    )
    return stage_layers(config.model, layout, replace(read_cluster(GPUS), gpus=gpus, gpus_per_node=gpus))


def held_share(config: TrainConfig) -> float:
    """The most activations that a rank holds, in units of the whole model's for a micro-batch; 1 without a pipeline.

    Raises:
        ValueError: see `make_pipeline_schedule`.
    """
    schedule = make_pipeline_schedule(config)
    if schedule is None:
        return 1.0
    *sizes, last = (len(layers) for layers in pipeline_layers(config, schedule))
    sizes.append(last + config.model.num_nextn_predict_layers)
    return max(held_activations(schedule, sizes)) / sum(sizes)


def describe_pipeline(schedule: Schedule, layers: Sequence[range]) -> str:
    """Say how the layers of a model pass the ranks of a pipeline."""
    simulated, counts = simulate(schedule), [len(own) for own in layers]
    shown = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}" if len({*counts}) > 1 else f"{counts[0]}"
    held = [[counts[stage] for stage in schedule.stages(rank)] for rank in range(schedule.n_ranks)]
    by_rank = ", ".join(" + ".join(map(str, own)) for own in held)
    several = f" (layers of each rank: {by_rank})" if any(len(own) > 1 for own in held) else ""
    return (
        f"pipeline: {SCHEDULES[schedule.name].title}, {schedule.n_stages} stages of {shown} "
        f"layer{'s' if max(counts) > 1 else ''} on {schedule.n_ranks} ranks{several}, {schedule.n_micro_batches} "
        f"micro-batch{'es' if schedule.n_micro_batches != 1 else ''}; "
        f"idle for {simulated.bubble / simulated.makespan:.0%} of a step if all stages take the same time, and a "
        "backward pass twice that of a forward pass" + ("; less with more --micro-batches" if simulated.bubble else "")
    )
