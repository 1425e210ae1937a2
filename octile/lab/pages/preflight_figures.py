"""The pictures of `octile lab preflight`: the risk of every product, and whether a real step bore it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.lab.pages.real_tensors_figures import shortened
from octile.lab.pages.what_if_figures import LARGE, PRODUCT_COLOR, Heat, legend
from octile.report.page import format_count
from octile.report.style import COLOR, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Predicted:
    """A product's SNR (dB) as predicted, and as measured in a real step where it was.

    layer is the expert's where it is one, weight that of all of them; blame is the operand that does more harm.
    """

    layer: str
    weight: str
    product: str
    snr_db: float
    measured_db: float | None
    blame: str
    flushed: float
    excepted: bool


def heat_of(rows: Sequence[Predicted]) -> Heat:
    """Layers × products, the riskiest layer on top."""
    layers = list(dict.fromkeys(row.weight for row in rows))
    products = [p for p in PRODUCT_COLOR if any(row.product == p for row in rows)]
    snr = {(row.weight, row.product): row.snr_db for row in rows}
    return Heat(layers, products, [[snr.get((layer, p)) for p in products] for layer in layers])


def say_risk(rows: Sequence[Predicted], recipe: str, least_db: float) -> str:
    if not rows:
        return f"Every product is exact under {recipe}: nothing need stay in BF16."
    worst = rows[0]
    below, kept = (sum(chosen) for chosen in ([row.snr_db < least_db for row in rows], [row.excepted for row in rows]))
    shared = " (an expert's two weights share one recipe)" if kept > below else ""
    found = (
        f"{below} of {format_count(len(rows), 'product')} fall{'s' if below == 1 else ''} below {least_db:g} dB;"
        f" {kept} {'is' if kept == 1 else 'are'} advised to stay in BF16{shared}."
        if below
        else f"None falls below {least_db:g} dB, so nothing need stay in BF16."
    )
    flushed = f", {worst.flushed:.0%} of whose values become zero" if worst.flushed >= 0.005 else ""
    return (
        f"Predicted SNR in dB under {recipe}, every channel counted alike; the deeper the orange, the more is lost."
        f" {found} Most is lost in {worst.product} of {shortened([worst.layer])[0]}, {worst.snr_db:.1f} dB, by the"
        f" cast of {worst.blame}{flushed}."
    )


def draw_check(figure: Figure, rows: Sequence[Predicted], least_db: float) -> None:
    """Measured against predicted, a dot a product."""
    axes = figure.subplots()
    style_axes(axes, "predicted (dB)", "measured in a real step in 8 bits (dB)")
    known = [row for row in rows if row.measured_db is not None]
    ends = [v for row in known for v in (row.snr_db, row.measured_db) if v is not None]
    low, high = min([*ends, least_db]) - 1, max(ends) + 1
    axes.plot([low, high], [low, high], color=COLOR["muted"], linewidth=1, linestyle=":")
    axes.axvspan(low, least_db, color=COLOR["vermilion"], alpha=0.1, linewidth=0)
    axes.annotate(" kept in BF16", (low, high), va="top", color=COLOR["muted"])
    for product, color in PRODUCT_COLOR.items():
        own = [row for row in known if row.product == product]
        x, y = [row.snr_db for row in own], [row.measured_db or 0.0 for row in own]
        axes.plot(x, y, "o", color=COLOR[color], markersize=5.5, alpha=0.75)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.grid(axis="x")
    legend(figure, {p: c for p, c in PRODUCT_COLOR.items() if any(row.product == p for row in known)},
           figure.get_figwidth() * 72 > LARGE)  # fmt: skip


def say_check(rows: Sequence[Predicted]) -> str:
    pairs = [(row.snr_db, row.measured_db) for row in rows if row.measured_db is not None]
    off = math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs) / len(pairs))
    return (
        f"The same batches through real steps in 8 bits: what {format_count(len(pairs), 'measured product')} lost,"
        f" against what was predicted. On the dotted line the two agree; they are {off:.1f} dB apart (RMS). In a real"
        " step every layer gets operands that carry the errors of the layers before it."
    )
