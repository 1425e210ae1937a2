"""Whether a run can fit into the memory of its device, which is checked before it begins.

A model is refused whose weights, gradients, moments and update exceed the device's memory, and on a CPU a run whose
estimate (`octile.train.memory.cpu`) exceeds what is available.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from octile.models.counts import HIDDEN_MATRICES, count_parameters
from octile.train.config import TrainConfig
from octile.train.memory.advice import MemoryNeed, advice, describe_update, format_memory
from octile.train.memory.cpu import count_update, estimate_need
from octile.train.memory.device import available_memory, device_memory
from octile.train.pipeline_layout import make_pipeline_schedule

BYTES_PER_PARAMETER = 12  # FP32 weight and gradient, two BF16 moments
MOMENTS_BYTES = 4  # the moments among them, which the ranks share
FP8_LM_BYTES_PER_PARAMETER = 6  # FP16 weight, FP8 gradient, FP8 and FP16 moments


def check_memory(config: TrainConfig, device: torch.device, is_train: bool = True) -> None:
    """Refuse a run that cannot fit: whose weights, gradients and moments alone exceed the device's memory.

    On a CPU the activations count too, because nothing can be explained when the memory is exceeded there.

    Args:
        config: the configuration of the run.
        device: where it is going to run.
        is_train: whether its command is `octile train`, which has more options than `octile compare`.

    Raises:
        ValueError: it cannot.
    """
    needed, total = min_memory(config), device_memory(device)
    if needed > total:
        raise ValueError(
            f"the model needs at least {needed / 1e9:,.0f} GB for weights, gradients and optimizer, but "
            f"the {device.type} has {total / 1e9:,.0f} GB: choose a smaller model"
        )
    if device.type == "cpu":
        ranks = _ranks_here()  # which share the memory
        need, available = estimate_need(config, ranks), available_memory(device)
        if need.total > available:
            if is_train and need.data > available / 2:
                change = f"the token ids of a step take {format_memory(need.data)}: use a smaller --batch-size"
            elif need.update and need.fixed + need.update > available:
                change = f"{describe_update(need.update, need.fixed)}: choose a smaller model"
            elif need.step <= available:
                change = (
                    f"its ranks make {format_memory(need.made)} of weights before they take their stages, a resumed "
                    f"run needs {format_memory(need.read)} to read its checkpoint, and rank 0 collects "
                    f"{format_memory(need.collected)} at the end: choose a smaller model"
                )
            else:
                half = replace(config, sequence_length=max(config.sequence_length // 2, config.advisable_length))
                half_sequence = estimate_need(half, ranks).sequence
                measured = MemoryNeed(need.fixed, need.sequence, available, half_sequence)
                change = advice(config, measured, has_begun=False, is_train=is_train)
            who = "the run needs" if len(ranks) == 1 else f"the {len(ranks)} ranks here need"
            raise ValueError(
                f"{who} about {format_memory(need.total)}, but {format_memory(available)} are available: {change}"
            )


def _ranks_here() -> range:
    """The ranks that torchrun has started on this machine."""
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    first = int(os.environ.get("RANK") or 0) - int(os.environ.get("LOCAL_RANK") or 0)
    return range(first, first + n_ranks)


def min_memory(config: TrainConfig) -> int:
    """Bytes of weights, gradients, moments and Muon's update of a rank; of a pipeline, of the mean stages."""
    counts, parallel = count_parameters(config.model), config.parallel
    parameters = counts.total + sum(counts.mtp.values())
    if config.recipe == "fp8_lm":
        return parameters * FP8_LM_BYTES_PER_PARAMETER
    experts = sum(count.get("routed experts", 0) for count in (counts.main, counts.mtp))
    held = parameters - experts + experts // parallel.ep
    moments = MOMENTS_BYTES * parameters
    if config.optim.name == "muon":  # one moment of matrices
        moments -= (
            MOMENTS_BYTES // 2 * sum(c.get(kind, 0) for c in (counts.main, counts.mtp) for kind in HIDDEN_MATRICES)
        )
    all_bytes = held * (BYTES_PER_PARAMETER - MOMENTS_BYTES) + moments // parallel.dp
    schedule = make_pipeline_schedule(config)
    if schedule is not None:
        all_bytes = all_bytes * len(schedule.stages(0)) // schedule.n_stages
    return all_bytes + (count_update(config) if config.optim.name == "muon" else 0)
