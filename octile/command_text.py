"""Parts of commands, for messages that say what to type."""

import re
import shlex
from pathlib import Path

from octile.torchrun import processes_of_host

MAX_PROMPT = 80  # characters of a prompt that is shown as a part of a command
HUB_NAME = re.compile(r"(?!runs/)[a-z0-9][\w.-]{0,95}/[a-z0-9][\w.-]{0,95}", re.IGNORECASE | re.ASCII)


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


def option_with_value(option: str, value: str) -> str:
    """An option and its value, quoted for a shell's command: with = if the value begins with a dash."""
    return f"{option}{'=' if value.startswith('-') else ' '}{shlex.quote(value)}"


def generate_command(model: Path, prompt: str) -> str:
    """The command by which a model continues a prompt, for which it has TEXT if a line cannot show it whole."""
    text = prompt if len(prompt) <= MAX_PROMPT and prompt.isprintable() else "TEXT"
    return f"octile generate {quoted_path(model)} {option_with_value('--prompt', text)}"


def how_to_download(path: Path, *files: str) -> str:
    """The end of a message about a folder that does not exist, which may be a model's name on the Hugging Face Hub.

    What the command in it downloads lies at that path. A path is no such name, and the text empty, if it is not two
    words, if the folder around it is there, or if that is where octile puts its runs.

    Args:
        path: what a user has named.
        files: those that are needed; all if none is given.
    """
    name = path.as_posix()
    if not HUB_NAME.fullmatch(name) or path.parent.exists():
        return ""
    command = " ".join(["hf download", name, *files, "--local-dir", name])
    return f"; octile downloads no models: if this is one of the Hugging Face Hub, get it with {command}"
