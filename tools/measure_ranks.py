"""Train a preset on one GPU, and then on two, in the same processes, with random tokens that can be learned a little.

    torchrun --nproc-per-node 2 -m tools.measure_ranks medium alone,dp2_weak,dp2,ep2_weak,ep2_symm_weak

Each phase is a run of octile's trainer: `alone` on one GPU (each rank on its own, at the same time), `dp2` data
parallel, `ep2` with the experts spread, by all-to-all or (`symm`) on symmetric memory. `weak` has the same tokens per
GPU, and so twice the batch; the others have the same batch. `:RECIPE` after a phase chooses a recipe. A line has the
mean of the steps after warm-up and capture, which the host launches before it collects one, the losses of all, how much
of rank 0's communication is exposed in further steps that the profiler records (`octile.train.step.kernel_records`),
and how much memory stays allocated when the trainer is gone.
"""

import gc
import os
import sys
import time
from dataclasses import replace

import torch

from octile.parallel.ranks import Ranks, join, leave
from octile.train.config import ParallelConfig, TrainConfig, preset
from octile.train.step.kernel_records import communication, costs, is_communication, kernels_of
from octile.train.trainer import Trainer
from tools.random_run import random_store, weights_drawn_on

WARM_UP, STEPS, PROFILED = 5, 5, 3
PHASES = {  # how many times the preset's batch, and the ranks
    "alone": (1, ParallelConfig()),
    "dp2": (1, ParallelConfig(2)),
    "dp2_bf16": (1, ParallelConfig(2, reduce="bfloat16")),
    "dp2_weak": (2, ParallelConfig(2)),
    "dp2_weak_bf16": (2, ParallelConfig(2, reduce="bfloat16")),
    "ep2": (1, ParallelConfig(2, 2)),
    "ep2_weak": (2, ParallelConfig(2, 2)),
    "ep2_symm": (1, ParallelConfig(2, 2, exchange="symmetric_memory")),
    "ep2_symm_weak": (2, ParallelConfig(2, 2, exchange="symmetric_memory")),
}


def launch_and_collect(trainer: Trainer, steps: int) -> list[float]:
    for _ in range(steps):
        trainer.launch()
    return [line["loss"] for line in trainer.collect()]


def exposed(trainer: Trainer) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities if trainer.ranks.is_first else activities[:1]) as record:
        launch_and_collect(trainer, PROFILED)
        torch.cuda.synchronize()
    if not trainer.ranks.is_first:
        return ""
    kernels = kernels_of(record)
    found, ms = communication(kernels), 1e-3 / PROFILED
    largest = [f"{c.name[:40]} {c.ms:.1f} ms" for c in costs(kernels, PROFILED) if is_communication(c.name)]
    return (
        f"communication {found.time * ms:.1f} ms a step, exposed {found.exposed * ms:.1f} ms, "
        f"{found.exposed_share:.1%}: {', '.join(largest)}"
    )


def run(name: str, config: TrainConfig, ranks: Ranks, device: torch.device) -> tuple[str, float, list[float]]:
    torch.cuda.reset_peak_memory_stats()
    store = random_store(config.model.vocab_size, 4 * config.batch_size * config.sequence_length)
    trainer = Trainer(replace(config, val_sequences=8), store, device, ranks=ranks)
    losses = [trainer.step()["loss"] for _ in range(WARM_UP)]
    before = trainer.progress.seconds
    losses += launch_and_collect(trainer, STEPS)
    step = (trainer.progress.seconds - before) / STEPS
    tokens = config.batch_size * config.sequence_length
    state = sum(t.nbytes for moments in trainer.optimizer.state.values() for t in moments.values())
    line = (
        f"{name}: {tokens / step:,.0f} tokens/s, {1e3 * step:.1f} ms a step of {tokens:,} tokens, "
        f"captured {trainer.captured.is_captured}, moments {state / 2**30:.2f} GiB, peak "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, "
        f"held-out loss {trainer.evaluator.validate()['val_loss']:.5f}, "
        f"losses {[round(loss, 5) for loss in losses]}"
    )
    if ranks.size > 1:
        line += f"; {exposed(trainer)}"
    trainer.close()
    trainer.captured.release()
    return line, tokens / step, losses


def main(what: str, phases: list[str]) -> None:
    local, begin = int(os.environ["LOCAL_RANK"]), time.monotonic()
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    ranks, base, alone = join(device, 90), preset(what), {}
    for phase in phases:
        name, _, recipe = phase.partition(":")
        times, parallel = PHASES[name]
        config = replace(base, batch_size=times * base.batch_size, parallel=parallel, recipe=recipe or base.recipe)
        with weights_drawn_on(device):
            line, speed, losses = run(f"{what} {phase}", config, Ranks.alone() if name == "alone" else ranks, device)
        gc.collect()
        torch.cuda.empty_cache()
        line += f"; {torch.cuda.memory_allocated() / 2**30:.2f} GiB stay allocated"
        if name == "alone":
            alone[recipe] = speed, losses
        elif recipe in alone:
            line += f"; {speed / alone[recipe][0]:.3f} times one GPU"
        if ranks.is_first:
            print(f"[{time.monotonic() - begin:.0f} s] {line}", flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
