"""A command, and a group of commands with a common first word.

A command is a module, which is imported when the command runs:

    Options     the dataclass of its options
    run         runs the command with an `Options`; `Command.arguments` follow it
    SECTIONS    what its options are for, and which are on the first page of its help (left out: all)
    defaults    the `Options` whose values are the defaults, from what is given (left out: those of the class)
    read        makes an `Options` of what is given (left out: from the defaults)
    RESUMABLE   the settings that may change when it resumes what is stored
    NO_OPTIONS  options of other programs, without their dashes, that it does not need, each with the reason
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

from octile.options.help import help_text, overview_text
from octile.options.parse import HELP, HELP_ALL, Given, parse
from octile.signals import importing


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        module: name of the module that implements it.
        summary: line in the list of the commands.
        check: called with its options before it runs.
        arguments: further arguments of its `run`, which come from a later room.
        runs_in: name of the module that has `run`, imported once the options are checked; `module` if not given.
    """

    module: str
    summary: str
    check: Callable[[Any], None] | None = None
    arguments: tuple[Any, ...] = ()
    runs_in: str | None = None

    def load(self) -> ModuleType:
        """Import the module."""
        return import_module(self.module)

    def run(self, name: str, words: Sequence[str]) -> None:
        """Run the command, or show its help.

        Args:
            name: the command's name, such as "lab formats".
            words: what follows it.

        Raises:
            OptionError, ValueError: an option is invalid. Messages of all exceptions name options instead of fields.
        """
        module = self.load()
        if HELP_ALL in words or HELP.intersection(words):
            return print(self.help(name, words), flush=True)
        resumable, no_options = getattr(module, "RESUMABLE", ()), getattr(module, "NO_OPTIONS", None)
        given = parse(module.Options, words, name, resumable, no_options)
        with given.naming_options():
            options = module.read(given) if hasattr(module, "read") else given.build(_defaults(module, given))
            if self.check:
                self.check(options)
            if self.runs_in is not None:
                with importing():
                    module = import_module(self.runs_in)
            module.run(options, *self.arguments)

    def help(self, name: str, words: Sequence[str]) -> str:
        """Return the help, with the defaults of the preset that is given. The other words may be wrong."""
        module = self.load()
        preset = last_value("--preset", words)
        given = Given(module.Options, name, {} if preset is None else {"preset": [preset]})
        try:
            default = _defaults(module, given)
        except ValueError:  # there is no such preset
            default = _defaults(module, Given(module.Options, name, {}))
        return help_text(name, module.Options, default, getattr(module, "SECTIONS", ()), HELP_ALL in words)


@dataclass(frozen=True)
class CommandGroup:
    """Commands with a common first word.

    Attributes:
        module: name of the module whose `COMMANDS` they are, imported when one of them runs.
        summary: line in the list of the commands.
    """

    module: str
    summary: str

    @property
    def commands(self) -> Mapping[str, Command]:
        """The commands by their names."""
        commands: Mapping[str, Command] = import_module(self.module).COMMANDS
        return commands

    def run(self, name: str, words: Sequence[str]) -> None:
        """Run one of the commands, or list them.

        Raises:
            ValueError: there is no such command, or as for `Command.run`.
        """
        first, *rest = words or ["--help"]
        if first in (*HELP, HELP_ALL):
            summaries = {each: command.summary for each, command in self.commands.items()}
            return print(overview_text(f"{name} ", "", summaries), flush=True)
        find(self.commands, first, f"{name} command").run(f"{name} {first}", rest)


def find(commands: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return a command.

    Raises:
        ValueError: there is none of that name; the message names the one that could be meant.
    """
    if name not in commands:
        meant = "".join(f"; perhaps you meant {close}" for close in get_close_matches(name, commands, n=1))
        raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(commands)}{meant}")
    return commands[name]


def last_value(option: str, words: Sequence[str]) -> str | None:
    """Return the last value of an option among words that may be wrong."""
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, assigned = word.partition("=")
        if name == option:
            value = assigned if equals else following
    return value


def _defaults(module: ModuleType, given: Given) -> Any:
    return module.defaults(given) if hasattr(module, "defaults") else None
