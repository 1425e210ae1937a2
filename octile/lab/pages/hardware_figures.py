"""The pictures of `octile lab hardware`: what the suggestions to hardware makers would bring on a captured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.lab.pages.what_if_figures import LARGE
from octile.report.page import format_bytes
from octile.report.style import COLOR, label_ends, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """SNR (dB) of the sums alone by fraction bits, never promoted; None where no sum is off.

    Attributes:
        bits, snr_db: of the curve.
        promoted_db: of the first of these bits promoted every 128; cast_db: of the casts alone; None where exact.
        longest: products in the longest sum.
    """

    bits: Sequence[int]
    snr_db: Sequence[float | None]
    promoted_db: float | None
    cast_db: float | None
    longest: int


def draw_bits(figure: Figure, curve: Curve) -> None:
    axes = figure.subplots()
    style_axes(axes, "fraction bits that the tensor core keeps", "SNR of the sums alone (dB); higher is better")
    known = [(bits, snr) for bits, snr in zip(curve.bits, curve.snr_db, strict=True) if snr is not None]
    bits, snr = zip(*known, strict=True)
    axes.plot(bits, snr, color=COLOR["blue"], marker="o", markersize=5)
    axes.set_xlim(curve.bits[0] - 0.4, curve.bits[-1] + 0.4)
    axes.set_xticks(curve.bits[:: 1 if figure.get_figwidth() * 72 > LARGE else 3])
    labels = [(snr[-1], "never promoted", COLOR["blue"])]
    low = snr[0]
    if curve.cast_db is not None:
        axes.axhline(curve.cast_db, color=COLOR["muted"], linewidth=1, linestyle=":")
        labels.append((curve.cast_db, "the casts alone", COLOR["muted"]))
        low = min(low, curve.cast_db)
    if curve.promoted_db is not None:
        axes.axhline(curve.promoted_db, color=COLOR["green"], linewidth=1, linestyle="--")
        labels.append((curve.promoted_db, f"{curve.bits[0]} bits, every 128", COLOR["green"]))
    axes.set_ylim(bottom=low - 5)
    label_ends(figure, axes, labels)


def say_bits(curve: Curve) -> str:
    first, second = curve.snr_db[0], curve.snr_db[1]
    if first is None:
        return "No sum of these products is off by a single bit, however few the tensor core keeps."
    gain = "" if second is None else f" and each further one is worth {second - first:.0f} dB at first"
    enough = next(
        (
            bits
            for bits, snr in zip(curve.bits, curve.snr_db, strict=True)
            if curve.promoted_db is not None and (snr is None or snr >= curve.promoted_db)
        ),
        None,
    )
    matches = f" With {enough} bits it would match today's promotion every 128." if enough else ""
    lost = curve.cast_db
    casts = "" if lost is None else f" The casts alone leave {lost:.0f} dB: sums far above that do not matter."
    return (
        f"One scale a tensor, so that a sum may stay in the tensor core. With Hopper's {curve.bits[0]} bits the sums"
        f" have {first:.0f} dB{gain}.{matches}{casts} The longest sum here has {curve.longest:,} products; longer ones"
        " lose more."
    )


@dataclass(frozen=True)
class Moved:
    """Bytes that a suggestion concerns, today and then; snr_db likewise, or None where no value changes."""

    name: str
    moved: str
    today: int
    then: int
    snr_db: tuple[float, float] | None


def draw_moved(figure: Figure, rows: Sequence[Moved]) -> None:
    """Two bars a suggestion."""
    axes = figure.subplots()
    desk = figure.get_figwidth() * 72 > LARGE
    style_axes(axes, "bytes today (grey) and then (blue)", "in one step")
    for at, row in enumerate(rows):
        axes.barh(at - 0.17, row.today, height=0.3, color=COLOR["muted"], alpha=0.55)
        axes.barh(at + 0.17, row.then, height=0.3, color=COLOR["blue"])
        saved = f"−{1 - row.then / row.today:.0%}" if row.today else ""
        text = f"{format_bytes(row.then)}, {saved}" if desk else saved
        axes.annotate(text, (row.then, at + 0.17), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max(row.today for row in rows))
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value) if value else "0")
    axes.locator_params(axis="x", nbins=6 if desk else 3)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")


def say_moved(rows: Sequence[Moved], memory: str) -> str:
    own = [row for row in rows if row.moved == memory and row.today]
    best = max(own, key=lambda row: row.today - row.then, default=None)
    if best is None:
        return "These products cast nothing, so there is nothing to save."
    return (
        f"Counted from the shapes of the captured products. Most is saved by “{best.name}”:"
        f" {format_bytes(best.today)} of memory traffic become {format_bytes(best.then)}. The last two bars are sums"
        " that leave the tensor core for ordinary registers, no memory traffic."
    )


def draw_errors(figure: Figure, rows: Sequence[Moved]) -> None:
    """From today's SNR to then's, of suggestions that have both."""
    axes = figure.subplots()
    style_axes(axes, "SNR (dB) today (grey) and then (blue)", "right is better")
    for at, row in enumerate(rows):
        assert row.snr_db is not None
        today, then = row.snr_db
        axes.plot([today, then], [at, at], color=COLOR["grid"], linewidth=3, zorder=1)
        axes.plot(today, at, "o", color=COLOR["muted"], markersize=10, alpha=0.6)
        axes.plot(then, at, "o", color=COLOR["blue"], markersize=6)
        axes.annotate(f"{then - today:+.2f} dB".replace("-", "−"), (max(today, then), at), (10, 0),
                      textcoords="offset points", va="center", fontsize=10)  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.5, high + 0.25 * (high - low) + 0.5)
    axes.grid(axis="x")


def say_errors(rows: Sequence[Moved]) -> str:
    parts = [f"{row.name} {row.snr_db[1] - row.snr_db[0]:+.2f} dB".replace("-", "−") for row in rows if row.snr_db]
    return (
        f"What would change in the values: {', '.join(parts)}. Casting in the load changes no value. Where the grey dot"
        " hides behind the blue one, today's software already loses nothing, and the gain is in bytes alone."
    )
