"""Figures of per-token differences: the tokens at both ends of the list, and the means by position and frequency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octile.report.compare.token_differences import MIN_OCCURRENCES, Group, TokenDifferences
from octile.report.style import COLOR, label_ends, recipe_style, style_axes
from octile.text import format_signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, FRAME = 19, 96  # pixels
MAX_NAME = 18  # characters of a token's name on an axis


def rows(found: TokenDifferences) -> list[Group]:
    """The tokens of both ends of the list, each once, the worst first."""
    return sorted({g.name: g for g in (*found.worst, *found.best)}.values(), key=lambda g: -g.mean)


def height(found: TokenDifferences) -> int:
    """The height of the figure in pixels."""
    return FRAME + ROW * len(rows(found))


def draw_tokens(figure: Figure, found: TokenDifferences) -> None:
    """Draw a row per token with the difference of its loss ± 2 standard errors, and a hollow dot for the control."""
    axes, groups = figure.subplots(), rows(found)
    color = recipe_style(found.recipe)["color"]
    at = np.arange(len(groups))
    style_axes(axes, None, "")
    label = "loss minus BF16's (nats per token), ± 2 standard errors"
    figure.suptitle(label, x=0, ha="left", fontsize=11, color=COLOR["muted"])  # above long names, too
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.axvline(0, color=COLOR["ink"], linewidth=1.2, zorder=0)
    axes.plot([g.control_mean for g in groups], at, "o", markersize=5, markerfacecolor="none", color=COLOR["muted"])
    axes.errorbar([g.mean for g in groups], at, xerr=[2 * g.error for g in groups], fmt="o", markersize=5, color=color,
                  linewidth=1.4)  # fmt: skip
    axes.set_yticks(at, [f"{_short(g.name)}  × {g.count:,}" for g in groups], fontsize=10, color=COLOR["ink"])
    axes.set_ylim(len(groups) - 0.4, -0.6)


def caption_tokens(found: TokenDifferences) -> str:
    """Return the caption of the tokens."""
    return (
        f"Above, the tokens whose loss is most above BF16's under {found.recipe}; below, those most below; after each,"
        " its number of occurrences. Hollow dots: the same token in BF16 with another seed. If FP8 hurt certain tokens,"
        " the upper half would reach further out than the lower one, and further than the hollow dots."
    )


def caption_counts(found: TokenDifferences) -> str:
    """How many tokens differ by more than two standard errors, compared with the control."""
    if not found.tokens:
        return "No token occurs often enough to be compared."
    shares = (found.worse, found.better, found.control_worse, found.control_better)
    worse, better, control_worse, control_better = (f"{n} ({n / found.tokens:.1%})" for n in shares)
    return (
        f"Of {found.tokens:,} tokens that occur {MIN_OCCURRENCES} times or more, {worse} lie more than two standard"
        f" errors above BF16 and {better} below; BF16 with another seed has {control_worse} above and {control_better}"
        " below. Chance alone gives about 2.5% each."
    )


def draw_positions(figure: Figure, found: Sequence[TokenDifferences]) -> None:
    """Draw the mean differences by the number of preceding tokens."""
    _draw(figure, "preceding tokens", [(each.recipe, each.positions) for each in found])


def caption_positions(found: Sequence[TokenDifferences]) -> str:
    """Return the caption by position, with the means and standard errors at both ends."""
    ends = _caption_ends(found[0].recipe, found[0].positions)
    return (
        f"Does the difference depend on the number of preceding tokens? {ends}"
        " preceding tokens. Shaded: two standard errors; gray: BF16 with another seed, which is chance."
    )


def draw_frequencies(figure: Figure, found: Sequence[TokenDifferences]) -> None:
    """Draw the mean differences by the token's frequency in the training text."""
    _draw(figure, "occurrences in a million tokens", [(each.recipe, each.frequencies) for each in found])


def caption_frequencies(found: Sequence[TokenDifferences]) -> str:
    """Return the caption by frequency, with the means and standard errors at both ends."""
    return (
        "Does the difference depend on how rare a token is?"
        f" {_caption_ends(found[0].recipe, found[0].frequencies)} in a million."
        " The line of a recipe that hurts rare tokens would rise to the left, out of the gray."
    )


def _caption_ends(recipe: str, groups: tuple[Group, ...]) -> str:
    known = _known(groups)
    ends = [f"{format_signed(g.mean, '.3f')} ± {g.error:.3f} nats at {g.name}" for g in (known[0], known[-1])]
    return f"{recipe}, mean ± standard error: {ends[0]}, {ends[1]}"


def _known(groups: tuple[Group, ...]) -> list[Group]:
    """The groups of MIN_OCCURRENCES tokens or more; all groups if there are none."""
    return [g for g in groups if g.count >= MIN_OCCURRENCES] or list(groups)


def _draw(figure: Figure, x: str, found: list[tuple[str, tuple[Group, ...]]]) -> None:
    axes = figure.subplots()
    style_axes(axes, x, "loss minus BF16's (nats per token)")
    axes.axhline(0, color=COLOR["ink"], linewidth=1.2)
    groups = _known(found[0][1])  # the same tokens for every recipe
    control = [(g.control_mean, g.control_error) for g in groups]
    labels = [(_line(axes, control, COLOR["muted"]), "bf16, other seed", COLOR["muted"])]
    for recipe, all_groups in found:
        color = recipe_style(recipe)["color"]
        labels.append((_line(axes, [(g.mean, g.error) for g in _known(all_groups)], color), recipe, color))
    few = max(1, len(groups) // 4)
    axes.set_xticks(range(0, len(groups), few), [g.name for g in groups[::few]])
    axes.set_xlim(-0.3, len(groups) - 0.7)
    label_ends(figure, axes, [label for label in labels if np.isfinite(label[0])])


def _line(axes: Axes, points: list[tuple[float, float]], color: str) -> float:
    """Draw a line with two standard errors around it; return its last value."""
    means, errors = np.array(points).T
    axes.fill_between(range(len(means)), means - 2 * errors, means + 2 * errors, color=color, alpha=0.15, linewidth=0)
    axes.plot(means, color=color, marker="o", markersize=3.5)
    return float(means[-1])


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
