"""The pictures of `octile lab accumulate`: how the error of a long FP8 sum grows with its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from octile.report.figures import COLOR, dress, label_ends
from octile.report.lab_page import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Row(Protocol):
    """One product's accumulation error, in units of the exact product's RMS; promote_every None is never."""

    @property
    def k(self) -> int: ...
    @property
    def data(self) -> str: ...
    @property
    def promote_every(self) -> int | None: ...
    @property
    def error(self) -> float: ...
    @property
    def worst(self) -> float: ...
    @property
    def bias(self) -> float: ...


COLUMNS = ("data", "K", "promoted", "RMS error", "worst error", "bias")  # all but K in units of the outputs' RMS
DATA = {"normal": "both signs, N(0, 1)", "positive": "one sign, |N(0, 1)|"}
_INTERVAL_COLOR = {None: "vermilion", 128: "blue", 32: "green", 64: "cyan", 256: "purple"}


def table(rows: Sequence[Row]) -> Table:
    """The rows as text."""
    cells = [(DATA.get(r.data, r.data), f"{r.k:,}", every(r.promote_every), *_errors(r)) for r in rows]
    return Table(COLUMNS, cells)


def short_table(rows: Sequence[Row]) -> Table:
    """The worst errors alone, a column an interval."""
    intervals = list(dict.fromkeys(row.promote_every for row in rows))
    worst = {(row.data, row.k, row.promote_every): share(row.worst) for row in rows}
    places = dict.fromkeys((row.data, row.k) for row in rows)
    cells = [(DATA.get(data, data), f"{k:,}", *(worst[data, k, i] for i in intervals)) for data, k in places]
    return Table(("worst error, promoted", "K", *map(every, intervals)), cells)


def every(interval: int | None) -> str:
    return "never" if interval is None else f"every {interval}"


def _errors(row: Row) -> tuple[str, str, str]:
    return share(row.error), share(row.worst), share(row.bias, "+").replace("-", "−")


def share(value: float, sign: str = "") -> str:
    """A share in per cent with two significant figures: 0.0203 → "2.0%", 0.00007 → "0.007%"."""
    percent = 100 * value
    digits = next((d for d in range(6) if abs(percent) >= 10.0 ** (1 - d)), 6)
    return f"{percent:{sign}.{digits}f}%"


def draw_accumulate(figure: Figure, rows: Sequence[Row]) -> None:
    """Worst error against K, a line an interval, a panel a kind of data."""
    kinds = list(dict.fromkeys(row.data for row in rows))
    beside = figure.get_figwidth() > 1.5 * figure.get_figheight()
    shape = (1, len(kinds)) if beside else (len(kinds), 1)
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).flat
    ks = sorted({row.k for row in rows})
    low = min((row.worst for row in rows if row.worst), default=1e-8) / 2  # an error of zero is drawn on the axis
    top = max(4 * max(row.worst for row in rows), 10 * low)
    for axes, kind in zip(panels, kinds, strict=True):
        dress(axes, "K, products summed", f"worst error over RMS: {DATA.get(kind, kind)}")
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
            color = COLOR[_INTERVAL_COLOR.get(interval, "muted")]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3.5)
            labels.append((points[-1][1], every(interval), color))
        label_ends(figure, axes, labels)


def say_accumulate(rows: Sequence[Row], arch: str) -> str:
    ks = {row.k for row in rows}
    k = 4096 if 4096 in ks else max(ks)
    worst = {(row.data, row.promote_every): share(row.worst) for row in rows if row.k == k}
    intervals = [interval for interval in dict.fromkeys(row.promote_every for row in rows) if interval is not None]
    best = 128 if 128 in intervals else min(intervals, default=None)
    parts = []
    for kind in dict.fromkeys(row.data for row in rows):
        signs = "both signs" if kind == "normal" else "one sign"
        found = [f"{worst[kind, best]} when promoted {every(best)}"] if best is not None else []
        found += [f"{worst[kind, None]} when never promoted"] if (kind, None) in worst else []
        parts.append(f"sums of {signs} are off by up to {' and '.join(found)}")
    flat = " A promoted line stays flat: the tensor core never holds more than one interval of a sum."
    return f"On {arch}, K = {k:,}: {'; '.join(parts)}.{flat if best is not None else ''}"
