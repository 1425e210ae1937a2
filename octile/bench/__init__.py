"""What a user runs to measure their machine; the figures in the README come from here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

TITLES = {"gemm": "products", "casts": "casts", "step": "a training step"}


def run(what: str, json: Path | None = None) -> None:
    """Measures, prints a table, and writes the rows to a file if asked.

    Args:
        what: "gemm", "casts" or "step".
        json: file for the rows, with machine, versions and commit.

    Raises:
        FileNotFoundError: there is no folder for the file; nothing was measured then.
    """
    from octile.bench.rows import table, write
    from octile.report.machine import in_words, machine

    if json and not json.parent.is_dir():
        raise FileNotFoundError(f"json must lie in a folder that exists: {json.parent} does not")
    rows = import_module(f"octile.bench.{what}").rows()
    measured_on = machine()
    print(f"{TITLES[what]} on {in_words(measured_on)}\n\n{table(rows)}")
    if json:
        write(json, rows, measured_on)
        print(f"\nwritten to {json}")
