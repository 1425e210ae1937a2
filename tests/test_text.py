"""Tests of text for people: numbers have units, and characters that control a terminal are shown as escapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.text import (
    escape_control_characters,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_percent,
    format_quantity,
)


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512, "512"),
        (9_999, "9,999"),
        (12_345, "12.3k"),
        (8_131_072, "8.13M"),
        (671e9, "671B"),
        (1.33e12, "1.33T"),
        (999e12, "999T"),
        (2.0**54, "1.80·10¹⁶"),
    ],
)
def test_amounts(value, text):
    assert format_quantity(value) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (0.25e9, "0.2 GFLOP/s"),
        (23.4e9, "23.4 GFLOP/s"),
        (999.96e9, "1.0 TFLOP/s"),
        (1.5e12, "1.5 TFLOP/s"),
        (18.014e15, "18.0 PFLOP/s"),
        (2.5e18, "2.5 EFLOP/s"),
    ],
)
def test_speeds(per_second, text):
    assert format_flops(per_second) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1_240_000, "1.24 MB"),
        (700e9, "700 GB"),
        (999.9e9, "1,000 GB"),
        (12.3e15, "12.3 PB"),
        (2.5e22, "25,000 EB"),
    ],
)
def test_byte_sizes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.44, "1.4 s"), (192.4, "3 min 12 s"), (3599.7, "1 h 0 min"), (90_000, "1 d 1 h")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_percentage_has_a_sign():
    assert (format_percent(0.00113), format_percent(-0.0025)) == ("+0.11%", "−0.25%")


@pytest.mark.parametrize(("number", "text"), [(1, "1 row"), (0, "0 rows"), (1024, "1,024 rows")])
def test_counts(number, text):
    assert format_count(number, "row") == text
