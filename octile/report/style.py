"""The drawing style: what every figure has in common.

A figure is drawn with matplotlib on a `Figure` of its own, without pyplot's global state, and leaves either as a PNG or
SVG file (`save_drawing`) or as SVG inside a page (svg.py).

Sizes are in CSS pixels (matplotlib's points). Colours tell apart what has a name; names stand at the ends of the lines.
"""

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

# name: (on light paper, on dark paper). Each light value is used once: it is the key by which SVG colours are replaced.
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

# A recipe looks the same on every page. The first colours differ for colour-blind eyes too, the others by their dashes.
_RECIPE_LOOK = {
    "bf16": ("ink", "-"),
    "float32": ("ink", "--"),
    "deepseek_v3": ("blue", "-"),
    "per_tensor": ("vermilion", "-"),
    "delayed": ("amber", "-"),
    "hybrid_e5m2": ("green", "-"),
    "global_scale": ("rose", "--"),
    "fp16_loss_scaling": ("cyan", "--"),
    "fp8_lm": ("purple", "--"),
    "smooth_swiglu": ("olive", "-."),
    "int8_tiles": ("brown", "-."),
}

_OTHER_LOOKS = tuple(
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

WIDE, HALF, THIRD, PHONE = 980, 420, 320, 380  # widths in pixels: columns of a page, and a telephone


def palette_name(recipe: str) -> str:
    """The name in PALETTE of a recipe's colour."""
    return _look(recipe)[0]


def recipe_style(name: str) -> dict[str, Any]:
    """Colour and line style of a recipe, as matplotlib's keywords."""
    color, linestyle = _look(name)
    return {"color": COLOR[color], "linestyle": linestyle}


def _look(name: str) -> tuple[str, str]:
    """A recipe that is not the library's has a look that its name decides; seldom two of them have the same."""
    return _RECIPE_LOOK.get(name) or _OTHER_LOOKS[crc32(name.encode()) % len(_OTHER_LOOKS)]


@contextmanager
def drawing(width: float, height: float) -> "Iterator[Figure]":
    """A blank figure of `width` × `height` pixels, with the house style in force while it is drawn and saved."""
    require("matplotlib", extra="report")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change the pages
        matplotlib.rcParams.update(_STYLE)
        yield Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def save_drawing(path: Path, width: float, height: float, draw: Callable[["Figure"], None]) -> Path:
    """Draws a figure and writes it as PNG (twice the pixels, for sharp screens) or SVG, by the suffix of `path`.

    Raises:
        ValueError: the suffix is another.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path must end in .png or .svg, not {path.name!r}")
    with drawing(width, height) as figure:
        draw(figure)
        figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def style_axes(axes: "Axes", x: str | None, y: str) -> None:
    """Names and units on both axes, the y name above its axis where it reads without turning the head."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", which="both", length=0)
    axes.tick_params(axis="x", length=3)
    axes.set_title(y, loc="left", fontsize=11, color=COLOR["muted"], pad=8)
    if x is not None:
        axes.set_xlabel(x, loc="right")


def step_axis(axes: "Axes", last_step: float) -> None:
    """An x axis over whole steps from zero; a run of one step still gets an axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, max(last_step, 1) * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def line(axes: "Axes", x: Floats, y: Floats, **look: Any) -> None:
    """A line; where it has a single point, a dot, which a line would hide. Long series are thinned, peaks kept."""
    x, y = thin(x, y)
    if np.isfinite(y).sum() == 1:
        look |= {"marker": "o", "markersize": 4}
    axes.plot(x, y, **look)


def noisy_line(axes: "Axes", x: Floats, y: Floats, color: str) -> Floats:
    """A noisy series, faint, under its trend; returns the trend."""
    trend = smooth(y)
    line(axes, x, y, color=color, alpha=0.3 if len(x) <= 600 else 0.15, linewidth=0.8)
    line(axes, x, trend, color=color)
    return trend


def thin(x: Floats, y: Floats, bins: int = 600) -> tuple[Floats, Floats]:
    """At most 2·bins points of a series: the smallest and the largest of each bin, in order."""
    if len(x) <= 2 * bins:
        return x, y
    edges = np.linspace(0, len(x), bins + 1).astype(int)
    kept = set()
    for start, end in pairwise(edges):
        part = y[start:end]
        low, high = (part.argmin(), part.argmax()) if np.isfinite(part).all() else (0, len(part) - 1)
        kept |= {start + int(low), start + int(high)}
    index = np.array(sorted(kept))
    return x[index], y[index]


def label_ends(figure: "Figure", axes: "Axes", labels: Sequence[tuple[float, str, str]], size: float = 11) -> None:
    """Writes (y, text, colour) right of the axes at the height of y, pushed apart where they would overlap.

    Call it when the limits of the axes are final. A y outside the limits is written at the edge.
    """
    figure.draw_without_rendering()  # lays out, so that heights are known
    gap = 1.3 * size / axes.bbox.height
    to_fraction = axes.transData + axes.transAxes.inverted()
    wanted = sorted((float(np.clip(to_fraction.transform((0, y))[1], 0, 1)), text, color) for y, text, color in labels)
    places = [place for place, _, _ in wanted]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    overflow = places[-1] - max(1.0, wanted[-1][0]) if places else 0.0
    if overflow > 0:
        places = [place - overflow for place in places]
    for place, (_, text, color) in zip(places, wanted, strict=True):
        axes.annotate(text, (1, place), (6, 0), xycoords="axes fraction", textcoords="offset points",
                      color=color, fontsize=size, va="center")  # fmt: skip
