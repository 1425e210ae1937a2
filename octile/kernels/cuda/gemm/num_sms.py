"""The number of SMs that GEMMs may use.

GEMM kernels are persistent: one thread block per SM takes tile after tile. A communication kernel that runs at the
same time needs some SMs for itself, so GEMMs can be limited to fewer blocks. They split K as on all SMs, so results
keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from octile.kernels.cuda.gemm.cost_model import Chip


@dataclass(eq=False)
class _Left:
    """SMs that are left free until so many FLOPs were launched."""

    count: int
    flops: float


limit: int | None = None  # as `set_num_sms` set it; None: all SMs
left_free = 0  # SMs for kernels that run at the same time: the largest number of `leave_free`
_left: list[_Left] = []  # of those that have not ended, in their order


def set_num_sms(count: int | None) -> None:
    """Limit GEMMs to `count` SMs, in the whole process; None: no limit.

    Raises:
        TypeError, ValueError: count is not an integer, or less than 1.
    """
    global limit
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"count must be an integer or None, not {count!r}")
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
    limit = count


def leave_free(count: int, flops: float) -> Callable[[], None]:
    """Have GEMMs leave `count` SMs free to a kernel that runs at the same time; of several counts the largest.

    Args:
        count: number of SMs.
        flops: FLOPs of GEMMs that run in the time that the kernel takes. Those that are launched afterwards use all
            SMs. Kernels run one after the other, so the FLOPs of later calls follow those of earlier ones.

    Returns:
        a function that ends it earlier.
    """
    left = _Left(count, flops)
    _left.append(left)
    _update()

    def end() -> None:
        if left in _left:
            _left.remove(left)
            _update()

    return end


def count_launched(flops: float) -> None:
    """Count the FLOPs of a GEMM that was launched."""
    while _left and flops > 0:
        first = _left[0]
        first.flops, flops = first.flops - flops, flops - first.flops
        if first.flops <= 0:
            _left.pop(0)
    _update()


def _update() -> None:
    global left_free
    left_free = max((left.count for left in _left), default=0)


def num_sms(device: torch.device | int | None = None) -> int:
    """Return how many SMs of a GPU GEMMs may use; None is the current GPU."""
    there = multiprocessors(torch.cuda.current_device() if device is None else device)
    allowed = max(there - left_free, 1)
    return allowed if limit is None else min(limit, allowed)


_assumed: ContextVar[Chip | None] = ContextVar("assumed chip", default=None)


@contextmanager
def assume_chip(gpu: Chip) -> Iterator[None]:
    """A context in which launches of this thread assume this GPU, to be planned on the meta device."""
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


def chip(device: torch.device | int | None = None) -> Chip:
    """Return a GPU as the choice of a GEMM's kernel needs it; None is the current GPU. Or that of `assume_chip`."""
    if assumed := _assumed.get():
        return assumed
    from octile.kernels.cuda.jit.driver import memory_bandwidth  # late: without a GPU there may be no driver

    index = device if isinstance(device, int) or device is None else device.index
    index = torch.cuda.current_device() if index is None else index
    name = torch.cuda.get_device_properties(index).name
    return Chip(num_sms(index), multiprocessors(index), memory_bandwidth(index), name)


def multiprocessors(device: torch.device | int) -> int:
    """Return the number of SMs of a GPU, or of that of `assume_chip`."""
    assumed = _assumed.get()
    return _multiprocessors(device) if assumed is None else assumed.whole.multiprocessors


@cache  # every launch asks
def _multiprocessors(device: torch.device | int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
