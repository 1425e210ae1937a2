"""The pictures of `octile lab what-if` about outliers: where a layer's input is large, and what would be without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from octile.lab.pages.what_if_figures import LARGE, legend
from octile.report.run.metrics import Floats
from octile.report.style import COLOR, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = NDArray[np.intp]

KIND_COLOR = {"first token": "vermilion", ".": "purple", "newline": "green", "other tokens": "blue"}
SCHEME_COLOR = ("vermilion", "amber", "blue")
DOTS = 800  # at most: the largest values


@dataclass(frozen=True)
class Map:
    """One sequence of a layer's input.

    Attributes:
        layer: its name.
        size: |x| over the median of the whole input, [tokens, channels].
        kinds: of each token.
        massive: from which size on a value counts as massive.
    """

    layer: str
    size: Floats
    kinds: Sequence[str]
    massive: float


class Without(Protocol):
    """What changes when the massive values of some tokens are zero."""

    @property
    def kind(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def massive(self) -> int: ...
    @property
    def output(self) -> float: ...
    @property
    def error(self) -> Mapping[str, float]: ...
    @property
    def others(self) -> Mapping[str, float]: ...


def in_words(kind: str) -> str:
    """A kind of token within a sentence."""
    return "“.”" if kind == "." else kind


def draw_map(figure: Figure, data: Map) -> None:
    """A dot a large value, in the color of its token's kind; its area grows with its size."""
    axes = figure.subplots()
    style_axes(axes, "channel", "token, the first on top")
    token, channel = _largest(data)
    size = data.size[token, channel]
    area = 2 + 40 * np.log2(size / size.min()) / max(np.log2(size.max() / size.min()), 1)
    for kind, name in KIND_COLOR.items():
        own = np.array([data.kinds[t] == kind for t in token], dtype=bool)
        if own.any():
            axes.scatter(channel[own], token[own], s=area[own], color=COLOR[name], alpha=0.65, linewidths=0)
    axes.set_xlim(-1, data.size.shape[1])
    axes.set_ylim(data.size.shape[0] - 0.5, -1.5)
    axes.grid(visible=False)
    there = {data.kinds[t] for t in token}
    used = {in_words(kind): name for kind, name in KIND_COLOR.items() if kind in there}
    legend(figure, used, figure.get_figwidth() * 72 > LARGE)


def _largest(data: Map) -> tuple[Indices, Indices]:
    """Tokens and channels of the values that are drawn: massive ones, and if these are few, a fifth of that size."""
    flat = data.size.ravel()
    order = np.argsort(flat)[::-1][:DOTS]
    shown = order[flat[order] >= min(data.massive, flat.max()) / 5]
    return shown // data.size.shape[1], shown % data.size.shape[1]


def say_map(data: Map) -> str:
    token, channel = _largest(data)
    channels, counts = np.unique(channel, return_counts=True)
    top = channels[np.argsort(counts)[::-1][:3]]
    share = np.isin(channel, top).mean()
    place = divmod(int(data.size.argmax()), data.size.shape[1])
    return (
        f"The input of {data.layer}. A column of dots is a channel that is large in many tokens, a row a token that is"
        f" large in many channels. The largest value is {data.size.max():,.0f} times the median, in channel"
        f" {place[1]} of token {place[0]} ({in_words(data.kinds[place[0]])}); channels {', '.join(map(str, top))} hold"
        f" {share:.0%} of the {len(token):,} dots."
    )


def draw_without(figure: Figure, rows: Sequence[Without]) -> None:
    """A row a kind of token: what of the error remains where nothing was zeroed, and how far the output moves."""
    desk = figure.get_figwidth() * 72 > LARGE
    left, right = figure.subplots(*((1, 2) if desk else (2, 1)), sharey=desk, squeeze=True)
    names = [f"{in_words(row.kind)} ({row.massive:,})" for row in rows]
    style_axes(left, "share of the error that remains", "error of all other tokens")
    style_axes(right, "‖Δy‖ / ‖y‖", "how far the layer's output moves")
    schemes = list(rows[0].others)
    for at, row in enumerate(rows):
        for scheme, color in zip(schemes, SCHEME_COLOR, strict=True):
            left.plot(100 * row.others[scheme], at, "o", color=COLOR[color], markersize=7, alpha=0.85)
        right.barh(at, 100 * row.output, height=0.5, color=COLOR["muted"], alpha=0.6)
        right.annotate(f"{row.output:.1%}", (100 * row.output, at), (4, 0), textcoords="offset points", va="center")
    for axes in (left, right):
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    largest = max((v for row in rows for v in row.others.values() if np.isfinite(v)), default=1.0)
    left.set_xlim(0, 110 * max(1.0, largest))
    right.set_xlim(0, 125 * max(max(row.output for row in rows), 0.01))
    legend(figure, dict(zip(schemes, SCHEME_COLOR, strict=True)), desk)


def say_without(rows: Sequence[Without], massive: float) -> str:
    everything = rows[-1]
    if not everything.massive:
        return f"No value is {massive:g} times the median or more: this input has no massive activations to remove."
    first, *_, last = everything.others
    apart = everything.others[last] > 0.95 > everything.others[first]
    parts = [f"{in_words(row.kind)}: {row.massive:,} in {row.tokens:,}" for row in rows[:-1]]
    return (
        f"Values of {massive:g} times the median or more are set to zero, kind by kind (values in tokens:"
        f" {'; '.join(parts)}). Without any of them, the tokens that never had one keep {everything.others[first]:.0%}"
        f" of their error with {first}, and {everything.others[last]:.0%} with {last}"
        f"{': a tile keeps an outlier to its own token' if apart else ''}. The layer's output moves by"
        f" {everything.output:.0%}{': the outliers are much of what it says' if everything.output > 0.1 else ''}."
    )
