"""The number of SMs that GEMMs may use.

GEMM kernels are persistent: one thread block per SM takes tile after tile. A communication kernel that runs at the
same time needs some SMs for itself, so GEMMs can be limited to fewer blocks. They split K as on all SMs, so results
keep their bits.
"""

from functools import cache

import torch

from octile.kernels.cuda.gemm.cost_model import Chip

limit: int | None = None  # as `set_num_sms` set it; None: all SMs


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


def num_sms(device: torch.device | int | None = None) -> int:
    """Return how many SMs of a GPU GEMMs may use; None is the current GPU."""
    there = multiprocessors(torch.cuda.current_device() if device is None else device)
    return there if limit is None else min(limit, there)


def chip(device: torch.device | int | None = None) -> Chip:
    """Return a GPU as the choice of a GEMM's kernel needs it; None is the current GPU."""
    device = torch.cuda.current_device() if device is None else device
    return Chip(num_sms(device), of_gpu=multiprocessors(device))


@cache  # every launch asks
def multiprocessors(device: torch.device | int) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
