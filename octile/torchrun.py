"""The environment variables that torchrun sets for each process that it starts; importing this loads no torch."""

import os


def count_ranks() -> int:
    """The number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def own_rank() -> int:
    """The rank of this process, 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)
