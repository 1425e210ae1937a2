"""Comparable times of calls: interleaved candidates, medians, a cold L2 cache on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 512 * 2**20  # several times a GPU's L2


def seconds(candidates: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Measure the median time of each candidate in seconds.

    Candidates are interleaved, so that whatever slows down the machine affects all of them. Every other round has the
    reverse order, so that none follows the same one each time: where power limits the clock, it matters which.

    Args:
        candidates: name → the call.
        rounds: number of measurements of each.
        warm_up: number of calls of each before the first measurement.
    """
    for candidate in candidates.values():
        for _ in range(warm_up):
            candidate()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    clock = _gpu_seconds if torch.cuda.is_available() else _cpu_seconds
    for i in range(rounds):
        for name in list(candidates)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(clock(candidates[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _cpu_seconds(candidate: Callable[[], object]) -> float:
    start = time.perf_counter()
    candidate()
    return time.perf_counter() - start


def _gpu_seconds(candidate: Callable[[], object]) -> float:
    torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    candidate()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
