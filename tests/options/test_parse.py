"""Tests of the way from words to a dataclass."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from octile.options import Given, OptionError, Positional, Refused
from octile.options.parse import parse
from octile.validation import Range, check_fields


@dataclass(frozen=True)
class Inner:
    rate: Annotated[float, Range(at_least=0)] = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    topk: int | None = 8
    max_rate: float = 1.0
    first_token: Annotated[int, Refused("is no option: a tokenizer has it")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.topk == 0:
            raise ValueError("topk must be above 0 with max_rate")


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        src: what is read.
    """

    src: Positional[str]
    dst: Positional[Path | None] = None
    kind: Literal["a", "b"] = "a"
    step: Literal[0, 1] = 0
    tokens: int | tuple[int, ...] | None = None
    keys: tuple[str, ...] = ()
    batch_size: int = 4
    name: str = ""
    is_new: bool = False
    is_whole: bool = True
    resume: bool = False
    inner: Inner = field(default_factory=Inner)
    absent: Inner | None = None


def build(*words: str, default: Command | None = None) -> Command:
    return parse(Command, words, "test").build(default)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--batch-size", "8"], "batch_size", 8),
        (["--batch_size=8"], "batch_size", 8),
        (["--batch-size", "8", "--batch-size=9"], "batch_size", 9),
        (["--batch-size", "-8"], "batch_size", -8),
        (["--batch-size", "1_000"], "batch_size", 1000),
        (["--name", "-1e-4"], "name", "-1e-4"),
        (["--name", "-"], "name", "-"),
        (["--name", ""], "name", ""),
        (["--name=--kind"], "name", "--kind"),
        (["--name=a=b"], "name", "a=b"),
        (["--kind", "b"], "kind", "b"),
        (["--step", "1"], "step", 1),
        (["--tokens", "1"], "tokens", 1),
        (["--tokens", "1", "2", "3"], "tokens", (1, 2, 3)),
        (["--tokens", "1", "2", "--is-new"], "tokens", (1, 2)),
        (["--tokens", "None"], "tokens", None),
        (["--keys", "x", "--keys=y"], "keys", ("x", "y")),
        (["--keys=x", "dst", "--keys", "y", "--keys=z"], "keys", ("x", "y", "z")),
        (["--keys=x", "dst"], "dst", Path("dst")),
        (["--keys", "x", "dst"], "dst", Path("dst")),
        (["--is-new"], "is_new", True),
        (["--is-new", "--no-is-new"], "is_new", False),
        (["--no-is-whole"], "is_whole", False),
        (["--is-whole"], "is_whole", True),
        (["dst"], "dst", Path("dst")),
        (["--inner.rate", "1e-4"], "inner", Inner(rate=1e-4)),
        (["--inner.betas", "0.5", "0.75", "dst"], "inner", Inner(betas=(0.5, 0.75))),
        (["--inner.topk", "None", "--inner.rate=2"], "inner", Inner(2.0, topk=None)),
        (["--absent.rate", "3"], "absent", Inner(rate=3.0)),
        ([], "absent", None),
    ],
    ids=str,
)
def test_words_become_values(words, field, value):
    assert getattr(build("src", *words), field) == value


@pytest.mark.parametrize("words", [["--kind", "b", "x", "y"], ["x", "--kind", "b", "y"], ["x", "y", "--kind", "b"]])
def test_options_stand_anywhere_among_positional_arguments(words):
    options = build(*words)
    assert (options.src, options.dst, options.kind) == ("x", Path("y"), "b")


def test_what_is_not_given_is_that_of_the_default():
    default = Command("x", batch_size=9, inner=Inner(rate=7.0))
    assert build("y", "--inner.topk", "3", default=default) == Command("y", batch_size=9, inner=Inner(7.0, topk=3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SRC is missing: what is read"),
        (["a", "b", "c"], "'c' is one argument too many"),
        (["a", "--batchsize", "3"], "--batchsize is unknown; perhaps you meant --batch-size"),
        (["a", "--rate=3"], "--rate is unknown; perhaps you meant --inner.rate or --absent.rate"),
        (["a", "--zzz"], "--zzz is unknown"),
        (["a", "-b"], "-b is unknown"),
        (["a", "--inner.first_token=3"], "--inner.first-token is no option: a tokenizer has it"),
        (["a", "--hep"], "--hep is unknown; perhaps you meant --help"),
        (["a", "--help-al"], "--help-al is unknown; perhaps you meant --help-all or --help"),
        (["a", "--is-new=yes"], "--is-new takes no value, but 'yes' is given"),
        (["a", "--name"], "--name needs a value"),
        (["a", "--name", "--kind", "b"], "--name needs a value"),
        (["a", "--name", "-x y"], "--name needs a value: write --name='-x y' for one that begins with a dash"),
        (["a", "--keys", "-x"], "--keys needs a value: write --keys=-x for one that begins with a dash"),
        (["a", "--inner.betas", "1"], "--inner.betas needs 2 values"),
        (["a", "--inner.betas", "1", "x"], "--inner.betas must be a number, not 'x'"),
        (["a", "--batch-size", "1e3"], "--batch-size must be a whole number, not '1e3'"),
        (["a", "--batch-size", "x", "--batch-size", "1"], "--batch-size must be a whole number, not 'x'"),
        (["a", "--batch-size="], "--batch-size must be a whole number, not ''"),
        (["a", "--step", "2"], "--step must be one of 0, 1, not '2'"),
        (["a", ""], "DST is empty: name a path"),
    ],
    ids=str,
)
def test_wrong_words_are_refused(words, message):
    with pytest.raises(OptionError) as raised:
        build(*words)
    assert str(raised.value) == f"{message} (see octile test --help)"


@pytest.mark.parametrize("word", ["--dtype", "--dtype=x"])
def test_an_option_of_another_program_is_refused_with_the_reason(word):
    with pytest.raises(OptionError) as raised:
        parse(Command, ["a", word, "b"], "test", no_options={"dtype": "a file has its own"})
    assert str(raised.value) == "--dtype is no option: a file has its own (see octile test --help)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--inner.rate", "-1"], "--inner.rate must be at least 0, not -1.0"),
        (["--inner.topk", "0"], "--inner.topk must be above 0 with --inner.max-rate"),
    ],
)
def test_what_a_dataclass_refuses_is_said_of_the_option(words, message):
    with pytest.raises(ValueError, match=message):
        build("a", *words)


def test_a_choice_may_be_given_in_capitals():
    assert build("a", "--kind", "B").kind == "b"


def test_an_error_has_the_option_and_the_value():
    with pytest.raises(OptionError) as raised:
        build("a", "--kind", "c")
    assert (raised.value.option, raised.value.reason, raised.value.value) == ("--kind", "must be one of a, b", "c")


def test_two_fields_exclude_each_other():
    given = Given(Command, "test", {"name": ["x"], "kind": ["a"]})
    given.check_one_of("name", "step")
    with pytest.raises(ValueError, match="name and kind exclude each other: give one of them"):
        given.check_one_of("name", "kind")


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--resume"], "; --batch-size and --inner.rate are those of the run, of which only --batch-size may change"),
        (["--resume", "--inner.rate=1"], "; --batch-size is that of the run, which may change"),
        (["--resume", "--batch-size=1"], "; --inner.rate is that of the run"),
        (["--resume", "--batch-size=1", "--inner.rate=1"], ""),
        (["--no-resume"], ""),
        ([], ""),
    ],
)
def test_a_message_says_which_options_are_those_of_the_run(words, note):
    given = parse(Command, ["a", *words], "test", {"batch_size"})
    assert given.explained("batch_size 4 and inner.rate 1") == f"--batch-size 4 and --inner.rate 1{note}"
