"""Converts a figure to inline SVG for a page, with colors as CSS variables.

Every color of the palette becomes a CSS variable, so that "ink" is dark on light paper and light on dark paper. Text
stays text in the page's font. A figure may have a second, narrow version for telephones.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from octile.report.style import COLOR, drawing, lay_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VARIABLE = {light: f"var(--{name})" for name, light in COLOR.items()}


@dataclass(frozen=True)
class Chart:
    """A figure in a page: title, caption, SVG, and optionally the SVG of a narrow version for telephones."""

    title: str
    caption: str
    svg: str
    narrow: str | None = None


def make_chart(
    title: str,
    caption: str,
    draw: Callable[["Figure"], None],
    size: tuple[int, int],
    narrow: tuple[int, int] | None = None,
) -> Chart:
    """Draw a figure at `size`, and at `narrow` if given, each (width, height) in pixels."""

    def svg(width: int, height: int) -> str:
        with drawing(width, height) as figure:
            draw(figure)
            return to_svg(figure, name=f"{title}-{width}", description=caption)

    return Chart(title, caption, svg(*size), svg(*narrow) if narrow else None)


def to_svg(figure: "Figure", name: str, description: str) -> str:
    """Convert a figure to inline SVG. `name` makes its internal references unique in the page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure)  # whose sizes of texts the layout uses
    lay_out(figure)
    figure.set_layout_engine(None)  # with one, `savefig` draws the figure twice
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", svg)  # numbered from 1 in every figure; nothing refers to them
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\d+\.\d+", lambda n: f"{float(n[0]):.1f}", path[0]), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    svg = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda color: _VARIABLE.get(color[0], color[0]), svg)
    head = re.compile(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>')
    svg = head.sub(lambda old: f'<svg {old[1]} role="img" aria-label="{escape(description)}">', svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).strip()
