"""`octile lab formats`: the properties of every number format, as a table in the terminal and as a page of figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from octile.formats import BF16, E2M1, E4M3, E5M2, E5M6, FP16, FP32, INT8, UE8M0
from octile.lab.formats import (
    ALL,
    Facts,
    add_many_times,
    facts,
    gaps,
    octaves_below_amax,
    positive_values,
    stored_bits,
    tile_errors,
    underflow,
    worst_relative_error,
)
from octile.lab.pages import formats_figures as draw
from octile.lab.pages import real_tensors_figures as real
from octile.lab.pages.figures import SNR_MEANING
from octile.lab.pages.page import Section, power, write_lab_page
from octile.lab.real_tensors import RealTensors, real_tensors
from octile.lab_options.formats import Options
from octile.report.console import Console
from octile.report.style import PHONE, WIDE
from octile.report.svg import Chart, make_chart
from octile.report.table import Table, screen_table
from octile.text import format_quantity

OCTAVES = list(range(-20, 18))
UPDATE, TIMES = 1e-3, 1000
LOSS_SCALE = 2.0**16
COLUMNS = ("format", "bits", "largest", "normal ≥", "smallest", "epsilon", "values", "in 1…2", "octaves", "bits/FP32")


def run(options: Options) -> None:
    """Print the table, and write the page.

    Raises:
        FileNotFoundError, ValueError: the run is not the folder of a finished run, or is damaged.
    """
    if options.json:
        print(json.dumps([asdict(facts(fmt)) for fmt in ALL], indent=2))
        return
    console = Console()
    tensors = real_tensors(options.run)  # raises an error for a bad run before anything is printed
    console.print(screen_table(formats_table()))
    console.print_line(f"pictures: {write_formats_page(options.out, tensors)}")


def formats_table() -> Table:
    """Return the properties of every format as a table."""
    return Table(COLUMNS, [_as_text(facts(fmt)) for fmt in ALL])


def write_formats_page(path: Path, tensors: RealTensors) -> Path:
    """Write the page, with the given activations and gradients."""
    rows: list[draw.Facts] = [asdict(facts(fmt)) for fmt in ALL]
    return write_lab_page(
        path,
        "Number formats",
        "The values of floating-point formats with few bits, the gaps between them, and their effects on training."
        f" Activations and gradients come from {tensors.source}.",
        [
            Section("In figures", table=formats_table(), note=_note()),
            Section(
                "Values and gaps", [_ranges(rows), _number_line(), _log_line(rows), _gaps(rows), _relative_error()]
            ),
            Section("Memory", [_bytes()]),
            Section("Underflow and lost updates", [_staircase(), _lost_update(rows), _underflow(tensors)]),
            Section("E4M3 vs. INT8", _int8(tensors), note=SNR_MEANING),
        ],
    )


def _as_text(f: Facts) -> tuple[str, ...]:
    return (
        draw.label(f.name),
        str(f.bits),
        power(f.largest),
        power(f.smallest_normal),
        power(f.smallest),
        power(f.epsilon),
        format_quantity(f.finite_values),
        format_quantity(f.between_1_and_2),
        f"{f.octaves:.1f}",
        f"{f.share_of_fp32:.1%}",
    )


def _note() -> str:
    return (
        "Values from “normal” on have full precision. “smallest” is the smallest positive value, which is subnormal if"
        " the format has subnormal numbers. Epsilon is the gap between 1 and the next value; “in 1…2” counts the values"
        " strictly between 1 and 2. “octaves” counts the doublings from the smallest to the largest value; “bits/FP32”"
        " is the size relative to FP32. UE8M0 is a format for scales: powers of two without sign or zero. E2M1 is the"
        " FP4 format of NVFP4 and MX."
    )


def _ranges(rows: list[draw.Facts]) -> Chart:
    return make_chart(
        "Range",
        draw.describe_ranges(rows),
        lambda f: draw.draw_ranges(f, rows),
        (WIDE, 300),
        (PHONE, 300),
    )


def _number_line() -> Chart:
    values = {fmt.name: positive_values(fmt) for fmt in (E4M3, E5M2, INT8, E2M1)}
    return make_chart(
        "The number line of a tile",
        draw.describe_number_line(values),
        lambda f: draw.draw_number_line(f, values),
        (WIDE, 240),
        (PHONE, 240),
    )


def _log_line(rows: list[draw.Facts]) -> Chart:
    values = {fmt.name: positive_values(fmt) for fmt in (E4M3, E5M2, INT8, E2M1)}
    return make_chart(
        "The number line in doublings",
        draw.describe_log_line(rows),
        lambda f: draw.draw_log_line(f, values, rows),
        (WIDE, 270),
        (PHONE, 270),
    )


def _gaps(rows: list[draw.Facts]) -> Chart:
    found = {fmt.name: gaps(fmt) for fmt in (FP16, E5M6, E4M3, E5M2, INT8, E2M1)}
    return make_chart(
        "The gap to the next value",
        draw.describe_gaps(rows),
        lambda f: draw.draw_gaps(f, found),
        (WIDE, 300),
        (PHONE, 300),
    )


def _relative_error() -> Chart:
    errors = {f.name: worst_relative_error(f, OCTAVES) for f in (INT8, E2M1, E5M2, E4M3, E5M6, BF16, FP16)}
    return make_chart(
        "Relative error against magnitude",
        draw.describe_relative_error(errors),
        lambda f: draw.draw_relative_error(f, OCTAVES, errors),
        (WIDE, 340),
        (PHONE, 340),
    )


def _bytes() -> Chart:
    shares: Mapping[str, tuple[str, float]] = {
        "FP32": ("fp32", FP32.bits),
        "BF16 or FP16": ("bf16", BF16.bits),
        "E5M6, 1×128 tiles": ("e5m6", stored_bits(E5M6, (1, 128))),
        "E4M3, 1×128 tiles": ("e4m3", stored_bits(E4M3, (1, 128))),
        "E4M3, 128×128 blocks": ("e4m3", stored_bits(E4M3, (128, 128))),
        "E2M1, 1×16 (NVFP4)": ("e2m1", stored_bits(E2M1, (1, 16), E4M3)),
        "E2M1, 1×32 (MXFP4)": ("e2m1", stored_bits(E2M1, (1, 32), UE8M0)),
    }
    return make_chart(
        "Memory, scales included",
        draw.describe_bytes(shares),
        lambda f: draw.draw_bytes(f, shares),
        (WIDE, 300),
        (PHONE, 300),
    )


def _staircase() -> Chart:
    x = torch.linspace(1, 2, 10_000)
    rounded = {fmt.name: fmt.round(x).double().numpy() for fmt in (FP16, BF16, E4M3, E5M2)}
    return make_chart(
        "Between 1 and 2",
        draw.describe_staircase(rounded),
        lambda f: draw.draw_staircase(f, x.double().numpy(), rounded),
        (WIDE, 280),
        (PHONE, 900),
    )


def _lost_update(rows: list[draw.Facts]) -> Chart:
    weights = {fmt.name: add_many_times(fmt, UPDATE, TIMES) for fmt in (FP32, FP16, BF16, E4M3)}
    epsilon = {fmt.name: fmt.epsilon for fmt in (FP32, FP16, BF16, E4M3)}
    return make_chart(
        "The lost update",
        draw.describe_lost_update(weights, UPDATE, epsilon),
        lambda f: draw.draw_lost_update(f, weights),
        (WIDE, 280),
        (PHONE, 280),
    )


def _underflow(tensors: RealTensors) -> Chart:
    """Make the chart of the layer that loses most gradients in FP16."""
    lost = {layer: underflow(dy, 1.0).lost for layer, dy in tensors.dy.items()}
    layer = max(lost, key=lambda name: lost[name])
    dy = tensors.dy[layer].abs().double().flatten()
    edges = torch.arange(-60.0, 41.0, dtype=torch.float64)
    count = torch.histogram(dy[dy > 0].log2().clamp(-60, 39.5), edges).hist.numpy()
    filled = np.flatnonzero(count)
    shown = np.arange(filled[0], filled[-1] + 1)
    scaled = underflow(tensors.dy[layer], LOSS_SCALE)
    in_tiles = tile_errors(tensors.dy[layer], E4M3).flushed
    data = real.Gradients(
        layer, edges.numpy()[shown], count[shown], LOSS_SCALE, lost[layer], scaled.lost, scaled.overflowed, in_tiles
    )
    return make_chart(
        "FP16's underflow, and loss scaling",
        real.describe_underflow(data),
        lambda f: real.draw_underflow(f, data),
        (WIDE, 280),
        (PHONE, 300),
    )


def _int8(tensors: RealTensors) -> list[Chart]:
    errors = {layer: (tile_errors(x, E4M3), tile_errors(x, INT8)) for layer, x in tensors.x.items()}
    layer = max(errors, key=lambda name: errors[name][1].flushed)
    x = tensors.x[layer]
    octave = octaves_below_amax(x)[x != 0]
    share = torch.bincount(octave, minlength=len(errors[layer][0].error_by_size)) / octave.numel()
    data = real.Int8AgainstE4M3(
        layer,
        share.double().numpy(),
        {e.fmt: e.error_by_size for e in errors[layer]},
        {name: (a.flushed, b.flushed) for name, (a, b) in errors.items()},
        {name: (a.snr_db, b.snr_db) for name, (a, b) in errors.items()},
    )
    height = 90 + 18 * len(data.flushed)
    return [
        make_chart(
            "INT8 vs. E4M3, by magnitude",
            real.describe_int8(data),
            lambda f: real.draw_int8(f, data),
            (WIDE, 400),
            (PHONE, 400),
        ),
        make_chart(
            "What INT8 flushes to zero",
            real.describe_flushed(data),
            lambda f: real.draw_flushed(f, data),
            (WIDE, height),
            (PHONE, height),
        ),
    ]
