"""The options of `octile lab formats`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octile.options import Positional


@dataclass(frozen=True)
class Options:
    """Show the values, gaps and ranges of every number format, as a table and as figures.

    Attributes:
        run: a finished run, whose activations and gradients the figures use; by default an untrained tiny model's.
        out: the page to write.
        json: print JSON and write no page.
    """

    run: Positional[Path | None] = None
    out: Path = Path("lab/formats.html")
    json: bool = False
