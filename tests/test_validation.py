"""Tests of the validation of fields and JSON files: each wrong value is refused in one line that names its field."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from octile.validation import MAX_DEPTH, Range, check_fields, check_given, from_json, read_json


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    count: Annotated[int, Range(at_least=1, at_most=1000)] = 1
    rate: Annotated[float, Range(above=0, below=1)] = 0.5
    free: float = 0.0
    kind: Literal["a", "b"] = "a"
    depth: Literal[0, 1] = 0
    flag: bool = False
    text: str = ""
    file: Path | None = None
    limit: Annotated[int, Range(at_least=1)] | None = None
    pair: tuple[float, float] = (0.0, 0.0)
    ids: Annotated[int, Range(at_least=0)] | tuple[Annotated[int, Range(at_least=0)], ...] = 0
    inner: Inner | None = None
    other: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


WRONG_TYPES = [
    ({"count": True}, "count must be a whole number, not True"),
    ({"count": 1.0}, "count must be a whole number, not 1.0"),
    ({"count": "1"}, "count must be a whole number, not '1'"),
    ({"count": None}, "count must be a whole number, not None"),
    ({"count": [1]}, r"count must be a whole number, not \[1\]"),
    ({"count": [[1]]}, "count must be a whole number, not a list of 1 items"),
    ({"count": {"a": 1}}, "count must be a whole number, not an object of 1 fields"),
    ({"count": "x" * 999}, "count must be a whole number, not 'x{58}…"),
    ({"rate": False}, "rate must be a number, not False"),
    ({"kind": 1}, "kind must be a or b, not 1"),
    ({"depth": False}, "depth must be 0 or 1, not False"),
    ({"flag": 1}, "flag must be true or false, not 1"),
    ({"text": 1}, "text must be text, not 1"),
    ({"file": 1}, "file must be a path or null, not 1"),
    ({"limit": "1"}, "limit must be a whole number or null, not '1'"),
    ({"pair": 1}, "pair must be a list of 2, each a number, not 1"),
    ({"pair": (1, True)}, "pair must be a number, not True"),
    ({"ids": (1, "2")}, "ids must be a whole number, not '2'"),
    ({"inner": 1}, "inner must be an object or null, not 1"),
    ({"other": 1}, "other must be an object or null, not 1"),
]
OUTSIDE = [
    ({"count": 0}, "count must be at least 1, not 0"),
    ({"count": 10**18}, "count must be at most 1,000, not 10{18}$"),
    ({"count": 10**5000}, r"count must be at most 1,000, not 10\^60 or more"),
    ({"rate": 0}, "rate must be above 0, not 0"),
    ({"rate": 1.0}, "rate must be below 1, not 1.0"),
    ({"rate": float("nan")}, "rate must be finite, not nan"),
    ({"rate": float("inf")}, "rate must be finite, not inf"),
    ({"free": float("-inf")}, "free must be finite, not -inf"),
    ({"kind": "c"}, "kind must be a or b, not 'c'"),
    ({"depth": 2}, "depth must be 0 or 1, not 2"),
    ({"limit": 0}, "limit must be at least 1, not 0"),
    ({"pair": (0.0, float("inf"))}, "pair must be finite, not inf"),
    ({"ids": -1}, "ids must be at least 0, not -1"),
    ({"ids": (1, -1)}, "ids must be at least 0, not -1"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_TYPES)
def test_a_value_of_another_type_is_a_type_error(values, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        Outer(**values)


@pytest.mark.parametrize(("values", "message"), OUTSIDE)
def test_a_value_outside_its_range_is_a_value_error(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Outer(**values)


@pytest.mark.parametrize(("values", "message"), WRONG_TYPES + OUTSIDE)
def test_every_wrong_value_of_a_file_is_a_value_error(values, message):
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    message = message.replace("inner must be an object or null", "inner must be an object")
    with pytest.raises(ValueError, match=f"^{message}"):
        from_json(Outer, lists)


@pytest.mark.parametrize(("values", "message"), [one for one in WRONG_TYPES + OUTSIDE if None not in one[0].values()])
def test_every_wrong_value_of_an_object_with_other_keys_is_a_value_error(values, message):
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    message = message.replace("inner must be an object or null", "inner must be an object")
    with pytest.raises(ValueError, match=f"^optim.{message}"):
        check_given(Outer, {"unknown": 1, **lists}, "optim.")


def test_an_object_may_lack_fields_and_null_counts_as_missing():
    check_given(Outer, {"size": None, "limit": 3, "unknown": [1]})


def test_lists_texts_and_objects_of_a_file_become_what_the_fields_are():
    value = from_json(Outer, {"pair": [1, 2], "file": "a/b", "ids": [3], "inner": {"size": 7}, "rate": 0.25})
    assert value == Outer(pair=(1, 2), file=Path("a/b"), ids=(3,), inner=Inner(7), rate=0.25)


def test_null_is_a_value_of_an_optional_field():
    assert from_json(Outer, {"file": None, "inner": None, "limit": None}) == Outer()


def test_an_unknown_field_of_a_nested_object_is_named_with_its_path():
    with pytest.raises(ValueError, match=r"^inner\.length is unknown: there are size$"):
        from_json(Outer, {"inner": {"length": 1}})


def test_a_field_without_a_default_is_needed():
    @dataclass(frozen=True)
    class Needed:
        size: int

    with pytest.raises(ValueError, match=r"^size is missing$"):
        from_json(Needed, {})


def nested(levels: int) -> dict[str, Any]:
    """An object in an object in an object …"""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_an_object_may_have_so_many_levels_and_no_more():
    assert Outer(other=nested(MAX_DEPTH)).other == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match=r"^other must be nested at most 64 levels deep"):
        Outer(other=nested(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": "\xff"}', r"f\.json is damaged: byte 7 is not UTF-8"),
        ('{"ä": tru}'.encode(), r"f\.json is damaged: not JSON at byte 7: Expecting value"),
        (b'{"a": 1', r"f\.json is damaged: not JSON at byte 7: "),
        (b"", r"f\.json is damaged: not JSON at byte 0: Expecting value"),
        (b"[1]", r"f\.json must hold a JSON object, not \[1\]"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"f\.json is damaged: not JSON \(Exceeds the limit"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", r"f\.json is nested too deeply: at most 64 levels"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"f\.json is nested too deeply: at most 64 levels"),
    ],
    ids=["not-utf-8", "not-json", "cut-off", "empty", "a-list", "5000-digits", "100-levels", "100000-levels"],
)
def test_a_damaged_file_is_named_with_the_byte(tmp_path, content, message):
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "f.json")
