"""A figure as part of a page: SVG without size, header or address, whose colours the page decides.

Every colour of the palette becomes a CSS variable, so that "ink" is dark on light paper and light on dark; text stays
text, in the page's font. One figure may come in two shapes, for a desk and for a telephone.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from octile.report.style import COLOR, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VARIABLE = {light: f"var(--{name})" for name, light in COLOR.items()}


@dataclass(frozen=True)
class Chart:
    """A figure in a page: its heading, the sentence that says what to see, its SVG, and another for telephones."""

    title: str
    sentence: str
    svg: str
    narrow: str | None = None


def make_chart(
    title: str,
    sentence: str,
    draw: Callable[["Figure"], None],
    size: tuple[int, int],
    narrow: tuple[int, int] | None = None,
) -> Chart:
    """Draws a figure at `size` and perhaps at `narrow`, each (width, height) in pixels."""

    def svg(width: int, height: int) -> str:
        with drawing(width, height) as figure:
            draw(figure)
            return to_svg(figure, name=f"{title}-{width}", description=sentence)

    return Chart(title, sentence, svg(*size), svg(*narrow) if narrow else None)


def to_svg(figure: "Figure", name: str, description: str) -> str:
    """A figure as SVG for a page. `name` keeps its inner references apart from those of the page's other figures."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", svg)  # counted anew in every figure; nothing refers to these
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\d+\.\d+", lambda n: f"{float(n[0]):.1f}", path[0]), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    svg = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda color: _VARIABLE.get(color[0], color[0]), svg)
    head = re.compile(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>')
    svg = head.sub(lambda old: f'<svg {old[1]} role="img" aria-label="{escape(description)}">', svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).strip()
