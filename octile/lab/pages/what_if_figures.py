"""The pictures of `octile lab what-if`: which combination loses how much, where in the model, and by which tokens.

Each has two functions: `draw_…` puts it on a figure, `say_…` writes the sentence that says what to see. SNR is a
signal-to-noise ratio in dB: 6 dB more is half the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octile.lab.pages.real_tensors_figures import shortened
from octile.report.page import format_count
from octile.report.style import COLOR, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALE_COLOR = {
    "float32": "blue",
    "up": "green",
    "nearest": "amber",
    "ocp": "purple",
    "down": "vermilion",
    "e4m3": "cyan",
}
SCALE_LABEL = {
    "float32": "FP32 scale",
    "up": "power of two, up",
    "nearest": "nearest power of two",
    "ocp": "MX's rule",
    "down": "power of two, down",
    "e4m3": "E4M3 scale",
}
PRODUCT_COLOR = {"fprop": "blue", "dgrad": "green", "wgrad": "vermilion"}
LARGE = 980 * 0.7  # pixels: a wider figure is a desk's


def format_label(fmt: str) -> str:
    return {"mx": "MXFP8", "nvfp4": "NVFP4"}.get(fmt, fmt.upper())


def block_label(block: str) -> str:
    return block.replace("x", "×")


@dataclass(frozen=True)
class CastLoss:
    """Mean SNR over the products of one cast, sums exact; bits a value with its share of the scales."""

    fmt: str
    block: str
    scale: str
    snr_db: float
    bits: float


def draw_casts(figure: Figure, casts: Sequence[CastLoss]) -> None:
    """One row a format and block, a dot a scale rule."""
    axes = figure.subplots()
    desk = figure.get_figwidth() * 72 > LARGE
    rows = list(dict.fromkeys((cast.fmt, cast.block) for cast in casts))
    style_axes(axes, "SNR of the products (dB)", "right is better")
    for cast in casts:
        row = rows.index((cast.fmt, cast.block))
        axes.plot(cast.snr_db, row, "o", color=COLOR[SCALE_COLOR[cast.scale]], markersize=6.5, alpha=0.85)
    bits = {(cast.fmt, cast.block): cast.bits for cast in casts}
    names = [f"{format_label(fmt)} {block_label(block)}" for fmt, block in rows]
    axes.set_yticks(
        range(len(rows)), [f"{n}, {bits[r]:.3g} bits" if desk else n for n, r in zip(names, rows, strict=True)]
    )
    axes.set_ylim(len(rows) - 0.4, -0.7)
    axes.grid(axis="x")
    for at in range(1, len(rows)):
        if rows[at][0] != rows[at - 1][0]:
            axes.axhline(at - 0.5, color=COLOR["muted"], linewidth=0.6)
    legend(figure, {SCALE_LABEL[s]: SCALE_COLOR[s] for s in SCALE_COLOR if any(c.scale == s for c in casts)}, desk)


def legend(figure: Figure, colors: Mapping[str, str], desk: bool) -> None:
    """Names in their colors under a figure, for dots that stand in no line that could end in a name."""
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=COLOR[color], marker="o", linestyle="") for color in colors.values()]
    place = figure.legend(
        marks, list(colors), loc="outside lower left", ncols=len(colors) if desk else 2, frameon=False, fontsize=10,
        handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    for text, color in zip(place.get_texts(), colors.values(), strict=True):
        text.set_color(COLOR[color])


def say_casts(casts: Sequence[CastLoss], products: int) -> str:
    eight = [cast for cast in casts if cast.fmt not in ("e5m6", "nvfp4")]
    best = max(eight or casts, key=lambda cast: cast.snr_db)
    worst = min(eight or casts, key=lambda cast: cast.snr_db)
    said = (
        f"Each dot is one way to cast, averaged over {format_count(products, 'product')} of the run, sums exact. The"
        f" best of those in 8 bits is {_cast_name(best)} at {best.snr_db:.1f} dB, the worst {_cast_name(worst)} at"
        f" {worst.snr_db:.1f}."
    )
    drop = _drop(casts, "up", "down")
    if drop is not None:
        moves = "costs" if drop >= 0 else "brings"
        why = ", since the largest values of most blocks then saturate: the orange dots" if drop >= 3 else ""
        said += f" Rounding a power-of-two scale down instead of up {moves} {abs(drop):.0f} dB on average{why}."
    int8, e4m3 = (max((c.snr_db for c in casts if c.fmt == fmt), default=None) for fmt in ("int8", "e4m3"))
    if int8 is not None and e4m3 is not None and int8 > e4m3:
        said += (
            f" The best INT8 cast stands {int8 - e4m3:.1f} dB before the best of E4M3: SNR sees the large values, not"
            " the small ones that an integer makes zero."
        )
    return said


def _cast_name(cast: CastLoss) -> str:
    return f"{format_label(cast.fmt)} {block_label(cast.block)} with {SCALE_LABEL[cast.scale]}"


def _drop(casts: Sequence[CastLoss], better: str, worse: str) -> float | None:
    snr = {(cast.fmt, cast.block, cast.scale): cast.snr_db for cast in casts}
    pairs = [
        snr[fmt, block, better] - db
        for (fmt, block, scale), db in snr.items()
        if scale == worse and (fmt, block, better) in snr
    ]
    return sum(pairs) / len(pairs) if pairs else None


@dataclass(frozen=True)
class SumLoss:
    """Mean accumulation SNR of one way to sum, by product; None where no sum was off."""

    name: str
    snr_db: Mapping[str, float | None]


def draw_sums(figure: Figure, sums: Sequence[SumLoss], quantization_db: float) -> None:
    axes = figure.subplots()
    style_axes(axes, "accumulation SNR (dB), the cast apart", "right is better")
    for row, loss in enumerate(sums):
        for product, snr in loss.snr_db.items():
            if snr is not None:
                axes.plot(snr, row, "o", color=COLOR[PRODUCT_COLOR[product]], markersize=7, alpha=0.85)
    axes.axvline(quantization_db, color=COLOR["muted"], linewidth=1, linestyle=":")
    axes.annotate(" the cast's", (quantization_db, len(sums) - 0.45), va="bottom", color=COLOR["muted"])
    axes.set_yticks(range(len(sums)), [loss.name for loss in sums])
    axes.set_ylim(len(sums) - 0.4, -0.8)
    axes.grid(axis="x")
    desk = figure.get_figwidth() * 72 > LARGE
    legend(figure, {p: c for p, c in PRODUCT_COLOR.items() if any(p in loss.snr_db for loss in sums)}, desk)


def say_sums(sums: Sequence[SumLoss], cast: str, quantization_db: float, longest: int) -> str:
    known = [(snr, loss.name, product) for loss in sums for product, snr in loss.snr_db.items() if snr is not None]
    if not known:
        return f"With {cast} no sum of these products was off by a single bit."
    snr, name, product = min(known)
    close = abs(snr - quantization_db) < 3
    verdict = "about as much as" if close else "less than" if snr > quantization_db else "more than"
    return (
        f"What the sums alone lose, operands {cast}. The dotted line is what the cast had lost before"
        f" ({quantization_db:.1f} dB). The worst way to sum here is {name}, {snr:.0f} dB in {product}, and harms"
        f" {verdict} the cast. The longest sum of this run has {longest:,} products; the gap narrows as sums grow"
        " (octile lab accumulate)."
    )


@dataclass(frozen=True)
class Heat:
    """A table of figures to be shaded: cells[row][column], None where there is none. Orange is the smallest."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[float | None]]

    @property
    def known(self) -> list[tuple[float, str, str]]:
        """Figures with the names of their row and column."""
        return [
            (value, row, column)
            for row, cells in zip(self.rows, self.cells, strict=True)
            for column, value in zip(self.columns, cells, strict=True)
            if value is not None
        ]


def draw_heat(figure: Figure, heat: Heat, what: str) -> None:
    """Cells shaded from the best (pale) to the worst (full), each with its figure."""
    axes = figure.subplots()
    style_axes(axes, None, what)
    axes.grid(visible=False)
    _shade(axes, heat)
    axes.set_yticks(range(len(heat.rows)), shortened(heat.rows), fontsize=10)
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(heat.columns)), heat.columns)
    axes.set_xlim(-0.5, len(heat.columns) - 0.5)
    axes.tick_params(axis="x", length=0, top=False)
    axes.spines["bottom"].set_visible(False)


def _shade(axes: Axes, heat: Heat) -> None:
    from matplotlib.patches import Rectangle

    low, high = min(heat.known)[0], max(heat.known)[0]
    for y, row in enumerate(heat.cells):
        for x, value in enumerate(row):
            if value is None:
                continue
            share = (high - value) / (high - low) if high > low else 0.0
            cell = Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, facecolor=COLOR["vermilion"], alpha=0.06 + 0.64 * share)
            axes.add_patch(cell)
            axes.annotate(f"{value:.1f}", (x, y), ha="center", va="center", fontsize=10)


def say_heat(heat: Heat, cast: str) -> str:
    worst, best = min(heat.known), max(heat.known)
    return (
        f"SNR in dB of every layer's products, {cast}; the deeper the orange, the more is lost. Most in {worst[2]} of"
        f" {shortened([worst[1]])[0]} ({worst[0]:.1f} dB), least in {best[2]} of {shortened([best[1]])[0]}"
        f" ({best[0]:.1f} dB)."
    )


def say_steps(heat: Heat, product: str, cast: str) -> str:
    moved = [
        (cells[-1] - cells[0], row)
        for row, cells in zip(heat.rows, heat.cells, strict=True)
        if cells[0] is not None and cells[-1] is not None
    ]
    if not moved:
        return f"The same products as training goes on: SNR in dB of {product}, {cast}."
    change, layer = min(moved)
    first, last = heat.columns[0], heat.columns[-1]
    mean = sum(each for each, _ in moved) / len(moved)
    least = "loses most" if change < 0 else "gains least"
    return (
        f"The same products as training goes on: SNR in dB of {product}, {cast}, at {first} to {last}. It moves by"
        f" {mean:+.1f} dB on average; {shortened([layer])[0]} {least} ({change:+.1f} dB)."
    ).replace("-", "−")
