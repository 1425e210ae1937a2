# mypy: allow-untyped-defs
"""Triton kernels that start before the previous one of the stream has ended: `overlapping_launches`."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from octile.kernels.cuda.jit.launch import overlaps
from octile.kernels.triton.device import device_properties


def overlap_options(device: torch.device) -> dict[str, Any]:
    """Return the constant and the option of a launch of a kernel that begins with `wait_for_previous`.

    Launches overlap on Hopper and later GPUs; others have no instruction for it.
    """
    if overlaps() and device_properties(device).dependent_launch:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait for the previous kernel, and let the next one start, if launches overlap."""
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
