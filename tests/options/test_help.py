"""Tests of the help of a command."""

import sys
from dataclasses import dataclass, field

import pytest

from octile.cli import COMMANDS
from octile.options import Command, Positional, Section
from octile.options.fields import options_of
from octile.options.help import help_text, listed, overview_text
from tools.write_options import commands


@dataclass(frozen=True)
class Inner:
    """Something within, which has
    a long docstring.

    Attributes:
        rate: a number.
    """

    rate: float = 1.0
    other: int | None = None


@dataclass(frozen=True)
class Options:
    """Do something.

    It is described in two paragraphs.

    Attributes:
        run: what is read.
        name: a text.
    """

    run: Positional[str]
    name: str = "a b"
    last: bool = False
    inner: Inner = field(default_factory=Inner)


SECTIONS = (Section("first things", ("run", "inner.rate"), ("inner",)), Section("names", (), ("name",)))
FIRST_PAGE = """\
usage: octile test [-h] RUN [OPTIONS]

Do something.

It is described in two paragraphs.

first things
  RUN                       what is read. (required)
  --inner.rate FLOAT        a number. (default: 1.0)

help
  -h, --help                show the first page of this help.
  --help-all                show all 5 options; the first page has 2."""


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_the_first_page():
    assert help_text("test", Options, sections=SECTIONS) == FIRST_PAGE


def test_all_options_are_shown_in_their_sections():
    shown = help_text("test", Options, sections=SECTIONS, full=True)
    words = ("first things", "  RUN ", "--inner.rate", "--inner.other", "names", "--name", "other options", "--last")
    assert sorted(words, key=shown.index) == list(words)


def test_without_sections_all_options_are_shown_by_the_fields_that_hold_them():
    titles = [each.title for each in listed(Options)]
    assert titles == ["options", "inner: Something within, which has a long docstring"]
    assert "--help-all" not in help_text("test", Options)


def test_a_default_stays_on_one_line():
    @dataclass(frozen=True)
    class Long:
        """Do something.

        Attributes:
            name: a text that is nearly as long as one line.
        """

        name: str = "x"

    lines = help_text("test", Long).splitlines()
    assert lines[5:7] == [f"  {'--name STR':24}  a text that is nearly as long as one line.", " " * 28 + "(default: x)"]


def test_a_section_of_an_unknown_field_is_an_error():
    with pytest.raises(KeyError, match="nmae"):
        help_text("test", Options, sections=(Section("names", ("nmae",)),))


@pytest.mark.parametrize("columns", ["22", "40", "80"])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    text = (
        help_text("test", Options) + "\n" + overview_text("lab ", "octile", {"formats": "Show the values of formats."})
    )
    assert [line for line in text.splitlines() if len(line) > int(columns)] == []


def test_a_flag_that_is_set_by_default_is_described_by_what_unsetting_it_does():
    @dataclass(frozen=True)
    class Flags:
        """Do something.

        Attributes:
            round: round it.
        """

        round: bool = True

    assert f"  {'--no-round':24}  do not round it." in help_text("test", Flags).splitlines()
    assert f"  {'--round':24}  round it." in help_text("test", Flags, Flags(round=False)).splitlines()


def test_a_description_names_options_instead_of_fields():
    @dataclass(frozen=True)
    class Held:
        """Something within.

        Attributes:
            end_rate: not below begin_rate and top_rate, nor name or file.txt.
        """

        end_rate: float = 1.0
        begin_rate: float = 1.0

    @dataclass(frozen=True)
    class Naming:
        """Do something.

        Attributes:
            top_rate: not above held.end_rate or begin_rate.
            name: a text.
        """

        top_rate: float = 1.0
        name: str = "x"
        held: Held = field(default_factory=Held)

    helps = {option.path: option.help for each in listed(Naming) for option in each.first}
    assert helps["top_rate"] == "not above --held.end-rate or --held.begin-rate."
    assert helps["held.end_rate"] == "not below --held.begin-rate and --top-rate, nor name or file.txt."


def test_every_option_of_every_command_has_a_description_and_a_flag_an_imperative():
    for name, command in commands():
        for option in options_of(command.load().Options):
            assert option.help, (name, option.path)
            assert not (option.is_flag and option.help.startswith(("whether", "if "))), (name, option.path)


def test_the_summaries_of_an_overview_stand_below_each_other():
    lines = overview_text("lab ", "", {"what-if": "Compute.", "accumulate": "Measure."}).splitlines()
    assert lines[2:] == ["  what-if     Compute.", "  accumulate  Measure."]


def test_a_usage_and_a_description_are_indented_to_where_they_begin(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = overview_text("lab ", "", {"formats": "Show the values of all number formats."}).splitlines()
    assert lines[2:] == ["  formats", "        Show the values of all number", "        formats."]
    lines = help_text("a command of many words", Options).splitlines()
    assert lines[:2] == ["usage: octile a command of many words", "       [-h] RUN [OPTIONS]"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_titles_are_bold_on_a_terminal_only(monkeypatch, is_terminal):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert ("\x1b[1mhelp\x1b[0m" in help_text("test", Options)) == is_terminal


def test_no_style_is_used_where_none_is_wanted(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" not in help_text("test", Options)


@pytest.mark.parametrize(("command", "most"), [("train", 30), ("compare", 15), ("serve", 20)])
def test_the_first_page_of_a_large_command_is_short(command, most):
    entry = COMMANDS[command]
    assert isinstance(entry, Command)
    first, everything = (entry.help(command, [option]).splitlines() for option in ("--help", "--help-all"))
    assert 0 < sum(line.startswith(("  -", "  [")) for line in first) <= most
    assert any(line.startswith("  --help-all ") for line in first)
    assert sum(line.startswith(("  -", "  [")) for line in everything) > most


@pytest.mark.parametrize("command", ["train", "compare", "serve"])
def test_every_option_has_a_section(command):
    module = COMMANDS[command].load()
    assert "other options" not in [each.title for each in listed(module.Options, sections=module.SECTIONS)]
