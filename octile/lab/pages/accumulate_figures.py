"""The pictures of `octile lab accumulate`: how the error of a long FP8 sum grows with its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from octile.lab.pages.page import Table
from octile.report.style import COLOR, label_ends, style_axes

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
FLAT = 1.1  # the worst of some ten thousand sums moves by so much from one draw to the next
DATA = {"normal": "both signs, N(0, 1)", "positive": "one sign, |N(0, 1)|"}
Place = tuple[str, int | None, int]  # data, promote_every, K
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
        style_axes(axes, "K, products summed", f"worst error over RMS: {DATA.get(kind, kind)}")
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
    """The worst errors at K = 4096, or the largest K there is, and their course from the smallest K to the largest."""
    ks = {row.k for row in rows}
    k = 4096 if 4096 in ks else max(ks)
    intervals = {row.promote_every for row in rows}
    shortest = min((interval for interval in intervals if interval is not None), default=None)
    told = [i for i in dict.fromkeys((128 if 128 in intervals else shortest, None)) if i in intervals]
    worst = {(row.data, row.promote_every, row.k): row.worst for row in rows}
    off = [
        f"sums of {signs} are off by up to {' and '.join(f'{share(worst[kind, i, k])} {_when(i)}' for i in told)}"
        for kind, signs in _signs(rows).items()
    ]
    return f"On {arch}, K = {k:,}: {'; '.join(off)}.{_say_courses(rows, worst, told, min(ks), max(ks))}"


def _say_courses(
    rows: Sequence[Row], worst: Mapping[Place, float], told: Sequence[int | None], first: int, last: int
) -> str:
    if first == last:
        return ""
    courses = [
        f"{'that' if number else 'the worst error'} of sums of {signs} "
        + " and ".join(f"{_course(worst[kind, i, first], worst[kind, i, last])} {_when(i)}" for i in told)
        for number, (kind, signs) in enumerate(_signs(rows).items())
    ]
    said = f" From K = {first:,} to {last:,} {'; '.join(courses)}."
    promoted = [(worst[kind, i, first], worst[kind, i, last]) for kind in _signs(rows) for i in told if i is not None]
    if promoted and all(end <= FLAT * begin for begin, end in promoted):
        said += " With promotion it does not grow: the tensor core never holds more than one interval of a sum."
    return said


def _signs(rows: Sequence[Row]) -> dict[str, str]:
    return {row.data: "both signs" if row.data == "normal" else "one sign" for row in rows}


def _when(interval: int | None) -> str:
    return "when never promoted" if interval is None else f"when promoted {every(interval)}"


def _course(begin: float, end: float) -> str:
    """How an error moves, in words."""
    if not begin:
        return f"goes from 0 to {share(end)}" if end else "stays 0"
    if begin / FLAT <= end <= FLAT * begin:
        return "stays the same"
    if end < begin:
        return f"falls by {1 - end / begin:.0%}"
    return f"grows {end / begin:.0f}-fold" if end >= 2 * begin else f"grows by {end / begin - 1:.0%}"
