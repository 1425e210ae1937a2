"""The page of a comparison: outcome, curves, confidence intervals, worst tokens and gradients.

`result.py` defines the numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from octile.atomic_files import write_text
from octile.report.compare import gradient_figures, outcome_figure, token_figures
from octile.report.compare.curves_figure import caption_compare, draw_compare
from octile.report.compare.result import MIN_STEPS, CompareResult
from octile.report.compare.summary import notes, seeds_note, verdict_sentence
from octile.report.compare.tables import detail_rows, outcome_rows
from octile.report.compare.token_differences import TokenDifferences
from octile.report.page import render
from octile.report.run.metrics import flatten
from octile.report.style import HALF, PHONE, WIDE, palette_name, save_drawing
from octile.report.svg import Chart, make_chart
from octile.text import escape_control_characters, format_signed


def write_compare_report(folder: Path, result: CompareResult) -> Path:
    """Write FOLDER/report.html with tables and captioned figures.

    Returns:
        The path of the page, a single file that needs no network. The same result always gives the same page.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must exist: {folder} does not")
    page = render(
        "compare.html.jinja",
        title=f"{result.preset}: recipes vs. BF16",
        lead=verdict_sentence(result),
        notices=[],
        chart=make_chart(
            "Loss, and its gap to BF16",
            caption_compare(result),
            lambda figure: draw_compare(figure, result),
            size=(WIDE, 560),
            narrow=(PHONE, 560),
        ),
        rows=outcome_rows(result),
        details=detail_rows(result),
        bootstrapped=any(result.outcome(name).over_seeds_bootstrap for name in result.names),
        bar=f"{result.bar:.2%}",
        noise="not measured" if math.isnan(result.noise_band) else f"{result.noise_band:.2%}",
        min_steps=MIN_STEPS,
        seeds_note=seeds_note(result),
        notes=notes(result),
        intervals=_intervals(result),
        token_charts=_token_charts(result),
        tokens=[_tokens(found) for found in result.tokens],
        gradients=[_gradients(result, name) for name in dict.fromkeys(c.recipe for c in result.gradients)],
        machine=result.machine,
        recipe_files=result.recipe_files,
        configuration=flatten(result.config),
    )
    path = folder / "report.html"
    write_text(path, page)
    return path


def save_compare_figure(result: CompareResult, path: Path) -> Path:
    """Write the figure of the curves as a file, PNG (at twice the resolution) or SVG by the suffix of `path`.

    Raises:
        ValueError: the suffix is another.
    """
    return save_drawing(path, WIDE, 560, lambda figure: draw_compare(figure, result))


def _intervals(result: CompareResult) -> Chart | None:
    if not any(math.isfinite(result.gap(curve)) for curve in result.recipes):
        return None
    high = outcome_figure.height(result)
    return make_chart(
        "The gaps and their confidence intervals",
        outcome_figure.caption_outcomes(result),
        lambda figure: outcome_figure.draw_outcomes(figure, result),
        size=(WIDE, high),
        narrow=(PHONE, high),
    )


def _token_charts(result: CompareResult) -> list[Chart]:
    """The figures by position and by frequency, each with all recipes."""
    if not result.tokens:
        return []
    position, frequency = (
        token_figures.caption_positions(result.tokens),
        token_figures.caption_frequencies(result.tokens),
    )
    return [
        make_chart("By position", position, lambda f: token_figures.draw_positions(f, result.tokens), (HALF, 300)),
        make_chart("By frequency", frequency, lambda f: token_figures.draw_frequencies(f, result.tokens), (HALF, 300)),
    ]


def _tokens(found: TokenDifferences) -> dict[str, Any]:
    """The tokens of one recipe: the figure, the table of the worst tokens, and the worst passage."""
    strongest = max((abs(change) for _, change in found.passage), default=1.0) or 1.0
    high = token_figures.height(found)
    return {
        "recipe": found.recipe,
        "color": palette_name(found.recipe),
        "counts": token_figures.caption_counts(found),
        "chart": make_chart(
            f"Tokens under {found.recipe}",
            token_figures.caption_tokens(found),
            lambda figure: token_figures.draw_tokens(figure, found),
            size=(HALF, high),
        )
        if token_figures.rows(found)
        else None,
        "worst": [
            (
                escape_control_characters(g.name),
                f"{g.count:,}",
                f"{format_signed(g.mean, '.3f')} ± {g.error:.3f}",
                f"{format_signed(g.control_mean, '.3f')} ± {g.control_error:.3f}",
            )
            for g in found.worst
        ],
        "passage": [
            (_visible(text), f"{format_signed(change, '.2f')} nats", _change_color(change), _opacity(strongest, change))
            for text, change in found.passage
        ],
    }


def _visible(text: str) -> str:
    """A text with visible line ends."""
    return escape_control_characters(text).replace("\n", "↵\n")


def _change_color(change: float) -> str:
    """The color of a loss that is larger or smaller than BF16's."""
    return "vermilion" if change > 0 else "blue"


def _opacity(strongest: float, change: float) -> int:
    """The opacity of a change in percent; at most 60, so that the text stays readable."""
    return round(60 * abs(change) / strongest)


def _gradients(result: CompareResult, name: str) -> dict[str, Any]:
    checks = [check for check in result.gradients if check.recipe == name]
    if all(math.isnan(layer.degrees) for check in checks for layer in check.by_layer()):
        return {
            "recipe": name,
            "color": palette_name(name),
            "charts": [],
            "note": gradient_figures.caption_angles(checks),
        }
    return {
        "recipe": name,
        "color": palette_name(name),
        "note": "",
        "step": f"{checks[-1].step:,}",
        "charts": [
            make_chart(
                f"Angle of {name}'s gradients",
                gradient_figures.caption_angles(checks),
                lambda figure: gradient_figures.draw_angles(figure, checks),
                (HALF, 300),
            ),
            make_chart(
                f"Norm of {name}'s gradients",
                gradient_figures.caption_norms(checks),
                lambda figure: gradient_figures.draw_norms(figure, checks),
                (HALF, 300),
            ),
        ],
        "worst": [
            (weight.name, f"{weight.degrees:.1f}°", f"{weight.cosine:.4f}", f"{weight.norm_ratio:.3f}")
            for weight in gradient_figures.worst_weights(checks)
        ],
    }
