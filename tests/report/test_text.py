"""Tests of text from elsewhere: characters that control a terminal are shown as escapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.report.text import escape_control_characters


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\rb\x00", r"a\rb\x00"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202eabc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
    ],
    ids=["escape", "C0", "C1", "direction", "surrogate"],
)
def test_control_characters_are_escaped(text, shown):
    assert escape_control_characters(text) == shown


@pytest.mark.parametrize("text", ["def f():\n\treturn 1\n", "Größe, 数, 👩\u200d💻"], ids=["code", "letters"])
def test_other_text_stays(text):
    assert escape_control_characters(text) == text


@given(st.text())
def test_what_is_shown_can_be_written_to_a_terminal(text):
    shown = escape_control_characters(text)
    assert all(
        character in "\n\t" or character.isprintable() or character.isspace() or ord(character) > 0x9F
        for character in shown
    )
