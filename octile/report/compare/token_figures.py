"""Which tokens suffer, as pictures: the tokens at both ends of the list, and the means by position and frequency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octile.report.compare.token_differences import FEWEST, Group, TokenDifferences
from octile.report.style import COLOR, label_ends, recipe_style, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, FRAME = 19, 96  # pixels
LONGEST = 18  # characters of a token's name on an axis


def rows(found: TokenDifferences) -> list[Group]:
    """Both ends of the list, each token once, the worst first."""
    return sorted({g.name: g for g in (*found.worst, *found.best)}.values(), key=lambda g: -g.mean)


def height(found: TokenDifferences) -> int:
    return FRAME + ROW * len(rows(found))


def draw_tokens(figure: Figure, found: TokenDifferences) -> None:
    axes, groups = figure.subplots(), rows(found)
    color = recipe_style(found.recipe)["color"]
    at = np.arange(len(groups))
    style_axes(axes, None, "loss minus BF16's (nats a token), ± 2 standard errors")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.axvline(0, color=COLOR["ink"], linewidth=1.2, zorder=0)
    axes.plot([g.control_mean for g in groups], at, "o", markersize=5, markerfacecolor="none", color=COLOR["muted"])
    axes.errorbar([g.mean for g in groups], at, xerr=[2 * g.error for g in groups], fmt="o", markersize=5, color=color,
                  linewidth=1.4)  # fmt: skip
    axes.set_yticks(at, [f"{_short(g.name)}  × {g.count:,}" for g in groups], fontsize=10, color=COLOR["ink"])
    axes.set_ylim(len(groups) - 0.4, -0.6)


def say_tokens(found: TokenDifferences) -> str:
    return (
        f"The tokens that lose most under {found.recipe}, above, and that gain most, below; behind each, how often it"
        " was predicted. Hollow: the same token in BF16 with another seed. If 8 bits hurt certain tokens, the upper"
        " half would reach further out than the lower one, and further than the hollow dots."
    )


def say_counts(found: TokenDifferences) -> str:
    """How many tokens differ by more than chance, beside the control."""
    if not found.tokens:
        return "No token came often enough to say something of it."
    shares = (found.worse, found.better, found.control_worse, found.control_better)
    worse, better, control_worse, control_better = (f"{n} ({n / found.tokens:.1%})" for n in shares)
    return (
        f"Of {found.tokens:,} tokens that were predicted {FEWEST} times or more, {worse} lie more than two standard"
        f" errors above BF16 and {better} below; BF16 with another seed has {control_worse} above and {control_better}"
        " below. If nothing differed, chance would give about 2.5% each."
    )


def draw_positions(figure: Figure, found: Sequence[TokenDifferences]) -> None:
    _draw(figure, "tokens read before", [(each.recipe, each.positions) for each in found])


def say_positions(found: Sequence[TokenDifferences]) -> str:
    ends = _say_ends(found[0].recipe, found[0].positions)
    return (
        f"Does the loss differ more where little was read before, or much? {ends}"
        " tokens read. Shaded: two standard errors; grey: BF16 with another seed, which is chance."
    )


def draw_frequencies(figure: Figure, found: Sequence[TokenDifferences]) -> None:
    _draw(figure, "how often the token comes in a million", [(each.recipe, each.frequencies) for each in found])


def say_frequencies(found: Sequence[TokenDifferences]) -> str:
    return (
        f"Do rare tokens, on the left, suffer more? {_say_ends(found[0].recipe, found[0].frequencies)} in a million."
        " A recipe that hurt rare tokens would rise to the left, out of the grey."
    )


def _say_ends(recipe: str, groups: tuple[Group, ...]) -> str:
    known = _known(groups)
    ends = [f"{g.mean:+.3f} ± {g.error:.3f}".replace("-", "−") + f" nats at {g.name}" for g in (known[0], known[-1])]
    return f"{recipe}: {ends[0]}, {ends[1]}"


def _known(groups: tuple[Group, ...]) -> list[Group]:
    """Without groups of so few tokens that their means say nothing, unless there are no others."""
    return [g for g in groups if g.count >= FEWEST] or list(groups)


def _draw(figure: Figure, x: str, found: list[tuple[str, tuple[Group, ...]]]) -> None:
    axes = figure.subplots()
    style_axes(axes, x, "loss minus BF16's (nats a token)")
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
    """A line with its two standard errors; returns where it ends."""
    means, errors = np.array(points).T
    axes.fill_between(range(len(means)), means - 2 * errors, means + 2 * errors, color=color, alpha=0.15, linewidth=0)
    axes.plot(means, color=color, marker="o", markersize=3.5)
    return float(means[-1])


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
