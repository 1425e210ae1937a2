"""Train a preset on one GPU and on a pipeline of two, with 16 micro-batches of the preset's size and random tokens.

    torchrun --nproc-per-node 2 -m tools.measure_pipeline medium alone,both,1f1b,dualpipev,torch-1f1b,eager-1f1b
    torchrun --nproc-per-node 1 -m tools.measure_pipeline small alone,both

Each phase is a run of octile's trainer in the same processes: `alone` on one GPU without a pipeline, `both` on one GPU
that has both stages of a folded pipeline (each rank on its own, at the same time), a schedule on two GPUs, captured in
CUDA graphs; after `eager-` launched kernel by kernel, after `torch-` run by torch's executor
(`torch.distributed.pipelining`), which launches kernel by kernel, too.

A line has the layers of the stages; the tokens/s of the steps after warm-up and capture, relative to `alone`; how long
the host takes to launch a step, per action of the schedule, for its graphs alone, and to wait for its batch, which a
thread prepares; the most memory, and what was allocated before; and whether activations are saved that could be
recomputed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from octile.parallel.pipeline import Pipeline
from octile.parallel.ranks import Ranks, join, leave
from octile.parallel.schedules import make_schedule
from octile.train import trainer as trainer_module
from octile.train.config import ParallelConfig, TrainConfig, preset
from octile.train.data.batches import PreparedBatches
from octile.train.step.captured import why_eager
from octile.train.strategy import single
from octile.train.strategy.make import make_strategy
from octile.train.strategy.pipeline_layout import make_pipeline_schedule
from octile.train.strategy.pipelined import PipelinedStrategy
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.single import Strategy
from octile.train.trainer import Trainer
from tools.measure_ranks import random_store

MICRO_BATCHES, WARM_UP, STEPS = 16, 5, 5
TORCH = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def config_of(phase: str, config: TrainConfig, n_ranks: int) -> TrainConfig:
    """Return the configuration of a phase.

    Raises:
        ValueError: there is no such phase, or its schedule does not fit the ranks, the layers or the micro-batches.
    """
    how, _, schedule = phase.rpartition("-")
    if phase in ("alone", "both"):
        return config
    if how not in ("", "eager", "torch") or (how == "torch" and schedule not in TORCH):
        raise ValueError(f"a phase must be alone, both, or a schedule, also after eager- or torch-, not {phase}")
    if n_ranks == 1:
        raise ValueError(f"phase {phase} needs --nproc-per-node 2: one rank can run alone and both")
    found = replace(config, parallel=ParallelConfig(pp=n_ranks, schedule=schedule))  # type: ignore[arg-type]
    make_pipeline_schedule(found)
    return found


def both_stages(config: TrainConfig, device: torch.device, recipe: Any, ranks: Ranks) -> Strategy:
    """The strategy of a rank that has both stages of a folded pipeline."""
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    schedule = make_schedule("dualpipev", 2, config.micro_batches)
    return PipelinedStrategy(config, device, recipe, ranks, RankMesh(data=own, pipeline=own), schedule)


def by_torch(pipeline: Pipeline, device: torch.device) -> Callable[..., None]:
    """Return what runs a step of the pipeline's stage by torch's executor, in the place of `Pipeline.step`."""
    ((number, module),) = pipeline.stages.items()
    stage = PipelineStage(module, number, pipeline.schedule.n_stages, device, group=pipeline.group)

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        assert pipeline.loss is not None
        return pipeline.loss(*outputs, target.storage_offset() // target.numel())  # the number of the micro-batch

    schedule = TORCH[pipeline.schedule.name](stage, MICRO_BATCHES, loss_fn=loss, scale_grads=False)

    def step(inputs: Sequence[Tensor], targets: Sequence[Any], **settings: Any) -> None:
        whole = torch.cat(list(inputs))
        given, target = [whole] if pipeline.is_first else [], whole if pipeline.is_last else None
        schedule.step(*given, target=target, return_outputs=False)  # a scalar output cannot be concatenated

    return step


@contextmanager
def timed(owner: type, name: str) -> Iterator[list[float]]:
    """Yield a list to which each call of a method adds the host's seconds."""
    seconds, method = list[float](), getattr(owner, name)

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = method(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    setattr(owner, name, call)
    yield seconds
    setattr(owner, name, method)


def measure(phase: str, config: TrainConfig, ranks: Ranks, device: torch.device) -> tuple[float, str]:
    """Return the tokens/s of a phase, and a line about it."""
    how = phase.rpartition("-")[0]
    alone = phase in ("alone", "both")
    trainer_module.make_strategy = both_stages if phase == "both" else make_strategy
    if how:
        single.why_eager = lambda *_: f"the phase is {phase}"
    else:
        single.why_eager = why_eager
    store = random_store(config.model.vocab_size, 4 * config.batch_size * config.sequence_length)
    on_gpu = device.type == "cuda"
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, store, device, ranks=Ranks.alone() if alone else ranks)
    actions, stages = 1, ""
    if isinstance(trainer.strategy, PipelinedStrategy):
        pipeline = trainer.strategy.pipelined._pipeline
        actions = len(pipeline.schedule.actions[pipeline.rank])
        stages = f"stages of {[len(layers) for layers in trainer.strategy._layers]} layers, "
        if how == "torch":
            pipeline.step = by_torch(pipeline, device)  # type: ignore[assignment]
    losses = [trainer.step()["loss"] for _ in range(WARM_UP)]
    if on_gpu:
        torch.cuda.synchronize()
    before, begin = trainer.progress.seconds, time.perf_counter()
    with timed(torch.cuda.CUDAGraph, "replay") as replays, timed(PreparedBatches, "batch") as batches:
        for _ in range(STEPS):
            trainer.launch()
    host = (time.perf_counter() - begin) / STEPS
    losses += [line["loss"] for line in trainer.collect()]
    seconds = (trainer.progress.seconds - before) / STEPS
    captured = trainer.captured is not None and trainer.captured.is_captured
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    tokens = config.batch_size * config.sequence_length
    line = (
        f"{stages}{tokens / seconds:,.0f} tokens/s, {1e3 * seconds:.1f} ms a step of {tokens:,} tokens, "
        f"captured {captured}; the host launches it in {1e3 * host:.2f} ms, {1e6 * host / actions:.1f} µs for each of "
        f"{actions} actions, of which its graphs {1e3 * sum(replays) / STEPS:.2f} ms, its batch "
        f"{1e3 * sum(batches) / STEPS:.2f} ms; "
        f"peak {peak / 2**30:.2f} GiB, {held / 2**30:.2f} of them of phases before, "
        f"activations saved {trainer.strategy.saves_activations}; "
        f"losses {[round(loss, 5) for loss in losses]}"
    )
    trainer.close()
    trainer.release_captured()
    return tokens / seconds, line


def main(name: str, phases: Sequence[str]) -> None:
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks, base = join(device, 120), preset(name)
    if not dist.is_initialized():
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    batch_size = MICRO_BATCHES * base.micro_batch_size
    config = replace(base, batch_size=batch_size, micro_batches=MICRO_BATCHES, val_sequences=2)
    configs = {phase: config_of(phase, config, ranks.size) for phase in phases}
    of_alone: float | None = None
    for phase in phases:
        speed, line = measure(phase, configs[phase], ranks, device)
        of_alone = speed if phase == "alone" else of_alone
        relative = "" if of_alone is None else f"{speed / of_alone:.3f} × alone, "
        sys.stdout.write(f"{name} {phase}, rank {dist.get_rank()}: {relative}{line}\n")  # in one: both ranks write
        sys.stdout.flush()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    if ranks.size > 1:
        leave()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
