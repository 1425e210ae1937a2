"""Copies from host to device that do not block the host, also while a GPU computes an earlier step."""

from __future__ import annotations

import torch
from torch import Tensor


def send(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device; the host does not wait for a GPU."""
    if device.type != "cuda" or not t.numel():
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)
