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


def check_rendezvous() -> None:
    """Refuse several processes that cannot find one another, such as those that another launcher has started.

    Raises:
        ValueError: a variable that torchrun sets is missing.
    """
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if count_ranks() > 1 and (missing := [name for name in names if not os.environ.get(name)]):
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"WORLD_SIZE is {count_ranks()}, but {' and '.join(missing)} {verb} not set: start the ranks with "
            "torchrun, or set for each what torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
