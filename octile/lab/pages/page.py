"""The pages of the numerics lab: a heading, sections of tables and figures, one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp
from pathlib import Path

from octile.checkpoint.files import write_text
from octile.report.page import render
from octile.report.svg import Chart


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is names, the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of a page: any of a table, a note and figures."""

    heading: str
    charts: Sequence[Chart] = ()
    table: Table | None = None
    note: str = ""


def write_lab_page(path: Path, title: str, lead: str, sections: Sequence[Section], notices: Sequence[str] = ()) -> Path:
    """Writes the page; it needs no network. Its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render("lab.html.jinja", title=title, lead=lead, sections=sections, notices=notices))
    return path


def power(value: float) -> str:
    """A number as people write it in this field: 448, 57344, 2⁻⁹, 1.2e-07, 3.4e+38."""
    exponent = _log2(value)
    if exponent is not None and not 0 <= exponent < 10:
        return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:,.0f}" if value < 1e6 and value == int(value) else f"{value:.2e}".replace("e+", "e")


def _log2(value: float) -> int | None:
    """The exponent of a power of two; None for other numbers."""
    mantissa, exponent = frexp(value)
    return exponent - 1 if mantissa == 0.5 else None
