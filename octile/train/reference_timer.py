"""The same piece of work, timed now and then: was the machine as free during one run as during another?

The runs of a comparison come one after another. Where other programs take the machine during one of them, its tokens a
second tell of them and not of the recipe; this shows it.
"""

from __future__ import annotations

import statistics
import time

import torch

SIZE = 512


def yardstick(device: torch.device) -> float:
    """Seconds for one FP32 product of SIZE³ on the device, the median of five after one that is not counted."""
    a = torch.ones(SIZE, SIZE, device=device)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
