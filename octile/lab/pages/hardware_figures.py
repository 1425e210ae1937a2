"""Figures of `octile lab hardware`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.lab.pages.figures import is_wide
from octile.report.style import COLOR, label_ends, style_axes
from octile.text import format_bytes, format_signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SnrCurve:
    """SNR (dB) of the sums alone by fraction bits, without promotion; None where all sums are exact.

    Attributes:
        bits, snr_db: the points of the curve.
        promoted_db: the SNR with the first of these bits and promotion every 128; None if exact.
        cast_db: the SNR of quantization alone; None if exact.
        longest: the number of products in the longest sum.
    """

    bits: Sequence[int]
    snr_db: Sequence[float | None]
    promoted_db: float | None
    cast_db: float | None
    longest: int


def draw_bits(figure: Figure, curve: SnrCurve) -> None:
    """Draw the SNR of the sums against the fraction bits, with those of promotion and of quantization as lines."""
    axes = figure.subplots()
    style_axes(axes, "fraction bits of the tensor core", "SNR of the sums alone (dB); higher is better")
    known = [(bits, snr) for bits, snr in zip(curve.bits, curve.snr_db, strict=True) if snr is not None]
    bits, snr = zip(*known, strict=True)
    axes.plot(bits, snr, color=COLOR["blue"], marker="o", markersize=5)
    axes.set_xlim(curve.bits[0] - 0.4, curve.bits[-1] + 0.4)
    axes.set_xticks(curve.bits[:: 1 if is_wide(figure) else 3])
    labels = [(snr[-1], "without promotion", COLOR["blue"])]
    low = snr[0]
    if curve.cast_db is not None:
        axes.axhline(curve.cast_db, color=COLOR["muted"], linewidth=1, linestyle=":")
        labels.append((curve.cast_db, "quantization alone", COLOR["muted"]))
        low = min(low, curve.cast_db)
    if curve.promoted_db is not None:
        axes.axhline(curve.promoted_db, color=COLOR["green"], linewidth=1, linestyle="--")
        labels.append((curve.promoted_db, f"{curve.bits[0]} bits, every 128", COLOR["green"]))
    axes.set_ylim(bottom=low - 5)
    label_ends(figure, axes, labels)


def describe_bits(curve: SnrCurve) -> str:
    """Describe what more fraction bits bring, and how many match promotion."""
    first, second = curve.snr_db[0], curve.snr_db[1]
    if first is None:
        return "All sums of these GEMMs are exact with any of these numbers of fraction bits."
    gain = "" if second is None else f", and the next bit adds {second - first:.0f} dB"
    enough = next(
        (
            bits
            for bits, snr in zip(curve.bits, curve.snr_db, strict=True)
            if curve.promoted_db is not None and (snr is None or snr >= curve.promoted_db)
        ),
        None,
    )
    matches = f" {enough} bits would match promotion every 128." if enough else ""
    cast = curve.cast_db
    limit = (
        "" if cast is None else f" Quantization alone has {cast:.0f} dB; a much higher SNR of the sums has no benefit."
    )
    return (
        f"With per-tensor scaling, a sum can stay in the tensor core. With Hopper's {curve.bits[0]} fraction bits the"
        f" sums have {first:.0f} dB{gain}.{matches}{limit} The longest sum here has {curve.longest:,} products; longer"
        " sums lose more."
    )


@dataclass(frozen=True)
class Change:
    """The bytes that a suggestion affects, today and then, and the SNR today and then, or None if no value changes."""

    name: str
    moved: str
    today: int
    then: int
    snr_db: tuple[float, float] | None


def draw_bytes(figure: Figure, rows: Sequence[Change]) -> None:
    """Draw two bars per suggestion."""
    axes = figure.subplots()
    wide = is_wide(figure)
    style_axes(axes, "bytes today (gray) and then (blue)", "in one step")
    for at, row in enumerate(rows):
        axes.barh(at - 0.17, row.today, height=0.3, color=COLOR["muted"], alpha=0.55)
        axes.barh(at + 0.17, row.then, height=0.3, color=COLOR["blue"])
        saved = format_signed(row.then / row.today - 1, ".0%") if row.today else ""
        text = f"{format_bytes(row.then)}, {saved}" if wide else saved
        axes.annotate(text, (row.then, at + 0.17), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max(row.today for row in rows))
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value) if value else "0")
    axes.locator_params(axis="x", nbins=6 if wide else 3)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")


def describe_bytes(rows: Sequence[Change], memory: str) -> str:
    """Describe which suggestion saves most traffic of `memory`."""
    own = [row for row in rows if row.moved == memory and row.today]
    best = max(own, key=lambda row: row.today - row.then, default=None)
    if best is None:
        return "These GEMMs move no bytes that a suggestion would save."
    return (
        f"Counted from the shapes of the captured GEMMs. “{best.name}” saves most: memory traffic falls from"
        f" {format_bytes(best.today)} to {format_bytes(best.then)}. The last two pairs of bars are accumulators that"
        " move from the tensor core to registers, not memory traffic."
    )


def draw_errors(figure: Figure, rows: Sequence[Change]) -> None:
    """Draw the SNR today and then, for suggestions that change it."""
    axes = figure.subplots()
    style_axes(axes, "SNR (dB) today (gray) and then (blue)", "right is better")
    for at, row in enumerate(rows):
        assert row.snr_db is not None
        today, then = row.snr_db
        axes.plot([today, then], [at, at], color=COLOR["grid"], linewidth=3, zorder=1)
        axes.plot(today, at, "o", color=COLOR["muted"], markersize=10, alpha=0.6)
        axes.plot(then, at, "o", color=COLOR["blue"], markersize=6)
        axes.annotate(f"{format_signed(then - today, '.2f')} dB", (max(today, then), at), (10, 0),
                      textcoords="offset points", va="center", fontsize=10)  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.5, high + 0.25 * (high - low) + 0.5)
    axes.grid(axis="x")


def describe_errors(rows: Sequence[Change]) -> str:
    """Describe the change of the SNR by each suggestion."""
    parts = [f"{row.name} {format_signed(row.snr_db[1] - row.snr_db[0], '.2f')} dB" for row in rows if row.snr_db]
    return (
        f"Change of the SNR: {', '.join(parts)}. Quantization fused with the load changes no value. Where the gray dot"
        " is hidden by the blue one, the SNR does not change, and the suggestion only saves bytes."
    )
