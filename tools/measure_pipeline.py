"""Train a preset on one GPU and on a pipeline of two, with 16 micro-batches of the preset's size and random tokens.

    torchrun --nproc-per-node 2 -m tools.measure_pipeline medium alone,both,1f1b,dualpipev,torch-1f1b,eager-1f1b
    torchrun --nproc-per-node 2 -m tools.measure_pipeline small dualpipev,torch-dualpipev,torch-1f1b
    torchrun --nproc-per-node 1 -m tools.measure_pipeline small alone,both
    torchrun --nproc-per-node 2 -m tools.measure_pipeline tiny dualpipev,torch-dualpipev     # on a CPU

Each phase is a run of octile's trainer in the same processes: `alone` on one GPU without a pipeline, `both` on one GPU
that has both stages of a folded pipeline (each rank on its own, at the same time), a schedule on two GPUs, captured in
CUDA graphs; after `eager-` launched kernel by kernel, after `torch-` run by torch's executor
(`torch.distributed.pipelining`), which launches kernel by kernel, too. Its stages compute gradients as octile's do:
weight gradients that the schedule defers are left out of a backward pass, and GEMMs add to those of the micro-batches
before. torch's own way, which leaves them to a second call of autograd, runs `torch.autograd.Function.backward` twice,
and a Function that computes both gradients computes both of them twice.

Some single steps, and then as many launched one after the other, precede those that are measured, which are launched
one after the other, too: batches wait in pinned memory until the GPU has copied them, so that the first steps in a row
allocate some, and later ones do not.

A line has the layers of the stages; the tokens/s of the steps after warm-up and capture, relative to `alone`; how long
the host takes to launch a step, per action of the schedule, and to wait for its batch, which a thread prepares; of each
launch how long it takes, how long its graphs alone take, and how much pinned memory is allocated until it returns; the
most memory, and what was allocated before; and whether activations are saved that could be recomputed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from octile.nn.deferred_wgrad import DeferrableLinears, DeferredWgrads, defer_wgrads
from octile.ops.matmul import without_autocast
from octile.optim.gradient import added_in_place
from octile.parallel.pipeline import Pipeline
from octile.parallel.ranks import Ranks, join, leave
from octile.parallel.schedules import make_schedule
from octile.train import trainer as trainer_module
from octile.train.config import ParallelConfig, TrainConfig, preset
from octile.train.data.batches import PreparedBatches
from octile.train.pipeline_layout import make_pipeline_schedule
from octile.train.step.captured import why_eager
from octile.train.strategy import single
from octile.train.strategy.make import make_strategy
from octile.train.strategy.pipelined import PipelinedStrategy
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.single import Strategy
from octile.train.trainer import Trainer
from tools.measure_ranks import launch_and_collect
from tools.random_run import random_store

MICRO_BATCHES, WARM_UP, STEPS = 16, 5, 5
LAYERS = 4  # at least: one for each stage of DualPipeV; the preset tiny has two
TORCH: dict[str, Callable[..., Any]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "dualpipev": ScheduleDualPipeV}


def config_of(phase: str, config: TrainConfig, n_ranks: int) -> TrainConfig:
    """Return the configuration of a phase.

    Raises:
        ValueError: there is no such phase, or its schedule does not fit the ranks, the layers or the micro-batches.
    """
    how, _, schedule = phase.rpartition("-")
    if phase in ("alone", "both"):
        return config
    if how not in ("", "eager", "torch") or (how == "torch" and schedule not in TORCH):
        raise ValueError(
            "a phase must be alone, both, a schedule, also after eager-, or one of "
            f"{', '.join(TORCH)} after torch-, not {phase}"
        )
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


class TorchStage(PipelineStage):
    """A stage for torch's executor whose gradients are computed as by `octile.parallel.pipeline`."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.wgrads: dict[int, DeferredWgrads] = {}

    def backward_one_chunk(  # type: ignore[override]
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a micro-batch, and leave its weight gradients for later unless it is full."""
        with self._adding(), nullcontext() if full_backward else defer_wgrads() as wgrads:
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
        if wgrads is not None:
            self.wgrads[bwd_chunk_id] = wgrads

    def backward_weight_one_chunk(  # type: ignore[override]
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """Compute the weight gradients of a micro-batch that were left for later."""
        with self._adding():
            self.wgrads.pop(bwd_chunk_id).compute()

    @contextmanager
    def _adding(self) -> Iterator[None]:
        with added_in_place(self.submod.parameters()), without_autocast(self.device):
            yield


def by_torch(pipeline: Pipeline, device: torch.device) -> Callable[..., None]:
    """Return what runs a step of the pipeline's stages by torch's executor, in the place of `Pipeline.step`."""
    n_stages, name = pipeline.schedule.n_stages, pipeline.schedule.name
    stages = [TorchStage(own, i, n_stages, device, group=pipeline.group) for i, own in pipeline.stages.items()]

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        assert pipeline.loss is not None
        return pipeline.loss(*outputs, target.storage_offset() // target.numel())  # the number of the micro-batch

    own = stages if name == "dualpipev" else stages[0]
    schedule = TORCH[name](own, pipeline.schedule.n_micro_batches, loss_fn=loss, scale_grads=False)

    def step(inputs: Sequence[Tensor], targets: Sequence[Any], **settings: Any) -> None:
        whole = torch.cat(list(inputs))
        given, target = [whole] if pipeline.is_first else [], whole if pipeline.is_last else None
        with DeferrableLinears():
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


def pinned_bytes(device: torch.device) -> int:
    """The bytes of pinned memory that torch has allocated so far, from CUDA and not from what it had before."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.allocated"]) if device.type == "cuda" else 0


class Measured(NamedTuple):
    """What a phase has shown: its tokens/s, the losses of all its steps, and a line about it."""

    speed: float
    losses: Sequence[float]
    line: str


def measure(phase: str, config: TrainConfig, ranks: Ranks, device: torch.device) -> Measured:
    """Train in the way of a phase, and measure it."""
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
        pipeline, strategy = trainer.strategy.pipelined._pipeline, trainer.strategy
        actions = len(pipeline.schedule.actions[pipeline.rank])
        stages = f"stages of {[len(layers) for layers in strategy._layers]} layers, "
        if how == "torch":
            pipeline.step = by_torch(pipeline, device)  # type: ignore[assignment]
            # its first step also runs stages to learn shapes: the load of their experts must not count
            strategy.losses(trainer.passes, trainer.batches.batch(0), config.batch_size, strategy.no_load())
    losses = [trainer.step()["loss"] for _ in range(WARM_UP)]
    losses += launch_and_collect(trainer, STEPS)
    if on_gpu:
        torch.cuda.synchronize()
    before, host, pinned = trainer.progress.seconds, list[float](), [pinned_bytes(device)]
    with timed(torch.cuda.CUDAGraph, "replay") as replays, timed(PreparedBatches, "batch") as batches:
        for _ in range(STEPS):
            begin = time.perf_counter()
            trainer.launch()
            host.append(time.perf_counter() - begin)
            pinned.append(pinned_bytes(device))
    losses += [line["loss"] for line in trainer.collect()]
    seconds = (trainer.progress.seconds - before) / STEPS
    captured = trainer.captured is not None and trainer.captured.is_captured
    graphs = [sum(replays[i : i + 2]) for i in range(0, len(replays), 2)]  # of each launch, which replays two
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    tokens = config.batch_size * config.sequence_length
    line = (
        f"{stages}{tokens / seconds:,.0f} tokens/s, {1e3 * seconds:.1f} ms a step of {tokens:,} tokens, "
        f"captured {captured}; the host launches it in {1e3 * sum(host) / STEPS:.2f} ms, "
        f"{1e6 * sum(host) / STEPS / actions:.1f} µs for each of {actions} actions, of which its graphs "
        f"{1e3 * sum(graphs) / STEPS:.2f} ms, its batch {1e3 * sum(batches) / STEPS:.2f} ms; "
        f"launches {milliseconds(host)} ms, their graphs {milliseconds(graphs)} ms, pinned memory allocated "
        f"{[(after - so_far) >> 20 for so_far, after in pairwise(pinned)]} MiB; "
        f"peak {peak / 2**30:.2f} GiB, {held / 2**30:.2f} of them of phases before, "
        f"activations saved {trainer.strategy.saves_activations}; "
        f"losses {[round(loss, 5) for loss in losses]}"
    )
    trainer.close()
    trainer.release_captured()
    return Measured(tokens / seconds, losses, line)


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 2) for value in seconds]


def main(name: str, phases: Sequence[str]) -> None:
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks, base = join(device, 120), preset(name)
    model = replace(base.model, num_hidden_layers=max(base.model.num_hidden_layers, LAYERS))
    if not dist.is_initialized():
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    batch_size = MICRO_BATCHES * base.micro_batch_size
    config = replace(base, model=model, batch_size=batch_size, micro_batches=MICRO_BATCHES, val_sequences=2)
    configs = {phase: config_of(phase, config, ranks.size) for phase in phases}
    of_alone: float | None = None
    for phase in phases:
        speed, _, line = measure(phase, configs[phase], ranks, device)
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
