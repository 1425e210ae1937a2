"""What a benchmark finds: rows of one form, for a person's screen and for a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octile.checkpoint.files import write_json

COLUMNS = ("case", "what", "ours", "theirs", "ratio", "unit", "peer")
RIGHT = {"ours", "theirs", "ratio"}
LEGEND = "ratio: ours over theirs; of a speed more is better, of bytes less."


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


def compare(case: str, what: str, value: float, unit: str, peer: str, peer_value: float) -> Row:
    """A row with its peer."""
    return Row(case, what, value, unit, Against(peer, peer_value, value / peer_value))


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text; the ratio is ours over theirs."""
    return align_columns([COLUMNS, *map(_cells, rows)], RIGHT)


def align_columns(lines: Sequence[Sequence[str]], right: Set[str]) -> str:
    """Cells under one another, one line each however wide the screen is, so that it reads the same in a pipe.

    Args:
        lines: the first has the columns' names.
        right: columns that end at the same place, as numbers do.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ends = [name in right for name in lines[0]]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(line, widths, ends, strict=True)
        ).rstrip()
        for line in lines
    )


def write(path: Path, rows: Sequence[Row], machine: Mapping[str, Any]) -> None:
    """Writes rows and what they were measured on."""
    write_json(path, {"machine": machine, "rows": [asdict(row) for row in rows]})


def _cells(row: Row) -> tuple[str, ...]:
    theirs, ratio, peer = "", "", ""
    if row.against:
        theirs, ratio, peer = _figure(row.against.value), f"{row.against.ratio:.3f}", row.against.peer
    return row.case, row.what, _figure(row.value), theirs, ratio, row.unit, peer


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
