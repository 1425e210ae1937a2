"""The style of all figures: palette, axes, lines and direct labels.

A figure is drawn with matplotlib on its own `Figure`, without pyplot's global state. It is written as a PNG or SVG file
(`save_drawing`) or as SVG inside a page (svg.py). Sizes are in CSS pixels (matplotlib's points). Lines are labeled at
their ends instead of in a legend.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from octile.extras import require
from octile.report.run.metrics import Floats, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 600  # of a thinned series
MIN_GAP, LABEL_SIZE = 4, 11  # pixels between two tick labels, and points of a label at the end of a line

# name: (on light paper, on dark paper). The light values must differ, since svg.py reheights colors by them.
PALETTE = {
    "ink": ("#1c2127", "#e6e8eb"),
    "muted": ("#5f6873", "#9aa3ad"),
    "grid": ("#e3e6ea", "#32383f"),
    "paper": ("#ffffff", "#15181c"),
    "blue": ("#0b62b8", "#5aa9f0"),
    "vermilion": ("#c8500f", "#f58a4b"),
    "green": ("#007a5a", "#3dbb95"),
    "amber": ("#a87400", "#dba93a"),
    "purple": ("#7a4fb5", "#b592ea"),
    "rose": ("#b8437f", "#ea86b6"),
    "cyan": ("#168aa3", "#55c3da"),
    "olive": ("#6f7d0c", "#b0bf4a"),
    "brown": ("#83542f", "#c4936b"),
}
COLOR = {name: light for name, (light, _) in PALETTE.items()}

# A recipe has the same style on every page. The first colors are safe for color blindness, others differ by dashes.
_RECIPE_STYLES = {
    "bf16": ("ink", "-"),
    "float32": ("ink", "--"),
    "deepseek_v3": ("blue", "-"),
    "per_tensor": ("vermilion", "-"),
    "delayed": ("amber", "-"),
    "hybrid_delayed": ("amber", "--"),
    "hybrid_e5m2": ("green", "-"),
    "global_scale": ("rose", "--"),
    "fp16_loss_scaling": ("cyan", "--"),
    "fp8_lm": ("purple", "--"),
    "smooth_swiglu": ("olive", "-."),
    "mxfp8": ("green", "--"),
    "int8_tiles": ("brown", "-."),
    "wgrad_x_blocks": ("blue", "--"),
    "exact": ("blue", ":"),
}

_OTHER_STYLES = tuple(
    product(("brown", "olive", "cyan", "rose", "purple", "amber", "green", "vermilion"), (":", "-.", "--"))
)

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": COLOR["ink"],
    "text.parse_math": False,
    "axes.edgecolor": COLOR["muted"],
    "axes.labelcolor": COLOR["muted"],
    "axes.linewidth": 0.8,
    "xtick.color": COLOR["muted"],
    "ytick.color": COLOR["muted"],
    "grid.color": COLOR["grid"],
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "octile",
    "figure.facecolor": COLOR["paper"],
    "axes.facecolor": "none",
}

WIDE, HALF, THIRD, PHONE = 980, 420, 320, 380  # widths in pixels: of a page, of its columns, of a telephone


def palette_name(recipe: str) -> str:
    """The name in PALETTE of a recipe's color."""
    return _style_of(recipe)[0]


def recipe_style(name: str) -> dict[str, Any]:
    """Color and line style of a recipe, as keyword arguments of matplotlib."""
    color, linestyle = _style_of(name)
    return {"color": COLOR[color], "linestyle": linestyle}


def _style_of(name: str) -> tuple[str, str]:
    """Color and line style of a recipe. A hash of the name chooses those of a recipe that is not built in."""
    return _RECIPE_STYLES.get(name) or _OTHER_STYLES[crc32(name.encode()) % len(_OTHER_STYLES)]


def import_matplotlib() -> None:
    """Import matplotlib, also where a notebook names its backend to a command whose environment lacks that package."""
    try:
        import matplotlib
    except ValueError:
        backend = os.environ.pop("MPLBACKEND")  # figures here draw themselves, and need none
        import matplotlib  # noqa: F401

        os.environ["MPLBACKEND"] = backend


@contextmanager
def drawing(width: float, height: float) -> "Iterator[Figure]":
    """A blank figure of `width` × `height` pixels; octile's style is active while it is drawn and saved."""
    require("matplotlib", extra="report")
    import_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignores the user's matplotlibrc
        matplotlib.rcParams.update(_STYLE)
        yield Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def lay_out(figure: "Figure") -> None:
    """Compute the layout of a figure from `drawing`, which takes half as long as `figure.draw_without_rendering`."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)


def save_drawing(path: Path, width: float, height: float, draw: Callable[["Figure"], None]) -> Path:
    """Draw a figure and write it as PNG (at twice the resolution) or SVG by the suffix of `path`.

    Raises:
        ValueError: path has another suffix.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path must end in .png or .svg, not {path.name!r}")
    with drawing(width, height) as figure:
        draw(figure)
        figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def style_axes(axes: "Axes", x: str | None, y: str) -> None:
    """Style axes and label them; the label of the y axis is written horizontally above it."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", which="both", length=0)
    axes.tick_params(axis="x", length=3)
    axes.set_title(y, loc="left", fontsize=11, color=COLOR["muted"], pad=8)
    if x is not None:
        axes.set_xlabel(x, loc="right")


def step_axis(axes: "Axes", last_step: float, intervals: int = 6) -> None:
    """Set an x axis of whole steps from zero to `last_step`, at least 1, with at most `intervals` between its ticks."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, max(last_step, 1) * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=intervals, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def plain_log_ticks(axes: "Axes") -> None:
    """Label a logarithmic y axis 0.5, 1, 2 instead of 10⁰; a wide one 0.1, 1, 10. Its limits must be final."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def key_axis(axes: "Axes", positions: Sequence[float], labels: Sequence[str], **text: Any) -> None:
    """Style the axes of a heat map's color key, with a label at its beginning, inside, and at its end."""
    axes.set_xticks(positions, labels, **text)
    first, *_, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_color(COLOR["grid"])


def line(axes: "Axes", x: Floats, y: Floats, **style: Any) -> None:
    """Draw a line, or a dot if it has a single point. Long series are thinned without losing peaks."""
    x, y = thin(x, y)
    if np.isfinite(y).sum() == 1:
        style |= {"marker": "o", "markersize": 4}
    axes.plot(x, y, **style)


def noisy_line(axes: "Axes", x: Floats, y: Floats, color: str) -> Floats:
    """Draw a noisy series faintly and its trend over it; return the trend."""
    trend = smooth(y)
    line(axes, x, y, color=color, alpha=0.3 if len(x) <= 600 else 0.15, linewidth=0.8)
    line(axes, x, trend, color=color)
    return trend


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Reduce a series to at most 2·BINS points: the minimum and the maximum of each bin, in order."""
    if len(x) <= 2 * BINS:
        return x, y
    edges = np.linspace(0, len(x), BINS + 1).astype(int)
    indices = set()
    for start, end in pairwise(edges):
        part = y[start:end]
        low, high = (part.argmin(), part.argmax()) if np.isfinite(part).all() else (0, len(part) - 1)
        indices |= {start + int(low), start + int(high)}
    index = np.array(sorted(indices))
    return x[index], y[index]


def thin_labels(figure: "Figure", axes: "Axes") -> None:
    """Show every n-th tick label of the x axis, for the smallest n that leaves MIN_GAP pixels between two of them.

    The limits of the axes must be final.
    """
    lay_out(figure)  # so that widths are known
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    fits = (n for n in range(1, len(labels) + 1) if all(b.x0 - a.x1 >= MIN_GAP for a, b in pairwise(boxes[::n])))
    shown = next(fits, 1)
    for number, label in enumerate(labels):
        label.set_visible(number % shown == 0)


def label_ends(figure: "Figure", axes: "Axes", labels: Sequence[tuple[float, str, str]]) -> None:
    """Write labels (y, text, color) to the right of the axes at the height of y, moved apart if they would overlap.

    The limits of the axes must be final. A label whose y lies outside the limits is written at the edge. All labels
    stay next to the axes: if they are too many, they are smaller than LABEL_SIZE.
    """
    lay_out(figure)  # so that heights are known
    size = min(LABEL_SIZE, axes.bbox.height / (1.3 * max(len(labels) - 1, 1)))
    gap = 1.3 * size / axes.bbox.height
    to_fraction = axes.transData + axes.transAxes.inverted()
    wanted = sorted((float(np.clip(to_fraction.transform((0, y))[1], 0, 1)), text, color) for y, text, color in labels)
    heights = [height for height, _, _ in wanted]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], 1 - gap * (len(heights) - 1 - i))
    for height, (_, text, color) in zip(heights, wanted, strict=True):
        axes.annotate(text, (1, height), (6, 0), xycoords="axes fraction", textcoords="offset points",
                      color=color, fontsize=size, va="center")  # fmt: skip
