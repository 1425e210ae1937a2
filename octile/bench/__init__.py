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
    """
    from octile.bench.rows import machine, show, write

    rows = import_module(f"octile.bench.{what}").rows()
    m = machine()
    show(f"{TITLES[what]} on {m['gpu'] or m['cpu']}, {m['threads']} threads, torch {m['torch']}", rows)
    if json:
        write(json, rows)
        print(f"written to {json}")
