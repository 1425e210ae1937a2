"""Times of GPU kernels: what the device itself spends on them, as the profiler (CUPTI) records it, and around them.

    work_seconds     what the calls cost where they run: kernel_seconds on a GPU
    kernel_seconds   of the kernels that a call launches, without the gaps before and between them
    host_seconds     of the host, until a call that has been made before returns
    graph_seconds    of a replay of the call captured in a CUDA graph

Before each measured call the L2 cache is flushed by one kernel, which also marks, in the profiler's record, where the
next call begins.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from octile.bench.timing import FLUSH_BYTES, seconds

Calls = Mapping[str, Callable[[], object]]


class Kernel(NamedTuple):
    """A kernel, a copy or a memset in the profiler's record; times in µs."""

    name: str
    start: float
    duration: float


def kernel_seconds(calls: Calls, rounds: int = 20) -> dict[str, float]:
    """The median of each call's kernel time; the calls take turns, so that heat and clocks are alike for all.

    Raises:
        RuntimeError: the profiler has not recorded every kernel; on some machines it may not read the device.
    """
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(2):
        for call in calls.values():
            call()
    marker = {kernel.name for kernel in _recorded(lambda: [flush.bitwise_not_() for _ in range(3)])}
    if len(marker) != 1:
        raise RuntimeError(f"the profiler recorded {len(marker)} kernels where there is one")

    def all_in_turns() -> None:
        for _ in range(rounds):
            for call in calls.values():
                flush.bitwise_not_()
                call()

    times = between(_recorded(all_in_turns), marker.pop(), rounds * len(calls))
    return {name: statistics.median(times[i :: len(calls)]) for i, name in enumerate(calls)}


def between(kernels: Iterable[Kernel], marker: str, count: int) -> list[float]:
    """Seconds of the kernels after each marker, up to the next one.

    Raises:
        RuntimeError: there are not `count` markers, or nothing between two of them.
    """
    parts: list[list[float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.name == marker:
            parts.append([])
        elif parts:
            parts[-1].append(kernel.duration)
    if len(parts) != count or not all(parts):
        raise RuntimeError(f"the profiler recorded {sum(map(bool, parts))} of {count} calls")
    return [sum(part) / 1e6 for part in parts]


def work_seconds(calls: Calls, rounds: int) -> dict[str, float]:
    """Kernel times on a GPU, the clock's on a CPU; where the profiler may not read the GPU, times between events."""
    if not torch.cuda.is_available():
        return seconds(calls, rounds)
    try:
        return kernel_seconds(calls, rounds)
    except RuntimeError as error:
        warnings.warn(f"times are those between events, some µs longer than the kernels': {error}", stacklevel=2)
        return seconds(calls, rounds)


def host_seconds(call: Callable[[], object], calls: int = 100, repeats: int = 10) -> float:
    """The least over repeats of the mean over calls; so few calls that the launch queue is never full.

    The least, since what else a machine does only adds to it: where a call took up to twice as long for some
    milliseconds, a loop of plain Python beside it mostly did, too (benchmarks/LOG.md).
    """
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return min(times)


def graph_seconds(call: Callable[[], object], rounds: int = 20) -> float:
    """The median time of a replay between two events: the kernels, the gaps between them, and the start of a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds({"graph": graph.replay}, rounds)["graph"]


def finish(seconds: float = 10.0) -> None:
    """Waits for the GPU, but not for ever.

    Raises:
        TimeoutError: what runs there has not ended in time. The process cannot use the GPU any more.
    """
    event = torch.cuda.Event()
    event.record()
    limit = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() > limit:
            raise TimeoutError(f"a kernel has not ended within {seconds:g} s")
        time.sleep(1e-3)


def _recorded(work: Callable[[], object]) -> Sequence[Kernel]:
    """What runs on the GPU because of `work`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in record.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
