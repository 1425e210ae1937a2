"""`octile lab hardware`: a table in the terminal, and a page of pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octile.lab.capture import load
from octile.lab.hardware import HBM, MX, Hardware, Suggestion, hardware
from octile.lab.pages import hardware_figures as draw
from octile.lab.pages.formats import screen_table
from octile.lab.pages.page import Section, Table, write_lab_page
from octile.lab.tensor_core.architectures import EVIDENCE, find_instruction
from octile.lab.what_if import chosen, decibels
from octile.recipe import GemmName
from octile.report.page import format_bytes
from octile.report.style import PHONE, WIDE
from octile.report.svg import make_chart


def show_hardware(
    path: Path,
    layers: str,
    products: tuple[GemmName, ...] | None,
    sample: int,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Reads a capture, measures and counts, and shows what was found.

    Raises:
        FileNotFoundError, ValueError: the capture, or what was chosen of it, is refused.
    """
    if sample < 1:
        raise ValueError(f"sample must be at least 1, not {sample}")
    capture = load(path)
    measured = chosen(capture, layers, products)
    weights = {p.layer.rpartition(".")[0] if p.expert is not None else p.layer for p in measured}
    everything = [  # all experts of the chosen layers: errors come from the busiest, bytes from all
        p
        for p in capture.products
        if (p.layer.rpartition(".")[0] if p.expert is not None else p.layer) in weights
        and (products is None or p.product in products)
    ]
    found = hardware(everything, measured, sample, seed)
    if as_json:
        print(json.dumps(as_plain(found), indent=1, allow_nan=False))
        return
    curve = draw.Curve(
        [a.fraction_bits for a in found.accumulators],
        [decibels(a.accumulation) for a in found.accumulators],
        decibels(found.promoted),
        decibels(found.cast),
        found.longest,
    )
    rows = [_moved(s) for s in found.suggestions]
    errors = [row for row in rows if row.snr_db is not None]
    charts = [
        make_chart("Bytes", draw.say_moved(rows, HBM), lambda f: draw.draw_moved(f, rows), (WIDE, 330), (PHONE, 330))
    ]
    if errors:
        charts.insert(
            0,
            make_chart(
                "Values", draw.say_errors(errors), lambda f: draw.draw_errors(f, errors), (WIDE, 200), (PHONE, 200)
            ),
        )
    if any(snr is not None for snr in curve.snr_db):
        charts.insert(
            0,
            make_chart(
                "A longer accumulator",
                draw.say_bits(curve),
                lambda f: draw.draw_bits(f, curve),
                (WIDE, 320),
                (PHONE, 300),
            ),
        )
    lead = (
        f"What the suggestions of DeepSeek-V3 to hardware makers would bring to the products of step {capture.step} of"
        f" the run {capture.run}: errors computed on {found.products} of them ({sample} rows of each operand drawn with"
        f" seed {seed}; of experts the busiest), bytes counted over all {len(everything)}."
    )
    page = write_lab_page(
        out,
        "Hardware",
        lead,
        [Section("In pictures", charts), Section("In figures", table=table(found), note=_note())],
    )
    console = Console()
    console.print(screen_table(short_table(found)))
    console.print(draw.say_bits(curve), highlight=False)
    console.print(f"pictures: {page}", highlight=False, soft_wrap=True)


def table(found: Hardware) -> Table:
    """The suggestions as text."""
    columns = ("suggestion", "what moves", "today", "then", "saved", "dB today", "then")
    return Table(columns, [(s.name, f"{s.moved}: {s.formula}", *_figures(s)) for s in found.suggestions])


def short_table(found: Hardware) -> Table:
    """As a terminal of 80 columns shows it."""
    rows = [(s.name, *_figures(s)) for s in found.suggestions]
    return Table(("suggestion", "today", "then", "saved", "dB today", "then"), rows)


def _figures(s: Suggestion) -> tuple[str, ...]:
    snr = ("–", "–") if s.noise is None else tuple(_db(noise) for noise in s.noise)
    return format_bytes(s.bytes.today), format_bytes(s.bytes.then), f"{s.bytes.saved:.0%}", *snr


def _db(noise: float) -> str:
    db = decibels(noise)
    return "exact" if db is None else f"{db:.2f}"


def _moved(s: Suggestion) -> draw.Moved:
    snr = None
    if s.noise is not None:
        today, then = (decibels(noise) for noise in s.noise)
        snr = (today, then) if today is not None and then is not None else None
    return draw.Moved(s.name, s.moved, s.bytes.today, s.bytes.then, snr)


def _note() -> str:
    mx = find_instruction(MX.arch, torch.float8_e4m3fn, torch.float8_e4m3fn, scaled=True)
    return (
        "s is the bytes of a value in FP8 with its share of a scale: 1 and 4 more for each 1×128 tile. Each tensor"
        " counts once for every kernel that reads or writes it. Transposed reads: wgrad of x cast once, against x cast"
        f" again along the tokens. Scaling in the tensor core: MX on sm_100 ({EVIDENCE[mx.evidence]}), against"
        " 1×128 tiles promoted every 128 on sm_90. Longer accumulation: 25 fraction bits never promoted, against 13"
        " promoted every 128, both with one scale a tensor. Communication off the SMs is nothing that a capture of one"
        " step's products can say."
    )


def as_plain(found: Hardware) -> dict[str, Any]:
    """For JSON."""
    return {
        "suggestions": [
            {
                "name": s.name,
                "moved": s.moved,
                "formula": s.formula,
                "bytes": asdict(s.bytes),
                "snr_db": None if s.noise is None else [decibels(noise) for noise in s.noise],
            }
            for s in found.suggestions
        ],
        "accumulators": [
            {
                "fraction_bits": a.fraction_bits,
                "accumulation_snr_db": decibels(a.accumulation),
                "total_snr_db": decibels(a.total),
            }
            for a in found.accumulators
        ],
        "promoted_snr_db": decibels(found.promoted),
        "cast_snr_db": decibels(found.cast),
        "longest_sum": found.longest,
        "products": found.products,
    }
