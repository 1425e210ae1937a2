"""Tests of a dataclass as a list of options."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from octile.options import Hidden, Named, Positional
from octile.options.fields import Option, attribute_texts, options_of
from octile.validation import Range


@dataclass(frozen=True)
class Inner:
    """Something within.

    Attributes:
        rate, decay: two numbers, on
            two lines.
        keep: a flag that is set.
    """

    rate: Annotated[float, Range(at_least=0)] = 1e-4
    decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    keep: bool = True


@dataclass(frozen=True)
class Outer:
    """A command.

    Attributes:
        src: what is read.
        shape: a file: its shape.

    Raises:
        ValueError: this is no entry.
    """

    src: Positional[Path]
    rest: Positional[tuple[Path, ...]] = ()
    kind: Literal["a b", "c"] = "a b"
    tokens: int | tuple[int, ...] | None = None
    keys: tuple[str, ...] = ()
    shape: Annotated[Path | None, Named("--model", "FILE")] = None
    text: Hidden[str | None] = None
    extra: dict[str, Any] = field(default_factory=dict)
    a_flag: bool = False
    in_ner: Inner | None = field(default_factory=Inner)


def option(path: str, default: Outer | None = None) -> Option:
    return next(each for each in options_of(Outer, default) if each.path == path)


def test_hidden_fields_and_objects_are_no_options():
    assert not {"text", "extra", "in_ner"} & {each.path for each in options_of(Outer)}


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("src", "SRC"),
        ("rest", "[REST...]"),
        ("kind", "--kind {a b,c}"),
        ("tokens", "--tokens INT [INT ...]"),
        ("keys", "--keys STR"),
        ("shape", "--model FILE"),
        ("a_flag", "--a-flag"),
        ("in_ner.rate", "--in-ner.rate FLOAT"),
        ("in_ner.betas", "--in-ner.betas FLOAT FLOAT"),
        ("in_ner.keep", "--in-ner.no-keep"),
    ],
)
def test_what_a_user_types(path, usage):
    assert option(path).usage == usage


@pytest.mark.parametrize(
    ("path", "count", "is_repeated"),
    [("kind", 1, False), ("tokens", None, False), ("keys", None, True), ("in_ner.betas", 2, False)],
)
def test_how_many_words_are_a_value(path, count, is_repeated):
    assert (option(path).count, option(path).is_repeated) == (count, is_repeated)


@pytest.mark.parametrize(
    ("path", "shown"), [("kind", "'a b'"), ("in_ner.rate", "0.0001"), ("in_ner.betas", "0.9 0.95"), ("tokens", "")]
)
def test_the_default_is_shown_as_it_is_typed(path, shown):
    assert option(path).default_text == shown


def test_an_instance_has_the_defaults():
    default = Outer(Path("x"), tokens=3, in_ner=Inner(rate=2.0))
    assert [option(path, default).default for path in ("src", "tokens", "in_ner.rate")] == [Path("x"), 3, 2.0]


def test_the_attributes_are_the_help():
    assert attribute_texts(Outer) == {"src": "what is read.", "shape": "a file: its shape."}
    assert attribute_texts(Inner) == {
        "rate": "two numbers, on two lines.",
        "decay": "two numbers, on two lines.",
        "keep": "a flag that is set.",
    }


def test_a_class_has_the_help_of_its_base():
    @dataclass(frozen=True)
    class Derived(Inner):
        """More.

        Attributes:
            keep: another text.
        """

    assert attribute_texts(Derived)["rate"] == "two numbers, on two lines."
    assert attribute_texts(Derived)["keep"] == "another text."
