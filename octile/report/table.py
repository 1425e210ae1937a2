"""Tables for the terminal. One that is too wide becomes a list, so that no number is split and no name is cut off."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octile.extras import require

require("rich", extra="report")
import rich.table  # noqa: E402  a missing package is reported above
from rich.cells import cell_len  # noqa: E402
from rich.measure import Measurement  # noqa: E402
from rich.text import Text  # noqa: E402

from octile.report.console import Console  # noqa: E402

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderResult

MIN_TEXT = 12  # characters of a column of text; its longer words may be broken


@dataclass(frozen=True)
class Table:
    """A table of text. The first column holds names, the others hold values."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class ScreenTable(rich.table.Table):
    """A rich table of texts. If its columns do not fit the terminal, each row is printed as a list of its cells.

    Columns that are right-aligned or `no_wrap` are never broken; others are broken between and, if necessary, within
    words.
    """

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            column.no_wrap = column.no_wrap or column.justify == "right"
            column.overflow = "fold"
            column.min_width = max(column.min_width or 0, _min_width(column))
        if self._needed_width(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title))
        names = [str(column.header).replace("\n", " ") for column in self.columns]
        cells = zip(*([_one_line(cell) for cell in column._cells] for column in self.columns), strict=True)
        yield Text(as_list(names, list(cells)))

    def _needed_width(self, console: RichConsole, options: ConsoleOptions) -> int:
        widest = sum(max(map(_width, _contents(column))) for column in self.columns)
        whole = Measurement.get(console, options.update(width=10**4), self).maximum
        return whole - widest + sum(column.min_width or 0 for column in self.columns)


def screen_table(content: Table) -> ScreenTable:
    """Format a table for the terminal, with narrow gaps if the terminal is narrow."""
    columns = zip(content.columns, *content.rows, strict=True)
    is_narrow = sum(max(map(cell_len, column)) + 2 for column in columns) - 2 > Console().width
    table = ScreenTable(*content.columns, box=None, header_style="bold", pad_edge=False, collapse_padding=is_narrow)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in content.rows:
        table.add_row(*row)
    return table


def as_list(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as paragraphs: the first cell, and below it each other cell that is not empty after its name."""
    width = max(map(cell_len, names[1:]), default=0)
    return "\n\n".join("\n".join(_paragraph(names, row, width)) for row in rows)


def fits_terminal(text: str) -> bool:
    """Whether no line of a text is broken by the terminal; True if the output is no terminal."""
    width = shutil.get_terminal_size().columns
    return not sys.stdout.isatty() or all(cell_len(line) <= width for line in text.splitlines())


def _paragraph(names: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    yield row[0]
    for name, cell in zip(names[1:], row[1:], strict=True):
        if cell:
            yield f"  {name}{' ' * (width - cell_len(name))}  {cell}" if name else f"  {cell}"


def _contents(column: rich.table.Column) -> list[str]:
    return [str(column.header), *map(_plain, column._cells)]


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _one_line(cell: Any) -> str:
    return _plain(cell).replace("\n", "  ")


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _min_width(column: rich.table.Column) -> int:
    """The width in which a column's numbers and the words of its header are whole."""
    header, *cells = _contents(column)
    if column.no_wrap:
        return max(map(_width, (header, *cells)))
    longest = max((cell_len(word) for text in (header, *cells) for word in text.split()), default=0)
    return min(longest, MIN_TEXT)
