"""Shared parts of the lab's commands: sections, the HTML page, and lists on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp
from pathlib import Path

from octile.atomic_files import write_text
from octile.report.page import render
from octile.report.svg import Chart
from octile.report.table import Table
from octile.text import superscript


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading with charts, a table or a note."""

    heading: str
    charts: Sequence[Chart] = ()
    table: Table | None = None
    note: str = ""


def write_lab_page(path: Path, title: str, lead: str, sections: Sequence[Section], notices: Sequence[str] = ()) -> Path:
    """Write a page as one HTML file without external resources, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render("lab.html.jinja", title=title, lead=lead, sections=sections, notices=notices))
    return path


def power(value: float) -> str:
    """Format a value as usual for number formats: 448, 57344, 2⁻⁹, 1.2e-07, 3.4e+38."""
    mantissa, exponent = frexp(value)
    if mantissa == 0.5 and not 1 <= exponent < 11:  # a power of two below 1 or from 1024 on
        return f"2{superscript(exponent - 1)}"
    return f"{value:,.0f}" if value < 1e6 and value == int(value) else f"{value:.2e}".replace("e+", "e")


def parse_words(text: str) -> list[str]:
    """Parse an option of words that are separated by commas."""
    return [word.strip() for word in text.split(",")]


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """Parse an option of whole numbers that are separated by commas.

    Raises:
        ValueError: a word is not a whole number of at least 1.
    """
    words = parse_words(text)
    for word in words:
        if not _is_count(word):
            raise ValueError(f"{name} must be whole numbers of at least 1, separated by commas, not {word!r}")
    return tuple(int(word) for word in words)


def parse_intervals(text: str) -> tuple[int | None, ...]:
    """Parse promotion intervals: "128,never" → (128, None).

    Raises:
        ValueError: a word is neither "never" nor a whole number of at least 1.
    """
    words = parse_words(text)
    for word in words:
        if word != "never" and not _is_count(word):
            raise ValueError(f"promote must be never or whole numbers of at least 1, separated by commas, not {word!r}")
    return tuple(None if word == "never" else int(word) for word in words)


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) >= 1
