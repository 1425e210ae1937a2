"""A benchmark's results: rows that are printed as a table and written to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octile.atomic_files import write_json
from octile.report.table import as_list, fits_terminal

COLUMNS = ("case", "what", "value", "unit")
COMPARED = ("vs.", "its value", "ratio")  # further columns, if a row has a peer
RIGHT = {"value", "its value", "ratio"}
RATIO = "ratio: the value / that of what is named under vs."
LEGEND = f"{RATIO} Higher is better for speeds, lower is better for times and bytes."
LEGEND_OF_SPEEDS = f"{RATIO} Higher is better."


@dataclass(frozen=True)
class Against:
    """The value of a peer that was measured in the same run, and the ratio of the row's own value to it.

    A peer is another library, or octile in another case: 64 clients are compared with one.
    """

    peer: str
    value: float
    ratio: float


@dataclass(frozen=True)
class Row:
    """One result: in `case`, `what` has this `value` in `unit`.

    Attributes:
        goal: id of the goal in `octile.bench.goals` that judges it, where that is not found by case and what. It is not
            written to a file.
    """

    case: str
    what: str
    value: float
    unit: str
    against: Against | None = None
    goal: str | None = None


def compare(
    case: str, what: str, value: float, unit: str, peer: str, peer_value: float, goal: str | None = None
) -> Row:
    """Make a row with the value of a peer and the ratio to it."""
    return Row(case, what, value, unit, Against(peer, peer_value, value / peer_value), goal)


def flop_rate(case: str, what: str, speed: float, on_gpu: bool, peer: tuple[str, float] | None = None) -> Row:
    """Make a row of a speed in FLOP/s, in TFLOP/s on a GPU and in GFLOP/s on a CPU; `peer` is a name and its speed."""
    return _rate(case, what, speed, (1e12, "TFLOP/s") if on_gpu else (1e9, "GFLOP/s"), peer)


def byte_rate(case: str, what: str, speed: float, on_gpu: bool, peer: tuple[str, float] | None = None) -> Row:
    """Make a row of a speed in bytes/s, in GB/s on a GPU and in MB/s on a CPU; `peer` is a name and its speed."""
    return _rate(case, what, speed, (1e9, "GB/s") if on_gpu else (1e6, "MB/s"), peer)


def _rate(case: str, what: str, speed: float, unit: tuple[float, str], peer: tuple[str, float] | None) -> Row:
    size, name = unit
    if peer is None:
        return Row(case, what, speed / size, name)
    return compare(case, what, speed / size, name, peer[0], peer[1] / size)


def table(rows: Sequence[Row]) -> str:
    """Format rows as a table with aligned columns; without those of peers if no row has one."""
    lines = [COLUMNS + COMPARED, *map(_cells, rows)]
    if not any(row.against for row in rows):
        lines = [line[: len(COLUMNS)] for line in lines]
    return align_columns(lines, RIGHT)


def table_with(legend: str, rows: Sequence[Row]) -> str:
    """Format rows as a table, and the legend of their ratios below it, if a row has one."""
    return f"{table(rows)}\n\n{legend}" if any(row.against for row in rows) else table(rows)


def align_columns(lines: Sequence[Sequence[str]], right: Set[str]) -> str:
    """Format cells in aligned columns; as a list of rows if the output is a terminal that is too narrow for them.

    Args:
        lines: the cells of each line; the first line has the columns' names.
        right: names of the columns that are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ends = [name in right for name in lines[0]]
    aligned = "\n".join(
        "  ".join(
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(line, widths, ends, strict=True)
        ).rstrip()
        for line in lines
    )
    return aligned if fits_terminal(aligned) else as_list(lines[0], lines[1:])


def write(path: Path, rows: Sequence[Row], machine: Mapping[str, Any]) -> None:
    """Write rows, and the machine that they were measured on, as JSON."""
    fields = [asdict(row) for row in rows]
    write_json(path, {"machine": machine, "rows": [{k: v for k, v in row.items() if k != "goal"} for row in fields]})


def _cells(row: Row) -> tuple[str, ...]:
    compared = ("",) * len(COMPARED)
    if row.against:
        compared = row.against.peer, _format(row.against.value), f"{row.against.ratio:.3f}"
    return row.case, row.what, _format(row.value), row.unit, *compared


def _format(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
