"""Renders the templates of pages."""

from pathlib import Path
from typing import Any

from octile.extras import require
from octile.report.style import PALETTE

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **content: Any) -> str:
    """Fill a template of this package. Everything but the SVG of charts is escaped."""
    require("jinja2", extra="report")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(palette=PALETTE, **content)
