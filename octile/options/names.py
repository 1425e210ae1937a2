"""The fields that a message or a description names, as the options that a user types."""

from __future__ import annotations

import re
from functools import cache
from itertools import accumulate

from octile.options.fields import options_of

SETTINGS_FILES = ("config.json", "comparison.json", "state.json")  # of runs, comparisons and their checkpoints
WORD_MARKS = frozenset("._")  # of a field's name that is no word of prose
FIELD = re.compile(r"(?<![\w./`-])[a-z][a-z0-9]*([_.][a-z0-9]+)+(?![\w`-])")  # such a name


@cache
def option_names(cls: type) -> dict[str, str]:
    """Return the fields of a dataclass and of its dataclasses, "optim.lr", and what a user types for them."""
    return {option.path: option.name for option in options_of(cls)}


def described_with_options(text: str, cls: type, group: str) -> str:
    """Write the fields that an option's description names as options. A word that could be prose, "out", stays.

    A field is one of the same group, or of the command, or the only one of its last name.

    Args:
        text: the description.
        cls: options of a command.
        group: field that holds the option that is described, such as "optim"; "" for the command itself.
    """
    options = option_names(cls)

    def option(match: re.Match[str]) -> str:
        name = match[0]
        near = [path for path in (f"{group}.{name}", name) if path in options]
        alike = [path for path in options if path.endswith(f".{name}")]
        found = near[:1] or (alike if len(alike) == 1 else [])
        return options[found[0]] if found else name

    return FIELD.sub(option, text)


def with_options(message: str, cls: type, where: str = "") -> tuple[str, dict[str, str]]:
    """Write the fields that a message names as options; return it, and the options by their fields.

    A word that could be prose, such as "out", is a field where the message begins with it. A message that speaks of a
    file of settings may name fields of that file, so only the first word is taken for a field of the command.

    Args:
        message: text of an exception.
        cls: options of a command.
        where: field that the message is about, such as "model", whose fields it may name without those above.
    """
    options = option_names(cls)
    if any(file in message for file in SETTINGS_FILES):
        first, blank, rest = message.partition(" ")
        return options.get(first, first) + blank + rest, {}
    above = accumulate(f"{part}." for part in where.split("."))
    paths = {path.removeprefix(prefix): path for prefix in above for path in options} | {path: path for path in options}
    any_name = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
    begins = re.compile(rf"(({any_name}) and )*({any_name})$")
    found: dict[str, str] = {}

    def option(match: re.Match[str]) -> str:
        name = match[0]
        if not set(name) & WORD_MARKS and not begins.match(message[: match.end()]):
            return name
        found[paths[name]] = options[paths[name]]
        return found[paths[name]]

    return re.sub(rf"(?<![\w./-])({any_name})(?![\w-]|\.\w)(?! of )", option, message), found
