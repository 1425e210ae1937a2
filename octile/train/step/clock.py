"""The time of training steps on the device that runs them, also of steps that the host collects later.

The host launches steps ahead of a GPU, and at other times waits for its data while the GPU has finished. Its own clock
then says when it looked, not how long a step took. So the device notes when each step begins, and a step lasts until
the next one begins: the times of all steps add up to that of the loop.
"""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from octile.parallel.gpu_events import wait_for


class StepClock:
    """Marks in the order of the steps: on a GPU events of the current stream, on a CPU the time.

    Args:
        device: the device that runs the steps.
        timeout: seconds after which `lap` waits no longer for a GPU.
    """

    def __init__(self, device: torch.device, timeout: float = math.inf):
        self._on_gpu, self._timeout = device.type == "cuda", timeout
        self._marks: deque[torch.cuda.Event | float] = deque()
        self._begins_again = False  # whether the next step has its mark already

    def mark(self) -> None:
        """Mark the begin of a step, or the end of the last one. The host does not wait."""
        if self._begins_again:
            self._begins_again = False
            return
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        self._marks.append(event)

    def lap(self) -> float:
        """Return the seconds from the oldest mark to the next one, and remove the oldest. The host waits for the next.

        Raises:
            TimeoutError: the device did not come to the next mark in time.
        """
        begin, end = self._marks[0], self._marks[1]
        if isinstance(begin, float) or isinstance(end, float):
            seconds = float(end) - float(begin)  # type: ignore[arg-type]  # all marks are of one kind
        else:
            wait_for(end, self._timeout)
            seconds = begin.elapsed_time(end) / 1e3
        self._marks.popleft()
        return seconds

    def rewind(self) -> None:
        """Keep the oldest mark alone, as that of the next step: the steps since then are discarded."""
        self._marks = deque([self._marks[0]])
        self._begins_again = True

    def reset(self) -> None:
        """Remove all marks, except one that `rewind` has left: time passed that is no step's."""
        if not self._begins_again:
            self._marks.clear()
