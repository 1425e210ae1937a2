"""How long a run takes at least on a CPU, estimated before it begins, and refused if that is too long.

The estimate divides the FLOPs that the model needs by the speed of the CPU's fastest GEMM: in FP32, or in BF16 where
the processor multiplies it. Smaller GEMMs are slower, and the operators between them, quantization too, come on top:
a run of the tiny preset takes ten times the estimate where the processor multiplies BF16. Ranks on one host share its
cores: rank 0 times a GEMM on its own threads, and as many ranks count as find cores for theirs.
"""

from __future__ import annotations

import statistics
import time

import torch

from octile.kernels import cpu
from octile.models.flops import train_flops_per_token
from octile.text import format_duration, format_flops, format_quantity
from octile.torchrun import processes_of_host
from octile.train.config import TrainConfig
from octile.train.step.progress import batch_ramp

REFERENCE_SIZE = 512
FAST_SIZE = 1024  # of a GEMM that runs at a CPU's full speed
TIMED = 0.2  # seconds of GEMMs: other programs leave the CPU to some of them
LONG = 600  # seconds; of a shorter run nothing is said
TOO_LONG = 4 * 3600  # seconds; a longer run is begun with `allow_slow` only
SLOW = 5e9  # FLOP/s; every CPU multiplies faster


def check_duration(config: TrainConfig, device: torch.device, done: int = 0, runs: int = 1) -> str | None:
    """Say how long the rest of a run, or of several alike, takes at least, if it is long; None on a GPU.

    Args:
        config: the configuration of the run.
        device: the device that trains.
        done: the steps that lie behind.
        runs: the number of runs, one after another.

    Raises:
        ValueError: it takes more than TOO_LONG, and the configuration does not allow that.
    """
    if device.type != "cpu":
        return None
    ramp = batch_ramp(config)
    tokens = (ramp.before(config.steps) - ramp.before(done)) * config.sequence_length
    flops = runs * tokens * train_flops_per_token(config.model, config.sequence_length)
    if flops / SLOW < LONG:  # timing GEMMs takes a short run 0.2 s
        return None
    dtypes = (torch.float32, torch.bfloat16) if cpu.can_multiply() else (torch.float32,)
    here = processes_of_host() or 1
    hosts, at_once = config.parallel.ranks / here, min(here, max(cpu.count_cores() / torch.get_num_threads(), 1))
    speed = at_once * 2 * FAST_SIZE**3 / min(min(gemm_seconds(device, FAST_SIZE, dtype, TIMED)) for dtype in dtypes)
    seconds = flops / (hosts * speed)
    if seconds < LONG:
        return None
    what = "the run takes" if runs == 1 else f"the {runs} runs take"
    where = "this CPU" if hosts == 1 else f"{hosts:g} hosts with this CPU"
    steps = f"{runs * (config.steps - done):,} steps of {format_quantity(flops)} FLOPs together"
    sentence = (
        f"on {where} {what} at least {format_duration(seconds)}: {steps}, at the {format_flops(speed)} of its largest "
        "GEMMs, and often takes many times that; a GPU, a smaller --preset or fewer --steps take less"
    )
    if seconds > TOO_LONG and not config.allow_slow:
        raise ValueError(f"allow_slow must be given for more than {format_duration(TOO_LONG)}: {sentence}")
    return sentence


def reference_time(device: torch.device) -> float:
    """Seconds for one FP32 GEMM of REFERENCE_SIZE³ on the device: the median of five.

    The runs of a comparison follow one another. If other programs use the machine during one of them, this time grows
    with the time of its steps, so that the report can tell a busy machine from a slow recipe.
    """
    return statistics.median(gemm_seconds(device, REFERENCE_SIZE))


def gemm_seconds(
    device: torch.device, size: int, dtype: torch.dtype = torch.float32, min_seconds: float = 0.0
) -> list[float]:
    """Seconds of each of five GEMMs of size³ on the device, or of so many as fill `min_seconds`, after a warm-up."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = list[float]()
    while len(seconds) < 6 or sum(seconds) < min_seconds:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
