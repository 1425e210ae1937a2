"""Properties of the GPU, and the tile of a GEMM that suits them.

The tile is computed, not found by trials: autotuning needs the GPU for itself and cannot be captured in a CUDA graph.
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
class DeviceProperties:
    """SMs, shared memory in bytes that a thread block may use, and what the GPU can do.

    Attributes:
        fp8: whether it converts and multiplies FP8.
        dependent_launch: whether a kernel can start before the previous one has ended (`overlap_options`).
    """

    num_sms: int
    shared_bytes: int
    fp8: bool
    dependent_launch: bool


_assumed: ContextVar[DeviceProperties | None] = ContextVar("assumed device properties", default=None)


def device_properties(device: torch.device) -> DeviceProperties:
    """The properties of a device, or those that `assume_device` sets."""
    return _assumed.get() or _gpu(device)


@contextmanager
def assume_device(gpu: DeviceProperties) -> Iterator[None]:
    """A context in which launches assume this GPU: for compilation without a GPU, and for Triton's interpreter."""
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _gpu(device: torch.device) -> DeviceProperties:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks shared_memory_per_block_optin
    version, shared_bytes = (properties.major, properties.minor), properties.shared_memory_per_block_optin
    return DeviceProperties(properties.multi_processor_count, shared_bytes, version >= (8, 9), version >= (9, 0))


def tile(m: int, n: int, num_gemms: int, block_k: int, one_b_scale: bool, gpu: DeviceProperties) -> dict[str, Any]:
    """The tile and compile options of a GEMM kernel.

    A tile of 128×128 minimizes traffic: each loaded byte is used 128 times, and two FP32 accumulators, of the tile and
    of the k-block, take 128 registers per thread with 8 warps. If the rows of b do not share a scale, or encoded values
    are converted to FP16, more registers are needed, and only half the width fits without spills. Few rows take a
    smaller tile, and with fewer tiles than SMs narrower tiles occupy more SMs.

    Args:
        m, n: shape of the output of one GEMM.
        num_gemms: number of GEMMs in the launch.
        block_k: extent of a k-block.
        one_b_scale: whether all rows of a tile of b share a scale.
        gpu: the GPU.
    """
    tile_m = min(max(triton.next_power_of_2(m), 16), 128)
    tile_n = min(max(triton.next_power_of_2(n), 32), 128 if one_b_scale and gpu.fp8 else 64)
    while tile_n > 32 and num_gemms * triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n) < gpu.num_sms:
        tile_n //= 2
    stages = gpu.shared_bytes // ((tile_m + tile_n) * block_k)
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "BLOCK_K": block_k,
        "num_warps": 8 if tile_m * tile_n >= 128 * 64 else 4,
        "num_stages": min(max(stages, 2), 4),
        "enable_fp_fusion": True,  # a k-block's sum is scaled and accumulated by one instruction
    }
