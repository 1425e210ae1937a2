"""Figures of `octile lab what-if`: errors by format, by accumulation, by layer, and by training step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.lab.capture import CapturedGemm
from octile.lab.pages.figures import GEMM_COLOR, Heat, draw_heat, is_wide, legend, short_names
from octile.lab.pages.page import Section
from octile.lab.variants import REFERENCES, Variant
from octile.lab.what_if import GemmErrors, WhatIf, noise_to_db
from octile.recipe import GEMMS, GemmName
from octile.report.style import COLOR, PHONE, WIDE, style_axes
from octile.report.svg import Chart, make_chart
from octile.text import format_count, format_signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE_COLOR = {
    "float32": "blue",
    "up": "green",
    "nearest": "rose",
    "ocp": "purple",
    "down": "vermilion",
    "e4m3": "cyan",
}
SCALE_LABEL = {
    "float32": "FP32 scale",
    "up": "power of two, up",
    "nearest": "nearest power of two",
    "ocp": "MX rule",
    "down": "power of two, down",
    "e4m3": "E4M3 scale",
}


def format_label(fmt: str) -> str:
    """Return the name of a format for pages."""
    return {"mx": "MXFP8", "nvfp4": "NVFP4"}.get(fmt, fmt.upper())


def block_label(block: str) -> str:
    """Return the name of a block for pages."""
    return block.replace("x", "×")


def main_sections(found: WhatIf, reference: Variant, gemms: Sequence[CapturedGemm]) -> list[Section]:
    """Make the sections about quantization, sums and layers; without a chart where nothing has an error."""
    losses = quantization_losses(found)
    sections = [Section("Quantization", [_quantization_chart(found, losses)])] if losses else []
    sums = sum_losses(found, reference)
    quantization = _mean_db(found.rows_of(reference), "quantization")
    if sums and quantization is not None:
        longest = max(g.a.shape[1] for g in gemms)
        name = f"{format_label(reference.fmt)} {block_label(reference.block)}"
        size = 150 + 26 * len(sums)
        caption = describe_sums(sums, name, quantization, longest)
        if any(snr is not None for loss in sums for snr in loss.snr_db.values()):
            chart = make_chart(
                "How the tensor core sums",
                caption,
                lambda f: draw_sums(f, sums, quantization),
                (WIDE, size),
                (PHONE, size),
            )
            sections.append(Section("Accumulation", [chart]))
        else:
            sections.append(Section("Accumulation", note=caption))
    heat = heat_by_layer(found.rows_of(reference))
    if not heat.known:
        return [*sections, Section("Layers", note=f"{reference} is exact for all layers of these GEMMs.")]
    return [*sections, Section("Layers", [_heat_chart("Layer by layer", describe_heat(heat, str(reference)), heat)])]


def steps_section(steps: tuple[GemmName, Heat] | None, reference: Variant) -> list[Section]:
    """Make the section that compares layers between steps, if there are several."""
    if steps is None or not steps[1].known:
        return []
    gemm, heat = steps
    caption = describe_steps(heat, gemm, str(reference))
    return [Section("During training", [_heat_chart("Layer by step", caption, heat)])]


def _heat_chart(title: str, caption: str, heat: Heat) -> Chart:
    return make_chart(
        title, caption, lambda f: draw_heat(f, heat, "SNR (dB), deeper is worse"), (WIDE, heat.height),
        (PHONE, heat.height),
    )  # fmt: skip


def _quantization_chart(found: WhatIf, losses: Sequence[QuantizationLoss]) -> Chart:
    rows = len({(loss.fmt, loss.block) for loss in losses})
    gemms = len({(row.layer, row.gemm) for row in found.rows})
    return make_chart(
        "Formats, blocks and scales",
        describe_quantization(losses, gemms),
        lambda f: draw_quantization(f, losses),
        (WIDE, 130 + 22 * rows),
        (PHONE, 170 + 22 * rows),
    )


def _mean_db(rows: Iterable[GemmErrors], part: str) -> float | None:
    noise = [getattr(row, part).noise for row in rows]
    return noise_to_db(math.fsum(noise) / len(noise)) if noise else None


@dataclass(frozen=True)
class QuantizationLoss:
    """Mean SNR of one way to quantize over all GEMMs, with exact sums; bits per value, scales included."""

    fmt: str
    block: str
    scale: str
    snr_db: float
    bits: float


def quantization_losses(found: WhatIf) -> list[QuantizationLoss]:
    """Return the loss of each way to quantize, formats in the requested order, and best blocks first."""
    rows: dict[tuple[str, str, str], dict[tuple[str, str], GemmErrors]] = {}
    for row in found.rows:  # one row per GEMM: the quantization error is the same for all accumulators
        v = row.variant
        rows.setdefault((v.fmt, v.block, v.scale), {})[row.layer, row.gemm] = row
    losses = [
        QuantizationLoss(*key, db, math.fsum(row.bits for row in own.values()) / len(own))
        for key, own in rows.items()
        if (db := _mean_db(own.values(), "quantization")) is not None
    ]
    formats = list(dict.fromkeys(loss.fmt for loss in losses))
    best: dict[tuple[str, str], float] = {}
    for loss in losses:
        best[loss.fmt, loss.block] = max(best.get((loss.fmt, loss.block), -math.inf), loss.snr_db)
    return sorted(losses, key=lambda loss: (formats.index(loss.fmt), -best[loss.fmt, loss.block]))


def draw_quantization(figure: Figure, losses: Sequence[QuantizationLoss]) -> None:
    """Draw a row per format and block, with a dot per scale rule."""
    axes = figure.subplots()
    wide = is_wide(figure)
    rows = list(dict.fromkeys((loss.fmt, loss.block) for loss in losses))
    style_axes(axes, "SNR of the GEMMs (dB)", "right is better")
    for loss in losses:
        row = rows.index((loss.fmt, loss.block))
        axes.plot(loss.snr_db, row, "o", color=COLOR[SCALE_COLOR[loss.scale]], markersize=6.5, alpha=0.85)
    bits = {(loss.fmt, loss.block): loss.bits for loss in losses}
    names = [f"{format_label(fmt)} {block_label(block)}" for fmt, block in rows]
    axes.set_yticks(
        range(len(rows)), [f"{n}, {bits[r]:.3g} bits" if wide else n for n, r in zip(names, rows, strict=True)]
    )
    axes.set_ylim(len(rows) - 0.4, -0.7)
    axes.grid(axis="x")
    for at in range(1, len(rows)):
        if rows[at][0] != rows[at - 1][0]:
            axes.axhline(at - 0.5, color=COLOR["muted"], linewidth=0.6)
    legend(
        figure, {SCALE_LABEL[s]: SCALE_COLOR[s] for s in SCALE_COLOR if any(loss.scale == s for loss in losses)}, wide
    )


def describe_quantization(losses: Sequence[QuantizationLoss], gemms: int) -> str:
    """Describe the best and the worst way to quantize, and what rounding a scale down costs."""
    in_8_bits = [loss for loss in losses if loss.fmt not in ("e5m6", "nvfp4")]
    best = max(in_8_bits or losses, key=lambda loss: loss.snr_db)
    worst = min(in_8_bits or losses, key=lambda loss: loss.snr_db)
    text = (
        f"Each dot is one way to quantize, averaged over {format_count(gemms, 'GEMM')} of the run, with exact sums. The"
        f" best 8-bit one is {_name(best)} with {best.snr_db:.1f} dB, and the worst is {_name(worst)} with"
        f" {worst.snr_db:.1f} dB."
    )
    drop = _drop(losses, "up", "down")
    if drop is not None:
        verb = "costs" if drop >= 0 else "gains"
        why = ", since the largest values of most blocks saturate (orange dots)" if drop >= 3 else ""
        text += f" Rounding a power-of-two scale down instead of up {verb} {abs(drop):.0f} dB on average{why}."
    int8, e4m3 = (max((c.snr_db for c in losses if c.fmt == fmt), default=None) for fmt in ("int8", "e4m3"))
    if int8 is not None and e4m3 is not None and int8 > e4m3:
        text += (
            f" The best INT8 dot is {int8 - e4m3:.1f} dB above the best E4M3 dot. The SNR is dominated by large values,"
            " and hides the small values that become zero in INT8."
        )
    return text


def _name(loss: QuantizationLoss) -> str:
    return f"{format_label(loss.fmt)} {block_label(loss.block)} with {SCALE_LABEL[loss.scale]}"


def _drop(losses: Sequence[QuantizationLoss], better: str, worse: str) -> float | None:
    snr = {(loss.fmt, loss.block, loss.scale): loss.snr_db for loss in losses}
    pairs = [
        snr[fmt, block, better] - db
        for (fmt, block, scale), db in snr.items()
        if scale == worse and (fmt, block, better) in snr
    ]
    return sum(pairs) / len(pairs) if pairs else None


@dataclass(frozen=True)
class SumLoss:
    """Mean accumulation SNR of one accumulator by GEMM; None where all sums are exact."""

    name: str
    snr_db: Mapping[str, float | None]


def sum_losses(found: WhatIf, reference: Variant) -> list[SumLoss]:
    """Return the loss of each accumulator with the reference's quantization, by GEMM."""
    losses = []
    for variant in dict.fromkeys(row.variant for row in found.rows):
        same = (variant.fmt, variant.block, variant.scale) == (reference.fmt, reference.block, reference.scale)
        if not same or variant.arch == "exact":
            continue
        rows = found.rows_of(variant)
        snr = {g: _mean_db([row for row in rows if row.gemm == g], "accumulation") for g in GEMMS}
        promoted = "" if variant.arch in REFERENCES else f", every {variant.promote}" if variant.promote else ", never"
        measured = {row.gemm for row in rows}
        losses.append(SumLoss(variant.arch + promoted, {g: db for g, db in snr.items() if g in measured}))
    return losses


def draw_sums(figure: Figure, sums: Sequence[SumLoss], quantization_db: float) -> None:
    """Draw a row per accumulator with a dot per GEMM, and the SNR of quantization as a line."""
    axes = figure.subplots()
    style_axes(axes, "SNR of accumulation alone (dB)", "right is better")
    for row, loss in enumerate(sums):
        for gemm, snr in loss.snr_db.items():
            if snr is not None:
                axes.plot(snr, row, "o", color=COLOR[GEMM_COLOR[gemm]], markersize=7, alpha=0.85)
    axes.axvline(quantization_db, color=COLOR["muted"], linewidth=1, linestyle=":")
    axes.annotate(" quantization", (quantization_db, -0.9), va="center", color=COLOR["muted"])
    axes.set_yticks(range(len(sums)), [loss.name for loss in sums])
    axes.set_ylim(len(sums) - 0.4, -1.4)
    axes.grid(axis="x")
    wide = is_wide(figure)
    legend(figure, {g: c for g, c in GEMM_COLOR.items() if any(g in loss.snr_db for loss in sums)}, wide)


def describe_sums(sums: Sequence[SumLoss], operands: str, quantization_db: float, longest: int) -> str:
    """Describe the worst accumulator, compared with quantization; `longest`: products in the longest sum."""
    known = [(snr, loss.name, gemm) for loss in sums for gemm, snr in loss.snr_db.items() if snr is not None]
    if not known:
        return f"With {operands}, all sums of these GEMMs are exact."
    snr, name, gemm = min(known)
    is_close = abs(snr - quantization_db) < 3
    verdict = (
        "about as much error as" if is_close else "less error than" if snr > quantization_db else "more error than"
    )
    return (
        f"SNR of accumulation alone, with operands in {operands}. The dotted line is the SNR of quantization alone"
        f" ({quantization_db:.1f} dB). The worst accumulator is {name}, with {snr:.0f} dB in {gemm}; it causes"
        f" {verdict} quantization. The longest sum of this run has {longest:,} products; longer sums lose more"
        " (octile lab accumulate)."
    )


def heat_by_layer(rows: Sequence[GemmErrors]) -> Heat:
    """Return the total SNR by layer and GEMM."""
    layers = list(dict.fromkeys(row.layer for row in rows))
    gemms = [g for g in GEMMS if any(row.gemm == g for row in rows)]
    db = {(row.layer, row.gemm): row.total.snr_db for row in rows}
    return Heat(layers, gemms, [[db.get((layer, g)) for g in gemms] for layer in layers])


def describe_heat(heat: Heat, variant: str) -> str:
    """Describe the GEMMs with the lowest and the highest SNR."""
    worst, best = min(heat.known), max(heat.known)
    return (
        f"SNR in dB of every layer's GEMMs with {variant}; a deeper orange is a lower SNR, as in the"
        f" legend. The lowest is in {worst[2]}"
        f" of {short_names([worst[1]])[0]} ({worst[0]:.1f} dB), the highest in {best[2]} of {short_names([best[1]])[0]}"
        f" ({best[0]:.1f} dB)."
    )


def describe_steps(heat: Heat, gemm: str, variant: str) -> str:
    """Describe how the SNR changes between the first and the last step, and the layer that loses most."""
    changes = [
        (cells[-1] - cells[0], row)
        for row, cells in zip(heat.rows, heat.cells, strict=True)
        if cells[0] is not None and cells[-1] is not None
    ]
    if not changes:
        return f"SNR in dB of {gemm} during training, with {variant}."
    change, layer = min(changes)
    first, last = heat.columns[0], heat.columns[-1]
    mean = sum(each for each, _ in changes) / len(changes)
    verb = "loses most" if change < 0 else "gains least"
    return (
        f"SNR in dB of {gemm} during training, with {variant}, from {first} to {last}. It changes by"
        f" {format_signed(mean, '.1f')} dB on average; {short_names([layer])[0]} {verb}"
        f" ({format_signed(change, '.1f')} dB)."
    )
