"""Finds faults in the layout of figures: texts that touch or are cut off, markers on names, and empty figures."""

import re
from itertools import combinations

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

GAP = 2.0  # pixels between two texts of one line
SIGNED_ZERO = re.compile(r"[−+-]0(\.0*)?(?![.\d])")


def faults(figure: Figure) -> list[str]:
    """Return a line for each pair of texts that touch, each text that is cut off, and each marker on a row's name."""
    figure.draw_without_rendering()
    texts = [(text, box) for text, box in _texts(figure) if box.width and box.height]
    found = [f"{_name(a)} touches {_name(b)}" for (a, p), (b, q) in combinations(texts, 2) if _touch(p, q)]
    width, height = figure.bbox.width, figure.bbox.height
    found += [
        f"{_name(text)} is cut off"
        for text, box in texts
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for axes in figure.axes:
        names = [(label, label.get_window_extent()) for label in axes.get_yticklabels() if label.get_text()]
        found += [f"a marker covers {_name(name)}" for name, box in names if any(map(box.overlaps, _markers(axes)))]
    if not any(axes.lines or axes.patches or axes.images or axes.collections for axes in figure.axes):
        found.append("the figure is empty")
    return found


def faults_of_pages(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the faults of all figures are added that are drawn for pages from now on."""
    from octile.report import svg

    found: list[str] = []
    to_svg = svg.to_svg

    def check(figure: Figure, name: str, description: str) -> str:
        found.extend(f"{name}: {fault}" for fault in faults(figure))
        return to_svg(figure, name, description)

    patch.setattr(svg, "to_svg", check)
    return found


def signed_zeros(text: str) -> list[str]:
    """Return the zeros of a page that have a sign, as in "−0%" and "+0.00 dB", each with what surrounds it."""
    return [text[max(0, m.start() - 20) : m.end() + 10] for m in SIGNED_ZERO.finditer(text)]


def _touch(a: Bbox, b: Bbox) -> bool:
    """Whether two texts overlap, or stand in one line with less than GAP between them."""
    beside = min(a.x1, b.x1) - max(a.x0, b.x0)
    above = min(a.y1, b.y1) - max(a.y0, b.y0)
    return above > 1 and beside > -GAP


def _texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        low, high = sorted(axes.get_xlim())
        bottom, top = sorted(axes.get_ylim())
        texts += [axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title, axes._right_title, *axes.texts]
        ticks = axes.xaxis.get_major_ticks()
        texts += [tick.label1 for tick in ticks if tick.label1.get_visible() and low <= tick.get_loc() <= high]
        ticks = axes.yaxis.get_major_ticks()
        texts += [tick.label1 for tick in ticks if tick.label1.get_visible() and bottom <= tick.get_loc() <= top]
    shown = [text for text in texts if text.get_visible() and text.get_text()]
    return [(text, text.get_window_extent()) for text in shown]


def _markers(axes: Axes) -> list[Bbox]:
    """Return the boxes of the axes' markers in pixels."""
    boxes = []
    for line in axes.lines:
        if line.get_marker() in (None, "None", ""):
            continue
        half = line.get_markersize() * axes.figure.dpi / 72 / 2
        for x, y in line.get_transform().transform(line.get_xydata()):
            boxes.append(Bbox([[x - half, y - half], [x + half, y + half]]))
    return boxes


def _name(text: Text) -> str:
    return repr(text.get_text())
