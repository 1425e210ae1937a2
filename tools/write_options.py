"""Write docs/command_line.md, the options of all commands: `python -m tools.write_options`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

from octile.cli import COMMANDS
from octile.options import Command, CommandGroup, Given
from octile.options.fields import Option
from octile.options.help import about, listed

PAGE = Path(__file__).parents[1] / "docs" / "command_line.md"
HEAD = """\
# Command line

`octile COMMAND --help` shows what a user needs first, and `--help-all` all options of the command. This page has all
options of all commands, written by `python -m tools.write_options` from the dataclasses that the commands read.

- An option is `--name VALUE` or `--name=VALUE`; the last one counts. A value that begins with a dash needs the second
  form. `_` in a name is `-`, too.
- An option without a value is a flag, which `--no-name` unsets; `--group.no-name` within a group.
- `None` is a value of an option that has no default here.
- A message on bad input is one line on standard error.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure |
| 2 | bad input, with a line that says what is needed |
| 130 | ended by Ctrl-C |
| 141 | `octile train` or `octile compare` was ended because the reader of its output, such as `head`, has ended |
| 143 | ended by SIGTERM |
"""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(part for name, command in commands() for part in section(name, command))])


def commands() -> Iterator[tuple[str, Command]]:
    """Yield the commands with their names, those of groups, too."""
    for name, command in COMMANDS.items():
        if isinstance(command, CommandGroup):
            yield from ((f"{name} {each}", member) for each, member in command.commands.items())
        else:
            yield name, command


def section(name: str, command: Command) -> Iterator[str]:
    """Yield the lines about a command: what it does, and a table of options for each section of its help."""
    module = command.load()
    defaults = getattr(module, "defaults", lambda given: None)(Given(module.Options, name, {}))
    yield f"## octile {name}\n"
    yield from (f"{as_markdown(paragraph)}\n" for paragraph in about(module.Options))
    sections = [each for each in listed(module.Options, defaults, getattr(module, "SECTIONS", ())) if any(each[1:])]
    for title, first, more in sections:
        if len(sections) > 1:
            yield f"### {as_markdown(title)}\n"
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{option.usage}` | {meaning(option)} |" for option in (*first, *more))
        yield ""


def meaning(option: Option) -> str:
    """Return what an option is for, and its default."""
    default = "required" if option.default is MISSING else option.default_text and f"default: `{option.default_text}`"
    return " ".join(filter(None, [as_markdown(option.usage_help), f"({default})" if default else ""]))


def as_markdown(text: str) -> str:
    """Return a text in which no character is markup, but for code."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<|\[])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
