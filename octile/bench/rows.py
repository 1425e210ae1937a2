"""What a benchmark finds: rows of one form, for a person's screen and for a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octile.checkpoint.files import write_json

COLUMNS = ("case", "what", "ours", "theirs", "ratio", "unit", "peer")
RIGHT = {"ours", "theirs", "ratio"}


@dataclass(frozen=True)
class Against:
    """The peer measured in the same run, and how many times its value ours is."""

    peer: str
    value: float
    ratio: float


@dataclass(frozen=True)
class Row:
    """One figure: of `case`, `what` has this `value` in `unit`."""

    case: str
    what: str
    value: float
    unit: str
    against: Against | None = None


def beside(case: str, what: str, value: float, unit: str, peer: str, peer_value: float) -> Row:
    """A row with its peer."""
    return Row(case, what, value, unit, Against(peer, peer_value, value / peer_value))


def table(rows: list[Row]) -> str:
    """Rows as aligned text, one line each however wide the screen is, so that it reads the same in a pipe."""
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_line(line, widths) for line in cells)


def write(path: Path, rows: list[Row], machine: Mapping[str, Any]) -> None:
    """Writes rows and what they were measured on."""
    write_json(path, {"machine": machine, "rows": [asdict(row) for row in rows]})


def _cells(row: Row) -> tuple[str, ...]:
    theirs, ratio, peer = "", "", ""
    if row.against:
        theirs, ratio, peer = _figure(row.against.value), f"{row.against.ratio:.3f}", row.against.peer
    return row.case, row.what, _figure(row.value), theirs, ratio, row.unit, peer


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    aligned = (
        cell.rjust(width) if name in RIGHT else cell.ljust(width)
        for name, cell, width in zip(COLUMNS, cells, widths, strict=True)
    )
    return "  ".join(aligned).rstrip()
