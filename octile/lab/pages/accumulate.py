"""`octile lab accumulate`: the error of long FP8 sums, as a table in the terminal and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from rich.progress import track

from octile.formats import FloatFormat, by_name
from octile.lab.accumulate import AccumulationError, accumulate
from octile.lab.pages.page import (
    Section,
    parse_counts,
    parse_intervals,
    parse_words,
    write_lab_page,
)
from octile.lab.tensor_core.architectures import EVIDENCE, find_instruction
from octile.lab_options.accumulate import Options
from octile.report.console import Console
from octile.report.style import COLOR, PHONE, WIDE, label_ends, style_axes
from octile.report.svg import make_chart
from octile.report.table import Table, screen_table
from octile.text import format_bytes, format_signed
from octile.train.memory.device import device_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 256  # rows of each operand
BYTES_PER_VALUE = (
    24  # maximum memory per value of an operand, measured as the peak of the process on every architecture
)
MEASURE = f"Errors are relative to the RMS of the exact results; the worst is that of {SIDE}×{SIDE} sums."
COLUMNS = ("data", "K", "promoted", "RMS error", "worst error", "bias")
FLAT = 1.1  # the worst of some ten thousand sums varies by this factor between draws
DATA = {"normal": "both signs, N(0, 1)", "positive": "one sign, |N(0, 1)|"}
INTERVAL_COLOR = {None: "vermilion", 128: "blue", 32: "green", 64: "cyan", 256: "purple"}
Key = tuple[str, int | None, int]  # data, promote_every, K


def run(options: Options) -> None:
    """Run the experiment, and show its results.

    Raises:
        ValueError: an option is invalid (see `octile.lab.accumulate.accumulate`); the architecture has no instruction
            for the format, or promotes itself; the operands of the longest sums do not fit into memory.
    """
    intervals = parse_intervals(options.promote)
    ks, kinds, arch = parse_counts("k", options.k), parse_words(options.data), options.arch
    _check_memory(max(ks))
    fmt = by_name[options.fmt]
    assert isinstance(fmt, FloatFormat)
    assert fmt.dtype is not None
    try:
        core = find_instruction(arch, fmt.dtype, fmt.dtype)
    except TypeError:
        raise ValueError(f"arch {arch!r} has no instruction for {options.fmt.upper()}: choose another") from None
    if core.promotes_every and any(intervals):
        raise ValueError(
            f"promote must be never for {arch}: its {core.name} itself adds every {core.promotes_every} products in"
            " FP32"
        )
    if wrong := [interval for interval in intervals if interval and interval % core.terms]:
        raise ValueError(f"promote must be multiples of {core.terms}, the products of a step, not {wrong[0]}")
    accumulate([1], kinds, intervals, arch, fmt, rows=1, columns=1)  # raises an error for invalid options
    console = Console(stderr=True)
    cases = [(kind, k) for kind in kinds for k in ks]
    steps = track(cases, "summing", console=console, transient=True, disable=not console.is_terminal)
    rows: list[AccumulationError] = [
        row for kind, k in steps for row in accumulate([k], [kind], intervals, arch, fmt, SIDE, SIDE)
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    caption = describe_errors(rows, arch)
    chart = make_chart("Worst error against K", caption, lambda f: draw_errors(f, rows), (WIDE, 340), (PHONE, 620))
    lead = (
        f"GEMMs of random {options.fmt.upper()} matrices, summed as by {core.name} of {arch}: {core.terms} products per"
        f" step with {core.fraction_bits} fraction bits. {MEASURE} The model"
        f" of this instruction: {EVIDENCE[core.evidence]}."
    )
    note = "Bias is the mean error; it is negative if results are too small."
    sections = [Section("The error of a long sum", [chart]), Section("In figures", table=table(rows), note=note)]
    page = write_lab_page(options.out, "Accumulation", lead, sections)
    screen = Console()
    screen.print(screen_table(short_table(rows)))
    screen.print_line(MEASURE)
    screen.print_line(caption)
    screen.print_line(f"picture: {page}")


def _check_memory(k: int) -> None:
    available = device_memory(torch.device("cpu"))
    needed, max_k = 2 * SIDE * BYTES_PER_VALUE * k, available // (2 * SIDE * BYTES_PER_VALUE)
    if needed > available:
        raise ValueError(
            f"k is {k:,}, whose operands of {SIDE} rows need about {format_bytes(needed)}, but the machine has"
            f" {format_bytes(available)} of memory: k can be at most {max_k:,}"
        )


def table(rows: Sequence[AccumulationError]) -> Table:
    """Return the rows as a table."""
    cells = [(DATA.get(r.data, r.data), f"{r.k:,}", interval_name(r.promote_every), *_errors(r)) for r in rows]
    return Table(COLUMNS, cells)


def short_table(rows: Sequence[AccumulationError]) -> Table:
    """Return the worst errors as a table with one column per promotion interval."""
    intervals = list(dict.fromkeys(row.promote_every for row in rows))
    worst = {(row.data, row.k, row.promote_every): share(row.worst) for row in rows}
    cases = dict.fromkeys((row.data, row.k) for row in rows)
    cells = [(DATA.get(data, data), f"{k:,}", *(worst[data, k, i] for i in intervals)) for data, k in cases]
    return Table(("worst error, promoted", "K", *map(interval_name, intervals)), cells)


def interval_name(interval: int | None) -> str:
    """Return a promotion interval as text."""
    return "never" if interval is None else f"every {interval}"


def _errors(row: AccumulationError) -> tuple[str, str, str]:
    return share(row.error), share(row.worst), signed_share(row.bias)


def share(value: float) -> str:
    """Format a share as a percentage with two significant digits: 0.0203 → "2.0%", 0.00007 → "0.0070%"; 0 is "0%"."""
    return f"{value:.{_digits(value)}%}"


def signed_share(value: float) -> str:
    """Format a share as a percentage with its sign and two significant digits: −0.0203 → "−2.0%"."""
    return format_signed(value, f".{_digits(value)}%")


def _digits(share: float) -> int:
    return 0 if not share else next((d for d in range(6) if abs(100 * share) >= 10.0 ** (1 - d)), 6)


def draw_errors(figure: Figure, rows: Sequence[AccumulationError]) -> None:
    """Draw the worst error against K, with one line per interval and one panel per kind of data."""
    kinds = list(dict.fromkeys(row.data for row in rows))
    is_wide = figure.get_figwidth() > 1.5 * figure.get_figheight()
    shape = (1, len(kinds)) if is_wide else (len(kinds), 1)
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).flat
    ks = sorted({row.k for row in rows})
    low = min((row.worst for row in rows if row.worst), default=1e-8) / 2  # an error of zero is drawn on the axis
    top = max(4 * max(row.worst for row in rows), 10 * low)
    for axes, kind in zip(panels, kinds, strict=True):
        style_axes(axes, "K, the number of products", f"worst error / RMS: {DATA.get(kind, kind)}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(low, top)
        axes.set_xlim(ks[0] / 1.1, ks[-1] * 1.1)
        shown = ks[:: 1 if len(ks) < 6 else 2]
        axes.set_xticks(shown, [f"{k:,}" for k in shown])
        ticks = [t for t in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) if low <= t <= top]
        axes.set_yticks(ticks, [f"{100 * t:g}%" for t in ticks])
        axes.minorticks_off()
        labels = []
        for interval in dict.fromkeys(row.promote_every for row in rows):
            own = [row for row in rows if (row.data, row.promote_every) == (kind, interval)]
            points = sorted((row.k, max(row.worst, low)) for row in own)
            color = COLOR[INTERVAL_COLOR.get(interval, "muted")]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3.5)
            labels.append((points[-1][1], interval_name(interval), color))
        label_ends(figure, axes, labels)


def describe_errors(rows: Sequence[AccumulationError], arch: str) -> str:
    """Describe the worst errors at K = 4096, or else the largest K, and their change from the smallest K on."""
    ks = {row.k for row in rows}
    k = 4096 if 4096 in ks else max(ks)
    intervals = {row.promote_every for row in rows}
    shortest = min((interval for interval in intervals if interval is not None), default=None)
    compared = [i for i in dict.fromkeys((128 if 128 in intervals else shortest, None)) if i in intervals]
    worst = {(row.data, row.promote_every, row.k): row.worst for row in rows}
    errors = [
        f"the worst error of sums of {signs} is"
        f" {' and '.join(f'{share(worst[kind, i, k])} {_when(i)}' for i in compared)}"
        for kind, signs in _signs(rows).items()
    ]
    return f"On {arch}, K = {k:,}: {'; '.join(errors)}.{_describe_trends(rows, worst, compared, min(ks), max(ks))}"


def _describe_trends(
    rows: Sequence[AccumulationError], worst: Mapping[Key, float], compared: Sequence[int | None], first: int, last: int
) -> str:
    if first == last:
        return ""
    trends = [
        f"{'that' if number else 'the worst error'} of sums of {signs} "
        + " and ".join(f"{_trend(worst[kind, i, first], worst[kind, i, last])} {_when(i)}" for i in compared)
        for number, (kind, signs) in enumerate(_signs(rows).items())
    ]
    text = f" From K = {first:,} to {last:,} {'; '.join(trends)}."
    promoted = [
        (worst[kind, i, first], worst[kind, i, last]) for kind in _signs(rows) for i in compared if i is not None
    ]
    if promoted and all(end <= FLAT * begin for begin, end in promoted):
        text += " With promotion it does not grow, because the tensor core sums only one interval at a time."
    return text


def _signs(rows: Sequence[AccumulationError]) -> dict[str, str]:
    return {row.data: "both signs" if row.data == "normal" else "one sign" for row in rows}


def _when(interval: int | None) -> str:
    return "without promotion" if interval is None else f"with promotion {interval_name(interval)}"


def _trend(begin: float, end: float) -> str:
    """Describe the change of an error."""
    if not begin:
        return f"goes from 0 to {share(end)}" if end else "stays 0"
    if begin / FLAT <= end <= FLAT * begin:
        return "stays the same"
    if end < begin:
        return f"falls by {1 - end / begin:.0%}"
    return f"grows {end / begin:.0f}-fold" if end >= 2 * begin else f"grows by {end / begin - 1:.0%}"
