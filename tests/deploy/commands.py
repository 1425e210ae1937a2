"""The commands of the files of deploy/."""

from collections.abc import Sequence
from pathlib import Path

from octile.cli import COMMANDS, Command
from octile.options.parse import parse
from octile.serve.http.command import Options

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def options_of(words: Sequence[str]) -> Options:
    """The options of `octile serve` that a command line gives, read as octile reads them."""
    program, name, *others = words
    assert (Path(program).name, name) == ("octile", "serve")
    command = COMMANDS[name]
    assert isinstance(command, Command)
    return parse(command.load().Options, others, name).build()
