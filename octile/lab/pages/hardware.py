"""`octile lab hardware`: what other hardware would bring to a captured step, as a table and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from octile.lab.capture import CapturedGemm, load, parse_gemm_names
from octile.lab.hardware import HBM, MX, Hardware, Suggestion, hardware
from octile.lab.pages import hardware_figures as draw
from octile.lab.pages.figures import TERMS
from octile.lab.pages.page import Section, write_lab_page
from octile.lab.tensor_core.architectures import EVIDENCE, find_instruction
from octile.lab.what_if import noise_to_db, select_gemms
from octile.lab_options.hardware import Options
from octile.report.console import Console
from octile.report.style import PHONE, WIDE
from octile.report.svg import Chart, make_chart
from octile.report.table import Table, screen_table
from octile.text import format_bytes, format_count, format_signed


def run(options: Options) -> None:
    """Read a capture, measure errors and count bytes, and show the results.

    Raises:
        FileNotFoundError, ValueError: the capture cannot be read, or an option is invalid.
    """
    names = parse_gemm_names(options.products) if options.products else None
    capture = load(options.capture)
    measured = select_gemms(capture, options.layers, names)
    weights = {_weight(g) for g in measured}
    # errors are measured for one expert of a layer, bytes are counted for all
    counted = [g for g in capture.gemms if _weight(g) in weights and (names is None or g.gemm in names)]
    found = hardware(counted, measured, options.sample, options.seed)
    if options.json:
        print(json.dumps(as_json(found), indent=1, allow_nan=False))
        return
    curve = draw.SnrCurve(
        [a.fraction_bits for a in found.accumulators],
        [noise_to_db(a.accumulation) for a in found.accumulators],
        noise_to_db(found.promoted),
        noise_to_db(found.cast),
        found.longest,
    )
    lead = (
        f"What DeepSeek-V3's suggestions to hardware makers would bring to the {format_count(len(counted), 'GEMM')} of"
        f" step {capture.step:,} of the run “{capture.run}”. Bytes are counted for all of them. Errors are measured on"
        f" {found.gemms:,}: {format_count(options.sample, 'row')} of each operand, drawn with seed {options.seed}; of"
        " each layer's experts, the one with most tokens."
    )
    sections = [
        Section("Terms", note=TERMS),
        Section("In pictures", _charts(curve, [_change(s) for s in found.suggestions])),
        Section("In figures", table=table(found), note=_note()),
    ]
    page = write_lab_page(options.out, "Hardware", lead, sections)
    console = Console()
    console.print(screen_table(short_table(found)))
    console.print_line(draw.describe_bits(curve))
    console.print_line(f"pictures: {page}")


def _weight(g: CapturedGemm) -> str:
    """Return the name of a GEMM's weight: the layer's without an expert's number."""
    return g.layer if g.expert is None else g.layer.rpartition(".")[0]


def _charts(curve: draw.SnrCurve, changes: Sequence[draw.Change]) -> list[Chart]:
    errors = [change for change in changes if change.snr_db is not None]
    charts = []
    if any(snr is not None for snr in curve.snr_db):
        caption = draw.describe_bits(curve)
        charts.append(
            make_chart("A longer accumulator", caption, lambda f: draw.draw_bits(f, curve), (WIDE, 320), (PHONE, 300))
        )
    if errors:
        caption = draw.describe_errors(errors)
        charts.append(make_chart("Errors", caption, lambda f: draw.draw_errors(f, errors), (WIDE, 200), (PHONE, 200)))
    if any(change.today for change in changes):
        caption = draw.describe_bytes(changes, HBM)
        charts.append(make_chart("Bytes", caption, lambda f: draw.draw_bytes(f, changes), (WIDE, 330), (PHONE, 330)))
    return charts


def table(found: Hardware) -> Table:
    """Return the suggestions as a table."""
    columns = ("suggestion", "what moves", "today", "then", "saved", "dB today", "then")
    return Table(columns, [(s.name, f"{s.moved}: {s.formula}", *_cells(s)) for s in found.suggestions])


def short_table(found: Hardware) -> Table:
    """Return the suggestions as a table for a terminal of 80 columns."""
    rows = [(s.name, *_cells(s)) for s in found.suggestions]
    return Table(("suggestion", "today", "then", "saved", "dB today", "then"), rows)


def _cells(s: Suggestion) -> tuple[str, ...]:
    snr = ("–", "–") if s.noise is None else tuple(_db(noise) for noise in s.noise)
    return (
        format_bytes(s.bytes.today),
        format_bytes(s.bytes.then),
        format_signed(s.bytes.saved, ".0%").removeprefix("+"),
        *snr,
    )


def _db(noise: float) -> str:
    db = noise_to_db(noise)
    return "exact" if db is None else f"{db:.2f}"


def _change(s: Suggestion) -> draw.Change:
    snr = None
    if s.noise is not None:
        today, then = (noise_to_db(noise) for noise in s.noise)
        snr = (today, then) if today is not None and then is not None else None
    return draw.Change(s.name, s.moved, s.bytes.today, s.bytes.then, snr)


def _note() -> str:
    mx = find_instruction(MX.arch, torch.float8_e4m3fn, torch.float8_e4m3fn, scaled=True)
    return (
        "s is the bytes of an FP8 value with its share of a scale: 1, and 4 for each 1×128 tile. Each tensor counts"
        " once for every kernel that reads or writes it. Transposed reads: wgrad with x quantized once, compared with x"
        f" requantized along the tokens. Scaling in the tensor core: MX on sm_100 ({EVIDENCE[mx.evidence]}), compared"
        " with 1×128 tiles promoted every 128 on sm_90. Longer accumulation: 25 fraction bits without promotion,"
        " compared with 13 promoted every 128, both with per-tensor scaling. A capture of one step cannot show the"
        " benefit of communication off the SMs."
    )


def as_json(found: Hardware) -> dict[str, Any]:
    """Return the results as JSON values."""
    return {
        "suggestions": [
            {
                "name": s.name,
                "moved": s.moved,
                "formula": s.formula,
                "bytes": asdict(s.bytes),
                "snr_db": None if s.noise is None else [noise_to_db(noise) for noise in s.noise],
            }
            for s in found.suggestions
        ],
        "accumulators": [
            {
                "fraction_bits": a.fraction_bits,
                "accumulation_snr_db": noise_to_db(a.accumulation),
                "total_snr_db": noise_to_db(a.total),
            }
            for a in found.accumulators
        ],
        "promoted_snr_db": noise_to_db(found.promoted),
        "cast_snr_db": noise_to_db(found.cast),
        "longest_sum": found.longest,
        "products": found.gemms,
    }
