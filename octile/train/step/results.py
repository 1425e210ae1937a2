"""The results of training steps, which the device writes into pinned memory and the host collects later."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octile.parallel.gpu_events import wait_for


class StepResults:
    """A ring buffer of vectors on the host. On a CPU a vector is there at once.

    Args:
        slots: how many vectors it holds.
        width: numbers of a vector.
        device: the device that writes them.
        timeout: seconds after which `pop` waits no longer for a GPU.
    """

    def __init__(self, slots: int, width: int, device: torch.device, timeout: float = math.inf):
        on_gpu = device.type == "cuda"
        self._timeout = timeout
        self._host_NW = torch.zeros(slots, width, pin_memory=on_gpu)
        self._written = [torch.cuda.Event(blocking=True) for _ in range(slots)] if on_gpu else []
        self._first = self._count = 0

    def append(self, values_W: Tensor) -> None:
        """Copy float32 [width] from the device after all work of the current stream; the host does not wait.

        Raises:
            RuntimeError: all slots hold a vector that was not collected.
        """
        if self._count == len(self._host_NW):
            raise RuntimeError(f"{self._count} steps were launched and not collected: call collect()")
        slot = (self._first + self._count) % len(self._host_NW)
        self._host_NW[slot].copy_(values_W, non_blocking=True)
        if self._written:
            self._written[slot].record()
        self._count += 1

    def pop(self) -> list[float]:
        """Wait for the oldest vector, remove it and return it.

        Raises:
            IndexError: there is none.
            TimeoutError: the device did not write it in time, because it waits for the GPU of another rank.
        """
        if not self._count:
            raise IndexError("there is no result to read")
        slot = self._first
        if self._written:
            wait_for(self._written[slot], self._timeout)
        self._first, self._count = (slot + 1) % len(self._host_NW), self._count - 1
        return self._host_NW[slot].tolist()

    def clear(self) -> None:
        """Remove all vectors. The device writes later vectors after them."""
        self._first, self._count = (self._first + self._count) % len(self._host_NW), 0
