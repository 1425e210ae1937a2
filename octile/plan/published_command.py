"""`octile plan published`: published and measured figures compared with what the model of a cluster predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octile.report.console import Console
from octile.report.table import Table, screen_table
from octile.text import format_percent

if TYPE_CHECKING:
    from octile.plan.published import Comparison


@dataclass(frozen=True)
class Options:
    """Compare the figures of the plan with published and measured ones.

    Attributes:
        json: print JSON.
    """

    json: bool = False


def run(options: Options) -> None:
    """Print the table."""
    found = list(comparisons())
    if options.json:
        print(json.dumps([asdict(c) | {"error": c.error} for c in found], indent=2))
        return
    console = Console()
    for case, is_own in dict.fromkeys((c.case, c.is_own) for c in found):
        rows = [
            (f"{c.what}, {c.unit}", _number(c.value), _number(c.predicted), format_percent(c.error, 1))
            for c in found
            if c.case == case
        ]
        console.print(screen_table(Table((case, "measured" if is_own else "published", "plan", "error"), rows)))


def comparisons() -> Iterator[Comparison]:
    """All figures."""
    from octile.plan.published import compare_measured, compare_published, compare_serving

    yield from compare_published()
    yield from compare_serving()
    yield from compare_measured()


def _number(value: float) -> str:
    """A figure in four digits, or in all of its whole ones."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
