"""What a user runs to measure their machine; the figures in the README come from here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

TITLES = {"gemm": "products", "casts": "casts", "step": "a training step", "lab": "the model of the tensor core"}


def run(what: str, json: Path | None = None) -> None:
    """Measures, prints a table, and writes the rows to a file if asked. Stopped by Ctrl-C, it does so with what it has.

    Args:
        what: "gemm", "casts", "step" or "lab".
        json: file for the rows, with machine, versions and commit.

    Raises:
        FileNotFoundError: there is no folder for the file; nothing was measured then.
    """
    from octile.bench.rows import Row, write
    from octile.report.machine import describe_machine, machine

    if json and not json.parent.is_dir():
        raise FileNotFoundError(f"json must lie in a folder that exists: {json.parent} does not")
    bench, rows, measured_on = import_module(f"octile.bench.{what}"), list[Row](), machine()
    try:
        for row in bench.rows():
            rows.append(row)
    finally:
        if rows:
            print(f"{TITLES[what]} on {describe_machine(measured_on)}\n\n{bench.show(rows)}")
            if json:
                write(json, rows, measured_on)
                print(f"\nwritten to {json}")
            if json and what == "gemm" and measured_on["gpu"]:
                print(bench.draw(json))


def search(shape: str | None, minutes: float | None) -> None:
    """Searches the fastest kernels; see `octile.bench.tune`.

    Args:
        shape: "M,N,K", or None for every shape of gemm.
        minutes: 10 where they are not given.

    Raises:
        ValueError: shape is not three whole numbers, or as in `octile.bench.tune.run`.
    """
    from octile.bench.tune import run as tune

    sides = shape.split(",") if shape else []
    if shape and (len(sides) != 3 or not all(side.strip().isdecimal() for side in sides)):
        raise ValueError(f"shape must be M,N,K, such as 4096,2112,7168, not {shape!r}")
    m_n_k = (int(sides[0]), int(sides[1]), int(sides[2])) if shape else None
    tune(m_n_k, 10.0 if minutes is None else minutes)


def search_casts() -> None:
    """Searches the fastest settings of casts; see `octile.bench.tune_casts`."""
    from octile.bench.tune_casts import run as tune

    tune()
