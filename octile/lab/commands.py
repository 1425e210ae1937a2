"""Groups of commands with a common first word, and the group `octile lab …`.

A command is a module with a dataclass `Options` and a function `run(options)`, imported when the command runs. To add a
command of the lab, write such a module in `octile.lab.pages` and add one entry to `COMMANDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from octile.checkpoint.files import check_output_file
from octile.validation import Seed, check

Parse = Callable[..., Any]  # (options class, arguments, command) → options; passed by `octile.cli`
Naming = Callable[..., AbstractContextManager[None]]  # (options class, arguments): errors inside name options


@dataclass(frozen=True)
class Command:
    """A command of a group: the module in the group's package that implements it, and its line in the help."""

    module: str
    summary: str


@dataclass(frozen=True)
class CommandGroup:
    """Commands with a common first word, such as those of `octile lab`."""

    name: str
    package: str
    commands: Mapping[str, Command]

    def overview(self) -> str:
        """The list of the commands."""
        lines = [f"  {name:12}{command.summary}" for name, command in self.commands.items()]
        return f"usage: octile {self.name} COMMAND [--help] …\n\n" + "\n".join(lines)

    def run(self, name: str, arguments: list[str], parse: Parse, naming: Naming) -> None:
        """Run one of the commands.

        Raises:
            ValueError: the command is unknown, or its options are invalid.
        """
        if name not in self.commands:
            raise ValueError(f"unknown {self.name} command {name!r}; there are {', '.join(self.commands)}")
        module = import_module(f"{self.package}.{self.commands[name].module}")
        with naming(module.Options, arguments):
            options = parse(module.Options, arguments, f"{self.name} {name}")
            _check(options)
            module.run(options)


COMMANDS = {
    "formats": Command("formats", "Show values, gaps and ranges of every number format, and their effect on training."),
    "accumulate": Command("accumulate", "Measure the error of long FP8 sums, by length, data and promotion interval."),
    "capture": Command("capture", "Write the operands of a step's GEMMs to a file, for what-if and hardware."),
    "what-if": Command("what_if", "Compute a captured step's GEMMs in every format, block, scale and accumulator."),
    "hardware": Command("hardware", "Estimate what other hardware would bring to a captured step."),
    "preflight": Command("preflight", "Predict which layers lose too much in 8 bits, and write a recipe for them."),
}


LAB = CommandGroup("lab", "octile.lab.pages", COMMANDS)
ENDINGS = (".html", ".toml")  # of pages and recipes, which have no other; `octile.plan` checks its pictures itself


def _check(options: Any) -> None:
    """Check the options that commands share, before any work.

    Raises:
        ValueError: the seed is out of range, or an output file is a device, has another ending, or is another
            option's file, too.
        IsADirectoryError, NotADirectoryError, PermissionError: an output file cannot be written.
    """
    check("seed", getattr(options, "seed", 0), Seed)
    prints_json = getattr(options, "json", False)  # instead of a page
    for name in ("write",) if prints_json else ("out", "write", "trace"):
        path = getattr(options, name, None)
        if path is None:
            continue
        default = type(options).__dataclass_fields__[name].default
        is_fixed = isinstance(default, Path) and default.suffix in ENDINGS
        check_output_file(name, path, *([default.suffix] if is_fixed else ()))
        for other, value in vars(options).items():
            files = value if isinstance(value, tuple) else (value,)
            if other != name and any(isinstance(f, str | Path) and Path(f).resolve() == path.resolve() for f in files):
                raise ValueError(f"{name} {str(path)!r} and {other} are the same file: name another one")
