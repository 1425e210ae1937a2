"""What the GPU can do, and the tile that suits a product.

The tile follows from arithmetic, not from trials: a trial wants the GPU to itself and cannot be captured in a graph.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton


@dataclass(frozen=True)
class Machine:
    """Its multiprocessors, the shared memory that a program may use, and whether it casts to FP8 and multiplies FP8."""

    multiprocessors: int
    shared_bytes: int
    fp8: bool


_assumed: ContextVar[Machine | None] = ContextVar("the machine that launches are made for", default=None)


def machine(device: torch.device) -> Machine:
    """The GPU behind a device, or the one that `assume` says."""
    return _assumed.get() or _gpu(device)


@contextmanager
def assume(gpu: Machine) -> Iterator[None]:
    """Launches inside are made for this machine: to compile them without a GPU, and for Triton's interpreter."""
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _gpu(device: torch.device) -> Machine:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the memory that needs opting in
    fp8 = (properties.major, properties.minor) >= (8, 9)
    return Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin, fp8)


def tile(m: int, n: int, products: int, step: int, one_b_scale: bool, gpu: Machine) -> dict[str, Any]:
    """What a program takes of `products` results [m, n], and how its kernel is compiled.

    128×128 gives the least traffic that fits: each byte loaded is used 128 times, and two FP32 sums of that size, the
    running one and the step's, fill 128 registers a thread with 8 warps. Where the rows of b do not share a scale
    (`one_b_scale`), or codes have to become FP16 on the way, that takes so many more registers that only half the width
    fits without spilling. Few rows need a smaller tile, and where there are fewer tiles than multiprocessors narrower
    ones keep more of them busy.
    """
    tile_m = min(max(triton.next_power_of_2(m), 16), 128)
    tile_n = min(max(triton.next_power_of_2(n), 32), 128 if one_b_scale and gpu.fp8 else 64)
    while tile_n > 32 and products * triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n) < gpu.multiprocessors:
        tile_n //= 2
    stages = gpu.shared_bytes // ((tile_m + tile_n) * step)
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "STEP": step,
        "num_warps": 8 if tile_m * tile_n >= 128 * 64 else 4,
        "num_stages": min(max(stages, 2), 4),
        "enable_fp_fusion": True,  # a step's sum is scaled and added by one instruction
    }
