"""The precision of a forward pass in training: autocast on a GPU, and GEMMs that sum in FP32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octile.ops.high_precision import without_reduced_precision_reduction


def autocast(device: torch.device, compute: torch.dtype) -> torch.autocast:
    """Autocast of a forward pass: on a GPU, what is not quantized is in the recipe's `compute` dtype.

    On a CPU, and under a recipe that computes in FP32, it is in FP32.
    """
    return torch.autocast(device.type, compute, device.type == "cuda" and compute != torch.float32)


@contextmanager
def forward_precision(device: torch.device, compute: torch.dtype) -> Iterator[None]:
    """The context of a forward pass on a device: autocast, and GEMMs that sum in FP32 under every recipe."""
    with autocast(device, compute), without_reduced_precision_reduction():
        yield
