"""Times of GPU kernels, as the profiler (CUPTI) records them on the device, and of the host's part of a call.

    work_seconds     kernel_seconds on a GPU, wall-clock time on a CPU
    kernel_seconds   the kernels that a call launches, without the gaps before and between them
    host_seconds     the host, until a warm call returns
    graph_seconds    a replay of the call captured in a CUDA graph

Before each measured call, one kernel flushes the L2 cache. In the profiler's record this kernel marks the beginning of
the next call. It writes, as in DeepGEMM's benchmark, so what a call reads first has to drive out lines that are written
back: some µs for GEMMs of few rows. After a flush by reading the cache is clean, as between the layers of a model.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from octile.bench.timing import FLUSH_BYTES, seconds
from octile.train.step.kernel_records import KernelRecord, kernels_of

CALLS, REPEATS = 100, 10  # of `host_seconds`
READ_COLUMNS = 8192  # of the matrix whose rows' maxima are taken to flush the L2 cache by reading
Calls = Mapping[str, Callable[[], object]]


def kernel_seconds(calls: Calls, rounds: int = 20, clean: bool = False) -> dict[str, float]:
    """Measure the median kernel time of each call. Calls are interleaved, so that heat and clocks affect all of them.

    Args:
        calls: by name.
        rounds: number of measurements of each.
        clean: the L2 cache is flushed by reading; otherwise by writing.

    Raises:
        RuntimeError: the profiler did not record every kernel; on some machines it has no access to the device.
    """
    memory = torch.zeros(FLUSH_BYTES // 4 // READ_COLUMNS, READ_COLUMNS, dtype=torch.int32, device="cuda")
    flush = partial(torch.amax, memory, 1, out=memory.new_empty(len(memory))) if clean else memory.bitwise_not_
    for _ in range(2):
        for call in calls.values():
            call()
    marker = {kernel.name for kernel in record_kernels(lambda: [flush() for _ in range(3)])}
    if len(marker) != 1:
        raise RuntimeError(f"the profiler recorded {len(marker)} kernels instead of one")

    def interleaved() -> None:
        for _ in range(rounds):
            for call in calls.values():
                flush()
                call()

    times = seconds_between(record_kernels(interleaved), marker.pop(), rounds * len(calls))
    return {name: statistics.median(times[i :: len(calls)]) for i, name in enumerate(calls)}


def seconds_between(kernels: Iterable[KernelRecord], marker: str, count: int) -> list[float]:
    """Sum the kernel times after each marker, up to the next one, in seconds.

    Raises:
        RuntimeError: there are not `count` markers, or no kernel between two of them.
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
    """Measure kernel times on a GPU, and wall-clock times on a CPU.

    Where the profiler has no access to the GPU, times between CUDA events are measured, and a warning says so.
    """
    if not torch.cuda.is_available():
        return seconds(calls, rounds)
    try:
        return kernel_seconds(calls, rounds)
    except RuntimeError as error:
        warnings.warn(f"times are between CUDA events, some µs longer than the kernels: {error}", stacklevel=2)
        return seconds(calls, rounds)


def host_seconds(call: Callable[[], object]) -> float:
    """Measure the host's time for a call: the minimum over REPEATS of the mean over CALLS calls.

    There are so few calls that the launch queue is never full. The minimum is taken since other load only adds time:
    where a call took up to twice as long for some milliseconds, a loop in Python did, too (benchmarks/LOG.md).
    """
    call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
        torch.cuda.synchronize()
    return min(times)


def graph_seconds(call: Callable[[], object]) -> float:
    """Measure the median time of a graph replay between two events: the kernels, their gaps, and the graph's start."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds({"graph": graph.replay}, 20)["graph"]


def wait_for_gpu(seconds: float = 10.0) -> None:
    """Wait for the GPU, for a limited time.

    Raises:
        TimeoutError: its kernels have not ended in time. The process can no longer use the GPU.
    """
    event = torch.cuda.Event()
    event.record()
    limit = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() > limit:
            raise TimeoutError(f"a kernel has not ended within {seconds:g} s")
        time.sleep(1e-3)


def record_kernels(work: Callable[[], object]) -> Sequence[KernelRecord]:
    """Return the kernels, copies and memsets that `work` runs on the GPU."""
    with recorded_kernels() as kernels:
        work()
    return kernels


@contextmanager
def recorded_kernels() -> Iterator[list[KernelRecord]]:
    """Record the kernels, copies and memsets that run on the GPU; the list is filled when the context ends."""
    from torch.profiler import ProfilerActivity, profile

    kernels: list[KernelRecord] = []
    torch.cuda.synchronize()
    # with acc_events torch does not warn that it clears events of a cycle before, of which there is none
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        yield kernels
        torch.cuda.synchronize()
    kernels += kernels_of(record)
