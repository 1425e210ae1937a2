"""Figures of `octile lab what-if` about outliers: where a layer's input is large, and the effect of their removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octile.lab.outliers import MASSIVE, Outliers, Removal
from octile.lab.pages.figures import is_wide, legend
from octile.lab.pages.page import Section
from octile.report.run.metrics import Floats
from octile.report.style import COLOR, PHONE, WIDE, style_axes
from octile.report.svg import make_chart
from octile.text import format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = NDArray[np.intp]

KIND_COLOR = {"first token": "vermilion", ".": "purple", "newline": "green", "other tokens": "blue"}
SCHEME_COLOR = ("vermilion", "amber", "blue")
MAX_DOTS = 800  # the largest values are drawn


@dataclass(frozen=True)
class Map:
    """The input of a layer for one sequence.

    Attributes:
        layer: the layer's name.
        size: |x| over the median of the whole input, [tokens, channels].
        kinds: the kind of each token.
        massive: the size from which a value is massive.
    """

    layer: str
    size: Floats
    kinds: Sequence[str]
    massive: float


def outlier_section(outliers: Outliers, has_texts: bool) -> Section:
    """Make the section about the sequence that holds the largest value, and about the removal of outliers."""
    token = int(outliers.size.amax(1).argmax())
    start = token // outliers.sequence * outliers.sequence
    part = slice(start, start + outliers.sequence)
    data = Map(outliers.layer, outliers.size[part].double().numpy(), outliers.kinds[part], MASSIVE)
    removals = outliers.without
    charts = [
        make_chart("Tokens and channels", describe_map(data), lambda f: draw_map(f, data), (WIDE, 460), (PHONE, 520))
    ]
    notes = []
    if removals[-1].massive:
        charts.append(
            make_chart(
                "Without the outliers",
                describe_removal(removals, MASSIVE),
                lambda f: draw_removal(f, removals),
                (WIDE, 270),
                (PHONE, 520),
            )
        )
    else:
        notes.append(describe_removal(removals, MASSIVE))
    if not has_texts:
        notes.append("Without a tokenizer, “.” and newlines cannot be recognized: name one with --tokenizer.")
    return Section("Outliers", charts, note=" ".join(notes))


def kind_name(kind: str) -> str:
    """Return a kind of token as it appears in a sentence."""
    return "“.”" if kind == "." else kind


def draw_map(figure: Figure, data: Map) -> None:
    """Draw a dot per large value, in the color of its token's kind; its area grows with the value."""
    axes = figure.subplots()
    style_axes(axes, "channel", "token, the first at the top")
    token, channel = _largest(data)
    size = data.size[token, channel]
    area = 2 + 40 * np.log2(size / size.min()) / max(np.log2(size.max() / size.min()), 1)
    for kind, name in KIND_COLOR.items():
        own = np.array([data.kinds[t] == kind for t in token], dtype=bool)
        if own.any():
            axes.scatter(channel[own], token[own], s=area[own], color=COLOR[name], alpha=0.65, linewidths=0)
    tokens, channels = data.size.shape
    axes.set_xlim(-0.02 * channels - 0.5, 1.02 * channels - 0.5)  # no dot lies on a number of an axis or on the edge
    axes.set_ylim(1.03 * tokens - 0.5, -0.03 * tokens - 0.5)
    axes.grid(visible=False)
    present = {data.kinds[t] for t in token}
    used = {kind_name(kind): name for kind, name in KIND_COLOR.items() if kind in present}
    legend(figure, used, is_wide(figure))


def _largest(data: Map) -> tuple[Indices, Indices]:
    """Return tokens and channels of the values to draw: those of at least a fifth of the massive size."""
    flat = data.size.ravel()
    order = np.argsort(flat)[::-1][:MAX_DOTS]
    shown = order[flat[order] >= min(data.massive, flat.max()) / 5]
    return shown // data.size.shape[1], shown % data.size.shape[1]


def describe_map(data: Map) -> str:
    """Describe where the largest value is, and the channels with most large values."""
    token, channel = _largest(data)
    channels, counts = np.unique(channel, return_counts=True)
    top = channels[np.argsort(counts)[::-1][:3]]
    share = np.isin(channel, top).mean()
    hold = f"Channel {top[0]} holds" if len(top) == 1 else f"Channels {', '.join(map(str, top))} hold"
    token_of_max, channel_of_max = divmod(int(data.size.argmax()), data.size.shape[1])
    return (
        f"The input of {data.layer}. A column of dots is a channel that is large for many tokens; a row is a token that"
        f" is large in many channels. The largest value is {data.size.max():,.0f} times the median, in channel"
        f" {channel_of_max} of token {token_of_max} ({kind_name(data.kinds[token_of_max])}). {hold}"
        f" {share:.0%} of the {format_count(len(token), 'dot')}."
    )


def draw_removal(figure: Figure, rows: Sequence[Removal]) -> None:
    """Draw for each kind of token the error that remains in unchanged tokens, and the change of the output."""
    from matplotlib.ticker import MaxNLocator

    wide = is_wide(figure)
    left, right = figure.subplots(*((1, 2) if wide else (2, 1)), sharey=wide, squeeze=True)
    names = [f"{kind_name(row.kind)} ({row.massive:,})" for row in rows]
    style_axes(left, "share of the error that remains", "error of tokens without massive values")
    style_axes(right, "‖Δy‖ / ‖y‖", "change of the layer's output")
    schemes = list(rows[0].others)
    for at, row in enumerate(rows):
        for scheme, color in zip(schemes, SCHEME_COLOR, strict=True):
            left.plot(100 * row.others[scheme], at, "o", color=COLOR[color], markersize=7, alpha=0.85)
        right.barh(at, 100 * row.output, height=0.5, color=COLOR["muted"], alpha=0.6)
        right.annotate(f"{row.output:.1%}", (100 * row.output, at), (4, 0), textcoords="offset points", va="center")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, prune="upper"))  # a number at the edge would be cut off
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    largest = max((v for row in rows for v in row.others.values() if np.isfinite(v)), default=1.0)
    left.set_xlim(-5 * max(1.0, largest), 110 * max(1.0, largest))
    right.set_xlim(0, 125 * max(max(row.output for row in rows), 0.01))
    legend(figure, dict(zip(schemes, SCHEME_COLOR, strict=True)), wide)


def describe_removal(rows: Sequence[Removal], massive: float) -> str:
    """Describe what remains of the other tokens' error, and how the output changes, without massive values."""
    all_tokens = rows[-1]
    if not all_tokens.massive:
        return f"No value is {massive:g} times the median or more, so this input has no massive activations to remove."
    first, *_, last = all_tokens.others
    is_confined = all_tokens.others[last] > 0.95 > all_tokens.others[first]
    confined = ", since a tile confines an outlier to its own token" if is_confined else ""
    informative = ", so the outliers carry much of the information" if all_tokens.output > 0.1 else ""
    parts = [f"{kind_name(row.kind)}: {row.massive:,} in {row.tokens:,}" for row in rows[:-1]]
    return (
        f"Values of {massive:g} times the median or more are set to zero, by kind of token (values in tokens:"
        f" {'; '.join(parts)}). With all of them set to zero, the tokens without such values keep"
        f" {all_tokens.others[first]:.0%} of their error with {first}, and {all_tokens.others[last]:.0%} with"
        f" {last}{confined}. The layer's output changes by {all_tokens.output:.0%}{informative}."
    )
