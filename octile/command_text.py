"""Parts of commands, for messages that say what to type."""

import shlex
from pathlib import Path


def train_command(n_ranks: int) -> str:
    """What starts a run on so many processes, before its options."""
    return "octile train" if n_ranks == 1 else f"torchrun --nproc-per-node {n_ranks} -m octile train"


def path_argument(path: Path) -> str:
    """A path as an argument of a command: with ./ if it begins with a dash, which would make it an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def quoted_path(path: Path) -> str:
    """A path, quoted for a shell's command."""
    return shlex.quote(path_argument(path))
