"""The number of SMs that GEMMs may use.

GEMM kernels are persistent: one thread block per SM takes tile after tile. A communication kernel that runs at the
same time needs some SMs for itself, so GEMMs can be limited to fewer blocks. They split K as on all SMs, so results
keep their bits.
"""

from collections.abc import Callable
from functools import cache

import torch

from octile.kernels.cuda.gemm.cost_model import Chip

limit: int | None = None  # as `set_num_sms` set it; None: all SMs
left_free = 0  # the largest number of `leave_free`
_counts: list[int] = []  # those of `leave_free` that have not ended


def set_num_sms(count: int | None) -> None:
    """Limit GEMMs to `count` SMs, in the whole process; None: no limit.

    Raises:
        TypeError, ValueError: count is not an integer, or less than 1.
    """
    global limit
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"count must be an integer or None, not {count!r}")
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
    limit = count


def leave_free(count: int) -> Callable[[], None]:
    """Have GEMMs leave `count` SMs free until the function that this returns is called, once; of several the most."""
    global left_free
    _counts.append(count)
    left_free = max(_counts)

    def end() -> None:
        global left_free
        _counts.remove(count)
        left_free = max(_counts, default=0)

    return end


def num_sms(device: torch.device | int | None = None) -> int:
    """Return how many SMs of a GPU GEMMs may use; None is the current GPU."""
    there = multiprocessors(torch.cuda.current_device() if device is None else device)
    allowed = max(there - left_free, 1)
    return allowed if limit is None else min(limit, allowed)


def chip(device: torch.device | int | None = None) -> Chip:
    """Return a GPU as the choice of a GEMM's kernel needs it; None is the current GPU."""
    device = torch.cuda.current_device() if device is None else device
    return Chip(num_sms(device), of_gpu=multiprocessors(device))


@cache  # every launch asks
def multiprocessors(device: torch.device | int) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
