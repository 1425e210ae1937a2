"""Validation of what comes from outside: JSON files, and the fields of configurations.

The annotation of a field says which values it accepts, and stands once, in the configuration's class:

    num_hidden_layers: Annotated[int, Range(at_least=1, at_most=1000)] = 61
    rope_theta: Annotated[float, Range(above=1.0, at_most=1e18)] = 10000.0

`check_fields`, called by the class's `__post_init__`, compares every field with its annotation, so that a command line
option, a Hugging Face `config.json` and a run's `config.json` meet the same check. `from_json` makes a configuration
from the value of a JSON file. `with_checksum` and `take_checksum` tell whether a file that octile wrote was edited.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

CHECKSUM = "sha256"  # the key of a JSON object that holds the checksum of the others
MAX_DEPTH = 64  # of nested lists and objects in a JSON file
MAX_SEED = 2**63 - 1  # what a checkpoint and torch can hold
MAX_QUOTED = 60  # characters of a wrong value in a message

WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "an object",
    Path: "a path",
    type(None): "null",
}


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


C = TypeVar("C", bound=Dataclass)


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts. Every field of type float must be finite, too."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def why_not(self, number: float) -> str | None:
        """Say which bound a number violates; None if it is in the range."""
        if number < self.at_least:
            return f"at least {self.at_least:,}"
        if number <= self.above:
            return f"above {self.above:,}"
        if number > self.at_most:
            return f"at most {self.at_most:,}"
        if number >= self.below:
            return f"below {self.below:,}"
        return None


Seed = Annotated[int, Range(at_least=0, at_most=MAX_SEED)]


def check_fields(config: Dataclass, prefix: str = "") -> None:
    """Compare every field of a dataclass with its annotation.

    Args:
        config: the dataclass. Annotations may be bool, int, float, str, Path, dict, another dataclass, `Literal`,
            tuples and unions of these, and `Annotated[…, Range(…)]`.
        prefix: what precedes a field's name in messages, such as "optim.".

    Raises:
        TypeError: a field has another type than its annotation. A bool is not a number.
        ValueError: a number is outside its range, or a word is not one of the known ones.
    """
    for name, annotation in annotations_of(type(config)).items():
        check(prefix + name, getattr(config, name), annotation)


def check(name: str, value: object, annotation: Any) -> None:
    """Compare one value with an annotation.

    Raises:
        TypeError, ValueError: as for `check_fields`; the message begins with `name`.
    """
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        check(name, value, inner)
        for limit in metadata:
            if isinstance(limit, Range) and (needed := limit.why_not(value)):  # type: ignore[arg-type]
                raise ValueError(f"{name} must be {needed}, not {quoted(value)}")
        return
    members = _members(annotation)
    if len(members) > 1:
        member = next((m for m in members if _has_type(value, m)), None)
        if member is None:
            raise TypeError(f"{name} must be {_needed(annotation)}, not {quoted(value)}")
        check(name, value, member)
    elif get_origin(annotation) is Literal:
        if not any(value == word and type(value) is type(word) for word in get_args(annotation)):
            error = ValueError if _has_type(value, annotation) else TypeError
            raise error(f"{name} must be {_needed(annotation)}, not {quoted(value)}")
    elif not _has_type(value, annotation):
        raise TypeError(f"{name} must be {_needed(annotation)}, not {quoted(value)}")
    elif get_origin(annotation) is tuple:
        for item, inner in zip(value, _item_annotations(annotation, len(value)), strict=True):  # type: ignore
            check(name, item, inner)
    elif isinstance(value, dict) and _depth(value) > MAX_DEPTH:
        raise ValueError(f"{name} must be nested at most {MAX_DEPTH} levels deep")
    elif annotation is float and not _is_finite(value):
        raise ValueError(f"{name} must be finite, not {quoted(value)}")


def from_json(cls: type[C], value: object, name: str = "") -> C:
    """Make a dataclass from the value of a JSON file: objects become dataclasses, lists tuples, texts paths.

    Args:
        cls: the dataclass. Fields that are not in the object have their default.
        value: what `json.loads` returned.
        name: the field that holds the value, for messages; "" for the whole file.

    Raises:
        ValueError: it is not an object, has an unknown field, lacks one without a default, or a field is not what its
            annotation says.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{name or 'the file'} must be an object, not {quoted(value)}")
    prefix = f"{name}." if name else ""
    known = annotations_of(cls)
    if unknown := [key for key in value if key not in known]:
        raise ValueError(f"{prefix}{unknown[0]} is unknown: there are {', '.join(known)}")
    for field in fields(cls):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in value:
            raise ValueError(f"{prefix}{field.name} is missing")
    try:
        converted = {key: _converted(content, known[key], prefix + key) for key, content in value.items()}
        if name:  # the class does not know which field holds it
            for key, content in converted.items():
                check(prefix + key, content, known[key])
        return cls(**converted)
    except TypeError as error:  # of `check_fields`
        raise ValueError(str(error)) from None


def check_given(
    cls: type[Dataclass], values: Mapping[str, Any], prefix: str = "", aliases: Mapping[str, str] | None = None
) -> None:
    """Compare the values of a JSON object with the fields of a dataclass, where fields may be missing.

    Args:
        cls: the dataclass.
        values: the object. Keys that are no field are not checked, and null counts as missing.
        prefix: what precedes a key in messages, such as "optim.".
        aliases: other names of fields that the object may have as keys → the names of the fields.

    Raises:
        ValueError: a value is not what the annotation of its field says.
    """
    known = annotations_of(cls)
    for key, value in values.items():
        annotation = known.get((aliases or {}).get(key, key))
        if annotation is not None and value is not None:
            try:
                check(prefix + key, _converted(value, annotation, prefix + key), annotation)
            except TypeError as error:
                raise ValueError(str(error)) from None


def read_text(path: Path) -> str:
    """Read a text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8; the message names file and byte.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: byte {error.start} is not UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8, not a JSON object, or nested too deeply; the message names file and byte.
    """
    return parse_json(path.read_bytes(), str(path))


def parse_json(content: bytes, source: str) -> dict[str, Any]:
    """Parse the JSON object in the content of a file, which messages call `source`.

    Raises:
        ValueError: as for `read_json`.
    """
    try:
        text = content.decode()
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is damaged: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        byte = len(text[: error.pos].encode())
        raise ValueError(f"{source} is damaged: not JSON at byte {byte}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply: at most {MAX_DEPTH} levels are read") from None
    except ValueError as error:  # a number of too many digits
        raise ValueError(f"{source} is damaged: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} must hold a JSON object, not {quoted(value)}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"{source} is nested too deeply: at most {MAX_DEPTH} levels are read")
    return value


def json_checksum(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the checksum of its other keys."""
    return {**values, CHECKSUM: json_checksum(values)}


def take_checksum(values: dict[str, Any]) -> bool:
    """Remove the checksum from an object, and say whether the rest has changed since; False if there is none."""
    return CHECKSUM in values and values.pop(CHECKSUM) != json_checksum(values)


class OctileWarning(UserWarning):
    """A warning about what was given to octile, which the command line shows as one line."""


def warn_caller(message: str) -> None:
    """Warn at the line outside of octile that has called it, which gave what the warning is about."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, OctileWarning, stacklevel=level)


def distinct_names(argument: str, names: Iterable[str]) -> list[str]:
    """Return names without the space around them, and without empty ones.

    Raises:
        ValueError: one is there twice; the message names `argument`.
    """
    given = [name for name in map(str.strip, names) if name]
    if twice := [name for name in given if given.count(name) > 1]:
        raise ValueError(f"{argument} must differ, but {','.join(given)!r} names {twice[0]} twice")
    return given


def quoted(value: object) -> str:
    """A value for a message, shortened."""
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value) if abs(value) < 10**MAX_QUOTED else f"{'-' if value < 0 else ''}10^{MAX_QUOTED} or more"
    elif isinstance(value, dict):
        text = f"an object of {len(value)} fields"
    elif isinstance(value, list | tuple) and (len(value) > 8 or any(isinstance(v, list | tuple | dict) for v in value)):
        text = f"a list of {len(value)} items"
    else:
        text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


@cache
def annotations_of(cls: type) -> dict[str, Any]:
    """Field name → annotation of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _is_finite(number: Any) -> bool:
    """Whether a float represents a number; JSON has whole numbers of any size."""
    return abs(number) <= sys.float_info.max


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _item_annotations(annotation: Any, length: int) -> tuple[Any, ...]:
    """The annotations of the items of a tuple of a length, or as many as the annotation has."""
    items = get_args(annotation)
    return (items[0],) * length if items[-1] is Ellipsis else items


def _has_type(value: Any, annotation: Any) -> bool:
    """Whether a value has the type of an annotation that is no union. Ranges and the items of a tuple are not asked."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _has_type(value, get_args(annotation)[0])
    if origin is Literal:
        return any(type(value) is type(word) for word in get_args(annotation))
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(_item_annotations(annotation, len(value)))
    if annotation in (int, float):
        return isinstance(value, int if annotation is int else int | float) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)


def _needed(annotation: Any) -> str:
    """What an annotation accepts, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _needed(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if origin is tuple:
        items = get_args(annotation)
        count = "a list" if items[-1] is Ellipsis else f"a list of {len(items)}"
        return f"{count}, each {_needed(items[0])}"
    if len(members := _members(annotation)) > 1:
        ordered = sorted(members, key=lambda member: get_origin(member) is tuple)  # the items of a list come last
        return " or ".join(map(_needed, ordered))
    return WORDS.get(origin or annotation, "an object")


def _converted(value: Any, annotation: Any, name: str) -> Any:
    """A value of a JSON file as its field has it, unchecked where it stays what it is."""
    for member in _members(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation):
        if get_origin(member) is Annotated:
            member = get_args(member)[0]
        if is_dataclass(member) and value is not None:
            return from_json(member, value, name)  # type: ignore[arg-type]
        if get_origin(member) is tuple and isinstance(value, list):
            return tuple(value)
        if member is Path and isinstance(value, str):
            return Path(value)
    return value


def _depth(value: object) -> int:
    """The levels of nested lists and objects, at most one more than MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        depth += 1
    return depth


def _items(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
