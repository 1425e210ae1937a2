"""The help of a command: its options by what they are for, those that a user needs first on the first page."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any, NamedTuple

from octile.options.fields import Option, attribute_texts, dataclass_of, options_of
from octile.options.names import described_with_options
from octile.validation import annotations_of

INDENT, NARROW_INDENT = 28, 8  # of descriptions
NBSP = "\xa0"  # a blank at which no line ends
NARROW = 70  # columns; in a narrower terminal a description has lines of its own


@dataclass(frozen=True)
class Section:
    """Options of a command that are for one thing.

    Attributes:
        title: what they are for.
        first: fields on the first page of the help.
        more: fields that only --help-all shows; a field that holds others stands for those that no section names.
    """

    title: str
    first: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


class Listed(NamedTuple):
    """A title of the help, and the options below it: those of the first page, and the others."""

    title: str
    first: list[Option]
    more: list[Option]


def listed(cls: type, default: Any = None, sections: Sequence[Section] = ()) -> list[Listed]:
    """Return the options of a command by sections; without sections all, by the fields that hold them.

    Their descriptions name options where those of the dataclasses name fields.

    Raises:
        KeyError: a section names no field.
    """
    options = [
        replace(option, help=described_with_options(option.help, cls, option.group))
        for option in options_of(cls, default)
    ]
    by_path = {option.path: option for option in options}
    if not sections:
        groups = dict.fromkeys(option.group for option in options)
        return [Listed(_title(cls, group), [o for o in options if o.group == group], []) for group in groups]
    named = {path for section in sections for path in (*section.first, *section.more)}

    def more_of(name: str) -> list[Option]:
        held = [option for option in options if option.group == name and option.path not in named]
        return held or [by_path[name]]

    found = [Listed(s.title, [by_path[p] for p in s.first], [o for p in s.more for o in more_of(p)]) for s in sections]
    placed = {option.path for each in found for option in (*each.first, *each.more)}
    others = [option for option in options if option.path not in placed]
    return [*found, Listed("other options", [], others)] if others else found


def help_text(
    command: str, cls: type, default: Any = None, sections: Sequence[Section] = (), full: bool = False
) -> str:
    """Return the help of a command, for the width of the terminal.

    Args:
        command: its name, such as "lab formats".
        cls: the dataclass of its options.
        default: an instance with the defaults; those of the class if None.
        sections: what the options are for.
        full: whether all options are shown, not only those of the first page.
    """
    all_of = listed(cls, default, sections)
    shown = [(each.title, each.first + each.more if full else each.first) for each in all_of]
    arguments = [option.usage for _, options in shown for option in options if option.is_positional]
    lines = _usage(" ".join([command, "[-h]", *arguments, "[OPTIONS]"]))
    for paragraph in about(cls):
        lines += ["", *_wrapped(paragraph)]
    for title, options in shown:
        if options:
            lines += ["", *map(_styled, _wrapped(title))]
            lines += [line for option in options for line in _described(option.usage, _description(option))]
    n_all, n_first = len(options_of(cls)), sum(len(each.first) for each in all_of)
    has_more = n_first < n_all
    this = "show the first page of this help." if has_more else "show this help."
    lines += ["", *map(_styled, _wrapped("help")), *_described("-h, --help", this)]
    if has_more:
        lines += _described("--help-all", f"show all {n_all} options; the first page has {n_first}.")
    return "\n".join(lines)


def overview_text(command: str, title: str, summaries: Mapping[str, str]) -> str:
    """Return the list of the commands after a word, for the width of the terminal.

    Args:
        command: the words before the command, such as "lab ", or "".
        title: what stands above; "" for nothing.
        summaries: the commands, and what each does.
    """
    head = [*_wrapped(title), ""] if title else []
    indent = max(map(len, summaries)) + 4
    lines = [line for name, text in summaries.items() for line in _described(name, text, indent)]
    return "\n".join([*head, *_usage(f"{command}COMMAND [--help] …"), "", *lines])


def about(cls: type) -> list[str]:
    """Return the paragraphs of a docstring before its sections."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[0].partition("\nRaises:\n")[0]
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]


def _description(option: Option) -> str:
    """What an option is for, and its default."""
    default = (
        "(required)" if option.default is MISSING else option.default_text and f"(default:{NBSP}{option.default_text})"
    )
    return f"{option.usage_help} {default}".strip()


def _title(cls: type, group: str) -> str:
    """The title of the options that a field holds: what the docstring of its class says of it."""
    if not group:
        return "options"
    *above, name = group.split(".")
    for each in above:
        cls = dataclass_of(annotations_of(cls)[each]) or cls
    held = dataclass_of(annotations_of(cls)[name])
    text = attribute_texts(cls).get(name) or (about(held)[0] if held else "")
    return f"{group}: {text.rstrip('.')}"


def _usage(words: str) -> list[str]:
    return _wrapped(f"usage: octile {words}", " " * len("usage: "))


def _described(name: str, text: str, indent: int = INDENT) -> list[str]:
    """A name and its description; they share a line where the name is short."""
    indent = indent if _width() >= NARROW else NARROW_INDENT
    lines = _wrapped(text, " " * indent, " " * indent) or [""]
    if len(name) + 4 > indent:
        return [*map(_styled, _wrapped(name, "    ", "  ")), *filter(None, lines)]
    return [f"  {_styled(name)}{' ' * (indent - len(name) - 2)}{lines[0].lstrip()}".rstrip(), *lines[1:]]


def _wrapped(text: str, indent: str = "", first_indent: str = "") -> list[str]:
    lines = textwrap.wrap(text, _width(), initial_indent=first_indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(NBSP, " ") for line in lines]


def _width() -> int:
    return shutil.get_terminal_size().columns


def _styled(text: str) -> str:
    """A text in bold on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
