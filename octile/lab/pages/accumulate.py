"""`octile lab accumulate`: the experiment as a table in the terminal and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from octile.formats import FloatFormat, by_name
from octile.lab.accumulate import Row
from octile.lab.accumulate import accumulate as experiment
from octile.lab.pages.accumulate_figures import draw_accumulate, say_accumulate, short_table, table
from octile.lab.pages.formats import screen_table
from octile.lab.pages.page import Section, write_lab_page
from octile.lab.tensor_core.architectures import EVIDENCE, find_instruction
from octile.report.page import format_bytes
from octile.report.style import PHONE, WIDE
from octile.report.svg import Chart, make_chart
from octile.train.memory import device_memory

SIDE = 256  # rows of each operand
BYTES = 24  # a value of the operands takes at most, measured as the process's peak on every architecture


def show_accumulate(
    ks: Sequence[int],
    data: Sequence[str],
    intervals: Sequence[int | None],
    arch: str,
    fmt_name: str,
    out: Path,
    as_json: bool,
) -> None:
    """Runs the experiment and shows it.

    Raises:
        ValueError: as `octile.lab.accumulate.accumulate`, before any work; the architecture multiplies no such format
            or promotes by itself; the operands of the longest sums do not fit into memory.
    """
    _check_memory(max(ks))
    fmt = by_name[fmt_name]
    assert isinstance(fmt, FloatFormat)
    assert fmt.dtype is not None
    try:
        core = find_instruction(arch, fmt.dtype, fmt.dtype)
    except TypeError as error:
        raise ValueError(f"arch {arch!r} multiplies no {fmt_name.upper()}: {error}") from None
    if core.promotes_every and any(intervals):
        raise ValueError(
            f"promote must be never for {arch}: its {core.name} adds every {core.promotes_every} in FP32 by itself"
        )
    experiment([1], data, intervals, arch, fmt, rows=1, columns=1)  # refuses what does not go
    console = Console(stderr=True)
    cases = [(kind, k) for kind in data for k in ks]
    steps = track(cases, "summing", console=console, transient=True, disable=not console.is_terminal)
    rows: list[Row] = [row for kind, k in steps for row in experiment([k], [kind], intervals, arch, fmt, SIDE, SIDE)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    sentence = say_accumulate(rows, arch)
    lead = (
        f"Products of random {fmt_name.upper()} matrices as {core.name} of {arch} sums them, {core.terms} products a"
        f" step with {core.fraction_bits} fraction bits, beside the exact results and in units of their RMS. The model"
        f" of this instruction: {EVIDENCE[core.evidence]}."
    )
    page = write_lab_page(
        out,
        "Accumulation",
        lead,
        [
            Section("The error of a long sum", [_chart(sentence, rows)]),
            Section("In figures", table=table(rows), note="Bias is the mean error: below zero, results are too small."),
        ],
    )
    shown = Console()
    shown.print(screen_table(short_table(rows)))
    shown.print(sentence, highlight=False)
    shown.print(f"picture: {page}", highlight=False, soft_wrap=True)


def _check_memory(k: int) -> None:
    there = device_memory(torch.device("cpu"))
    needed, fits = 2 * SIDE * BYTES * k, there // (2 * SIDE * BYTES)
    if needed > there:
        raise ValueError(
            f"k is {k:,}, whose operands of {SIDE} rows need about {format_bytes(needed)}, but the machine has"
            f" {format_bytes(there)} of memory: it holds k up to {fits:,}"
        )


def _chart(sentence: str, rows: Sequence[Row]) -> Chart:
    return make_chart("Worst error against K", sentence, lambda f: draw_accumulate(f, rows), (WIDE, 340), (PHONE, 620))
