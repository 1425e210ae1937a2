"""Parts of commands, for messages that say what to type."""

import shlex
from pathlib import Path

from octile.torchrun import processes_of_host


def train_command(n_ranks: int) -> str:
    """What starts a run on so many processes, before its options: as many on a host as torchrun has here."""
    if n_ranks == 1:
        return "octile train"
    here = processes_of_host()
    if here is None or n_ranks == here or n_ranks % here:
        return f"torchrun --nproc-per-node {n_ranks} -m octile train"
    return f"torchrun --nnodes {n_ranks // here} --nproc-per-node {here} … -m octile train"


def path_argument(path: Path) -> str:
    """A path as an argument of a command: with ./ if it begins with a dash, which would make it an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def quoted_path(path: Path) -> str:
    """A path, quoted for a shell's command."""
    return shlex.quote(path_argument(path))
