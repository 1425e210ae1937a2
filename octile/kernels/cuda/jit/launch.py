"""Launches of kernels that are specialized by constants: a kernel with its launch shape is prepared once."""

from collections.abc import Mapping
from typing import Any

import torch

from octile.kernels import planning
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel

MAX_KEYS = 8192  # kernels with a launch shape
_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)


def launch(
    name: str,
    constants: Mapping[str, int | bool],
    device: torch.device,
    blocks: int,
    threads: int,
    shared_bytes: int,
    *arguments: Any,
) -> None:
    """Launch a kernel on the current stream of a GPU; on meta the kernel is recorded, and its caller goes on.

    Args:
        name, constants: as for `specialize.source`.
        device: a CUDA device with its index, or meta.
        blocks, threads, shared_bytes: thread blocks, threads of a block, and its dynamic shared memory.
        arguments: as for `PreparedKernel.launch_at`.
    """
    key = (name, *constants.values(), blocks, threads, shared_bytes, device.index)
    prepared = _prepared[key]
    if prepared is None:
        if device.type == "meta":
            planning.record(specialize.PlannedKernel(name, constants))
            return
        kernel = specialize.load(name, constants, device)
        prepared = _prepared[key] = PreparedKernel(kernel, blocks, 1, threads, shared_bytes)
    prepared.launch_at(arguments)()
