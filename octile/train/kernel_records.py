"""Kernels and copies of a GPU as the profiler records them: the time of each name, and the time in which it idles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.profiler import profile


class KernelRecord(NamedTuple):
    """A kernel, copy or memset in the profiler's record; times in µs."""

    name: str
    start: float
    duration: float


class Cost(NamedTuple):
    """A kernel or an operator.

    Attributes:
        name: as the profiler records it.
        calls: of a step.
        ms: of a step, of all calls together.
    """

    name: str
    calls: float
    ms: float


def kernels_of(record: profile) -> list[KernelRecord]:
    """The kernels, copies and memsets of the GPU in a profile, in the order of their starts."""
    from torch.autograd import DeviceType

    kernels = [
        KernelRecord(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in record.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def busy_times(kernels: Iterable[KernelRecord]) -> Iterator[tuple[KernelRecord, float]]:
    """Each kernel in the order of their starts, and the µs in which it ran and none before it did."""
    end = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        until = kernel.start + kernel.duration
        yield kernel, max(0.0, until - max(end, kernel.start))
        end = max(end, until)


def busy(kernels: Iterable[KernelRecord]) -> float:
    """The µs in which at least one kernel ran."""
    return sum(time for _, time in busy_times(kernels))


def span(kernels: Iterable[KernelRecord]) -> float:
    """The µs from the start of the first kernel to the end of the last."""
    kernels = list(kernels)
    return max(k.start + k.duration for k in kernels) - min(k.start for k in kernels)


def idle_share(kernels: Iterable[KernelRecord]) -> float:
    """The share of the time between the first and the last kernel in which none ran."""
    kernels = list(kernels)
    return 1 - busy(kernels) / span(kernels)


def costs(kernels: Iterable[KernelRecord], steps: int) -> list[Cost]:
    """The time of the kernels of each name in some steps, the largest first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        durations[kernel.name].append(kernel.duration)
    return largest_first(Cost(name, len(all) / steps, sum(all) / 1e3 / steps) for name, all in durations.items())


def largest_first(found: Iterable[Cost]) -> list[Cost]:
    """Costs in descending order of their times."""
    return sorted(found, key=lambda cost: -cost.ms)
