"""Launches of kernels that are specialized by constants: a kernel with its launch shape is prepared once.

Within `overlapping_launches` kernels with a constant `programmatic` are launched by programmatic dependent launch. Each
may start before the previous one of the stream has ended, and waits for it at its start. Before that, dense GEMMs,
products of heads, and the gate and norms of few rows load the first weights, and within `only_activations_are_new`
grouped GEMMs, too; attention of decoding loads the first pages there, and unpermute row ids.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from octile.kernels import planning
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel

MAX_KEYS = 8192  # kernels with a launch shape
_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)
_overlapping: ContextVar[bool] = ContextVar("overlapping launches", default=False)
_only_activations_are_new: ContextVar[bool] = ContextVar("only activations are of the previous kernel", default=False)


@contextmanager
def overlapping_launches() -> Iterator[None]:
    """A context in which kernels may start before the previous one of the stream has ended.

    The caller promises that no kernel inside writes a weight: an operand with 128×128 scales, or a weight of the gate,
    of heads or of a norm.
    """
    token = _overlapping.set(True)
    try:
        yield
    finally:
        _overlapping.reset(token)


@contextmanager
def only_activations_are_new() -> Iterator[None]:
    """A context of `overlapping_launches` in which grouped GEMMs, attention of decoding and unpermute load more early.

    The caller promises that all they read but rows and queries, such as offsets, row ids, lengths and cached pages, was
    written by a kernel before the previous one of the stream. The previous one has waited for that before it let this
    one start, or has ended.
    """
    token = _only_activations_are_new.set(True)
    try:
        yield
    finally:
        _only_activations_are_new.reset(token)


def loads_others_early() -> bool:
    """Return whether launches overlap within `only_activations_are_new`."""
    return overlaps() and _only_activations_are_new.get()


def overlaps() -> bool:
    """Return whether launches are within `overlapping_launches`."""
    return _overlapping.get()


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
        name, constants: as for `specialize.source`; with `programmatic` if the kernel may start early (`overlaps`).
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
        prepared = _prepared[key] = PreparedKernel(
            kernel, blocks, 1, threads, shared_bytes, bool(constants.get("programmatic", False))
        )
    prepared.launch_at(arguments)()
