"""Kernels and copies of a GPU as the profiler records them: the time of each name, and the time in which it idles.

Communication is the kernels that exchange data with other ranks: NCCL's, NVSHMEM's in torch, and those of
`octile.parallel`. It is exposed
while no other kernel runs on the GPU. A kernel that waits for another rank communicates, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.profiler import profile

PEER_KERNELS = ("exchange_rows", "send_results", "send_experts", "peer_barrier")  # octile.kernels.triton.peer_rows
NVSHMEM_KERNELS = "c10d::nvshmem_extension::"  # namespace of torch's


class KernelRecord(NamedTuple):
    """A kernel, copy or memset in the profiler's record; times in µs."""

    name: str
    start: float
    duration: float


class Communication(NamedTuple):
    """The communication of a GPU with other ranks.

    Attributes:
        time: µs in which at least one of its kernels ran.
        exposed: the µs of these in which no other kernel ran.
    """

    time: float
    exposed: float

    @property
    def exposed_share(self) -> float:
        """The share of the communication's time that is exposed; 0 without communication."""
        return self.exposed / self.time if self.time else 0.0


class Cost(NamedTuple):
    """A kernel or an operator.

    Attributes:
        name: as the profiler records it.
        calls: the calls of a step.
        ms: the time of all calls of a step together.
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


def is_communication(name: str) -> bool:
    """Whether a kernel of this name exchanges data with other ranks."""
    return name.lower().startswith(("nccl", *PEER_KERNELS)) or NVSHMEM_KERNELS in name


def communication(kernels: Iterable[KernelRecord]) -> Communication:
    """The time of the communication among the kernels of one GPU, and how much of it is exposed."""
    kernels = list(kernels)
    others = [kernel for kernel in kernels if not is_communication(kernel.name)]
    time = busy(kernel for kernel in kernels if is_communication(kernel.name))
    return Communication(time, busy(kernels) - busy(others))


def costs(kernels: Iterable[KernelRecord], steps: int) -> list[Cost]:
    """The time of the kernels of each name in some steps, the largest first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        durations[kernel.name].append(kernel.duration)
    return largest_first(Cost(name, len(all) / steps, sum(all) / 1e3 / steps) for name, all in durations.items())


def largest_first(found: Iterable[Cost]) -> list[Cost]:
    """Costs in descending order of their times."""
    return sorted(found, key=lambda cost: -cost.ms)
