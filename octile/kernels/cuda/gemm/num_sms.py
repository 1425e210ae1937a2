"""How many of the GPU's multiprocessors the products may use.

Their kernels are persistent: one block a multiprocessor, which takes tile after tile. A communication kernel that runs
at the same time needs some multiprocessors for itself, so the products are told to start fewer blocks.
"""

from functools import cache

import torch

limit: int | None = None


def set_num_sms(count: int | None) -> None:
    """From now on products start on at most `count` multiprocessors, in the whole process; None: on all there are.

    Raises:
        TypeError, ValueError: count is no integer, or less than 1.
    """
    global limit
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"count must be an integer or None, not {count!r}")
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
    limit = count


def num_sms(device: torch.device | int | None = None) -> int:
    """The multiprocessors of a GPU that products may use: all of them, or as many as `set_num_sms` said."""
    there = multiprocessors(torch.cuda.current_device() if device is None else device)
    return there if limit is None else min(limit, there)


@cache  # every launch asks
def multiprocessors(device: torch.device | int) -> int:
    """Those of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
