"""A model that cannot fit is refused before its data are prepared."""

from __future__ import annotations

import os

import torch

from octile.models.counts import count_parameters
from octile.train.config import TrainConfig

BYTES = 12  # a parameter: FP32 weight and gradient, two BF16 moments
FP8_LM_BYTES = 6  # FP16 weight, FP8 gradient, FP8 and FP16 moments


def check_memory(config: TrainConfig, device: torch.device) -> None:
    """Refuses a run whose weights, gradients and moments alone are more than the device's memory.

    Raises:
        ValueError: they are.
    """
    needed, there = least_needed(config), memory(device)
    if needed > there:
        raise ValueError(
            f"preset {config.preset!r} needs at least {needed / 1e9:,.0f} GB for weights, gradients and optimizer, but "
            f"the {device.type} has {there / 1e9:,.0f} GB: choose a smaller model"
        )


def least_needed(config: TrainConfig) -> int:
    """Bytes of weights, gradients and moments."""
    counts = count_parameters(config.model)
    parameters = counts.total + sum(counts.mtp.values())
    return parameters * (FP8_LM_BYTES if config.recipe == "fp8_lm" else BYTES)


def memory(device: torch.device) -> int:
    """Bytes of memory that the device has, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
