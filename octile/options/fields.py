"""A dataclass as a list of options.

A field is the option of its name, a field of a dataclass within it the option of both names: `optim.final_lr` is
`--optim.final-lr`. An annotation says what the option takes, as for `octile.validation`, and the entry in the class's
`Attributes` is its help. Markers in the annotation change how a field is given:

    run: Positional[Path | None] = None                  RUN, without a name
    seeds: tuple[int, ...] = ()                          --seeds, which may be given several times
    shape: Annotated[Path | None, Named("--model")]      --model
    text: Hidden[str | None] = None                      not at all
    end: Annotated[int, Refused("is …")] = 1             not at all, and whoever tries reads why
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from octile.validation import annotations_of

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """Marker of a field whose option has a name of its own.

    Attributes:
        name: the option, such as "--model".
        metavar: what its value is called in the help; that of the annotation if not given.
    """

    name: str
    metavar: str | None = None


@dataclass(frozen=True)
class Refused:
    """Marker of a field that its name promises as an option, but that no command can set.

    Attributes:
        why: what a message says after the option's name.
    """

    why: str


_POSITIONAL, _HIDDEN = object(), object()
Positional = Annotated[T, _POSITIONAL]
Hidden = Annotated[T, _HIDDEN]

ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")  # of a docstring's Attributes
METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: ""}


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        path: the field, with those that hold it: "optim.final_lr".
        name: what a user types: "--optim.final-lr", or the name of a positional argument, "RUN".
        annotation: what its value may be.
        metavar: what its value is called in the help.
        help: what it is for; of a flag what it does if it is set, as an imperative sentence.
        default: its value if it is not given; MISSING if it must be.
    """

    path: str
    name: str
    annotation: Any
    metavar: str
    help: str
    default: Any

    @property
    def group(self) -> str:
        """The field that holds this one: "optim", or "" for a field of the command itself."""
        return self.path.rpartition(".")[0]

    @property
    def is_positional(self) -> bool:
        """Whether it is given by its position, without a name."""
        return not self.name.startswith("-")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value: --name sets it, and --no-name unsets it."""
        return without_marks(self.annotation) is bool

    @property
    def is_repeated(self) -> bool:
        """Whether it may be given several times, with one value each."""
        return get_origin(without_marks(self.annotation)) is tuple and self.count is None

    @property
    def count(self) -> int | None:
        """How many words are its value; None: as many as there are."""
        annotation = without_marks(self.annotation)
        tuples = [member for member in members(annotation) if get_origin(member) is tuple]
        items = get_args(tuples[0]) if tuples else (annotation,)
        return None if items[-1] is Ellipsis else len(items)

    @property
    def negation(self) -> str:
        """What unsets a flag: "--parallel.no-overlap" for "--parallel.overlap"."""
        group, dot, last = self.name.removeprefix("--").rpartition(".")
        return f"--{group}{dot}no-{last}"

    @property
    def usage(self) -> str:
        """The option and its value, as its help begins: the flag that changes the default."""
        if self.is_positional:
            shown = f"{self.name}..." if self.count is None else self.name
            return shown if self.default is MISSING else f"[{shown}]"
        if self.is_flag:
            return self.negation if self.default is True else self.name
        return f"{self.name} {self.metavar}"

    @property
    def usage_help(self) -> str:
        """What giving it as in `usage` is for: "do not …" where that unsets a flag."""
        is_unset = self.is_flag and self.default is True
        return f"do not {self.help}" if is_unset and self.help else self.help

    @property
    def default_text(self) -> str:
        """The default as it would be typed; "" where it is None, a flag's, or nothing."""
        if self.default is MISSING or self.default is None or isinstance(self.default, bool):
            return ""
        items = self.default if isinstance(self.default, tuple) else (self.default,)
        return " ".join(shlex.quote(str(item)) for item in items)


def options_of(cls: type, default: Any = None, prefix: str = "") -> list[Option]:
    """Return the options that a dataclass stands for, in the order of its fields, with those of its dataclasses.

    Args:
        cls: the dataclass.
        default: an instance, whose values are the defaults instead of those of the class.
        prefix: what precedes the names of the fields, such as "optim.".
    """
    found, texts = list[Option](), attribute_texts(cls)
    for name, annotation in annotations_of(cls).items():
        marks, path, value = marks_of(annotation), prefix + name, default_of(cls, name, default)
        if _HIDDEN in marks or any(isinstance(mark, Refused) for mark in marks):
            continue
        if (inner := dataclass_of(annotation)) is not None:
            found += options_of(inner, None if value is MISSING else value, f"{path}.")
            continue
        if get_origin(without_marks(annotation)) is dict:  # nothing that a word can say
            continue
        named = next((mark for mark in marks if isinstance(mark, Named)), None)
        option = name.upper() if _POSITIONAL in marks else named.name if named else f"--{path.replace('_', '-')}"
        metavar = (named and named.metavar) or metavar_of(annotation)
        found.append(Option(path, option, annotation, metavar, texts.get(name, ""), value))
    return found


def refused_options(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the options that a dataclass and its dataclasses refuse, and why."""
    found = dict[str, str]()
    for name, annotation in annotations_of(cls).items():
        for mark in marks_of(annotation):
            if isinstance(mark, Refused):
                found[f"--{prefix}{name}".replace("_", "-")] = mark.why
        if (inner := dataclass_of(annotation)) is not None:
            found |= refused_options(inner, f"{prefix}{name}.")
    return found


def dataclass_of(annotation: Any) -> type | None:
    """Return the dataclass that a field holds, which may be left out; None if it holds none."""
    kinds = members(without_marks(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def default_of(cls: type, name: str, default: Any = None) -> Any:
    """Return the default of a field: its value in an instance, if there is one, or that of the class, or MISSING."""
    if default is not None:
        return getattr(default, name)
    field = next(field for field in fields(cls) if field.name == name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def marks_of(annotation: Any) -> tuple[Any, ...]:
    """Return what follows the type in `Annotated`."""
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


def without_marks(annotation: Any) -> Any:
    """Return the type in `Annotated`."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, without their marks; one for any other type."""
    plain = without_marks(annotation)
    return tuple(map(without_marks, get_args(plain))) if get_origin(plain) in (Union, UnionType) else (plain,)


def metavar_of(annotation: Any) -> str:
    """Return what a value is called in the help: INT, {auto,cpu,cuda}, FLOAT FLOAT."""
    kinds = [kind for kind in members(annotation) if kind is not type(None)]
    if get_origin(kinds[-1]) is tuple:
        items = [item for item in get_args(kinds[-1]) if item is not Ellipsis]
        return " ".join(map(metavar_of, items)) + (
            f" [{metavar_of(items[0])} ...]" if len(members(annotation)) > 1 else ""
        )
    if get_origin(kinds[0]) is Literal:
        return f"{{{','.join(map(str, get_args(kinds[0])))}}}"
    return METAVARS[kinds[0]]


@cache
def attribute_texts(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say about each field, in their `Attributes`."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if is_dataclass(each):
            texts |= {name: text for names, text in _entries(each) for name in names}
    return texts


def _entries(cls: type) -> Iterator[tuple[list[str], str]]:
    """The entries of the Attributes of a class: the names, and the text in one line."""
    lines = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2].splitlines()
    entries: list[list[str]] = []
    for line in lines:
        if line and not line.startswith(" "):  # the next section
            break
        if not line.startswith(" " * 5) and line.strip():
            entries.append([])
        if entries:
            entries[-1].append(line.strip())
    for words in entries:
        if entry := ENTRY.fullmatch(" ".join(words).strip()):
            yield entry[1].split(", "), entry[2]
