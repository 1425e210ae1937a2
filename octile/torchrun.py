"""The environment variables that torchrun sets for each process that it starts; importing this loads no torch."""

import os


def count_ranks() -> int:
    """The number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def own_rank() -> int:
    """The rank of this process, 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)


def processes_of_host() -> int | None:
    """The number of processes that torchrun started on this host, None without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or None


def check_one_process(command: str) -> None:
    """Refuse several processes for a command that would write the same files in each.

    Raises:
        ValueError: torchrun has started several.
    """
    if count_ranks() > 1:
        raise ValueError(
            f"{command} runs in one process, but torchrun has started {count_ranks()} (WORLD_SIZE): start it with "
            "--nproc-per-node 1, or without torchrun"
        )
