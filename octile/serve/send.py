"""Copies between host and device that do not block the host, also while a GPU computes an earlier step.

A copy takes host and GPU some microseconds, however few bytes it has. So several small tensors are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device; the host does not wait for a GPU."""
    if device.type != "cuda" or not t.numel():
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors to the host, which a GPU may not have computed yet, all in one copy.

    Args:
        tensors: at least one, of one device, with any shapes of at least one dimension.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # the largest elements first, so that the address of each tensor is a multiple of its elements' size
        self._order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        self._kinds = [(t.numel() * t.element_size(), t.dtype, t.shape) for t in (tensors[i] for i in self._order)]
        parts = [tensors[i].reshape(-1).view(torch.uint8) for i in self._order]
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        self._host = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
        self._host.copy_(packed, non_blocking=True)
        self._ready: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> list[Tensor]:
        """Wait for the copy, and return the tensors in the host's memory."""
        if self._ready is not None:
            self._ready.synchronize()
        found = dict[int, Tensor]()
        parts = self._host.split([size for size, *_ in self._kinds])
        for i, part, (_, dtype, shape) in zip(self._order, parts, self._kinds, strict=True):
            found[i] = part.view(dtype).view(shape)
        return [found[i] for i in range(len(found))]
