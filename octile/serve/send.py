"""Copies between host and device that do not block the host, also while a GPU computes an earlier step.

A copy takes host and GPU some microseconds, however few bytes it has. So several small tensors are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, which kernels read at once
DTYPES = {np.dtype(str(t).removeprefix("torch.")): t for t in (torch.int64, torch.int32, torch.float64, torch.float32)}
NUMPY_DTYPES = {t: dtype for dtype, t in DTYPES.items()}


def send(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device; the host does not wait for a GPU."""
    if device.type != "cuda" or not t.numel():
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)


def send_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays from the host to a device, all in one copy; the host does not wait for a GPU.

    Args:
        arrays: arrays of int64, int32, float64 or float32, of any shapes.
        device: device of the tensors.
    """
    parts: list[tuple[int, int]] = []
    end = 0
    for array in arrays:
        parts.append((end, end + array.nbytes))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, (first, last) in zip(arrays, parts, strict=True):
        host[first:last].view(array.dtype)[:] = array.reshape(-1)
    packed, sent = packed.to(device, non_blocking=True), list[Tensor]()
    typed = {dtype: packed.view(DTYPES[dtype]) for dtype in {array.dtype for array in arrays}}
    for array, (first, last) in zip(arrays, parts, strict=True):
        t = typed[array.dtype][first // array.itemsize : last // array.itemsize]
        sent.append(t if array.ndim == 1 else t.view(array.shape))
    return sent


class HostCopy:
    """Copies of tensors to the host, which a GPU may not have computed yet, all in one copy.

    Args:
        tensors: at least one, of one device, contiguous, of int64, int32, float64 or float32, with any shapes of at
            least one dimension.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._kinds = [(t.nbytes, NUMPY_DTYPES[t.dtype], t.shape) for t in tensors]
        parts = [(t if t.dim() == 1 else t.reshape(-1)).view(torch.uint8) for t in tensors]
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=packed.is_cuda)
        self._host.copy_(packed, non_blocking=True)
        self._ready: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> list[np.ndarray]:
        """Wait for the copy, and return what the tensors have."""
        if self._ready is not None:
            self._ready.synchronize()
        host, first = self._host.numpy(), 0
        found: list[np.ndarray] = []
        for size, dtype, shape in self._kinds:
            found.append(host[first : first + size].view(dtype).reshape(shape))
            first += size
        return found
