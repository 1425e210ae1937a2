"""Per-token differences between the held-out losses of a recipe and of BF16, in groups.

Two trained models differ in every token's loss, FP8 or not. Every difference therefore has a control: the same
difference between BF16 with another seed and BF16. The standard error of a group assumes that its tokens are
independent, which is not quite true for tokens of one text; the control shows the actual size of chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octile.report.run.metrics import Floats

Ints = NDArray[np.int64]

MIN_OCCURRENCES = 10  # of a token that is compared
MAX_TOKENS_SHOWN = 10  # at either end of the list
PASSAGE = 128  # tokens of the passage with the largest difference


@dataclass(frozen=True)
class Group:
    """The mean differences of a group of `count` tokens in nats per token, with their standard errors."""

    name: str
    count: int
    mean: float
    error: float
    control_mean: float
    control_error: float


@dataclass(frozen=True)
class TokenDifferences:
    """A recipe's held-out losses minus BF16's, over all seeds that both were trained with.

    Attributes:
        recipe: its name.
        mean: the mean difference over all tokens, nats per token.
        tokens: how many different tokens occur MIN_OCCURRENCES times or more.
        worse, better: how many of these lie more than two standard errors above and below BF16.
        control_worse, control_better: the same numbers for BF16 with another seed; chance gives about 2.5% each.
        worst, best: the tokens farthest above and below BF16, by the end of their interval nearer to zero.
        positions: groups by the number of preceding tokens, as powers of two.
        frequencies: groups by the token's occurrences in a million training tokens, as half powers of ten.
        passage: (text, difference) of the consecutive tokens with the largest differences.
    """

    recipe: str
    mean: float
    tokens: int
    worse: int
    better: int
    control_worse: int
    control_better: int
    worst: tuple[Group, ...]
    best: tuple[Group, ...]
    positions: tuple[Group, ...]
    frequencies: tuple[Group, ...]
    passage: tuple[tuple[str, float], ...]


def token_differences(
    recipe: str,
    tokens_NS: Ints,
    losses: Sequence[tuple[Floats, Floats]],
    control: tuple[Floats, Floats],
    frequency_V: Floats,
    readable: Callable[[int], str],
    text: Callable[[int], str],
) -> TokenDifferences:
    """Compute the differences of losses in groups.

    Args:
        recipe: its name.
        tokens_NS: int64 [N, S], the predicted tokens of N windows.
        losses: for each seed the losses of the recipe and of BF16, [N, S] nats.
        control: the losses of BF16 with another seed and of BF16, [N, S] nats.
        frequency_V: [V], the occurrences of each token in a million tokens of text.
        readable: shows a single token with visible white space.
        text: the text of a token, as part of a passage.
    """
    difference_NS: Floats = np.stack([recipe_NS - bf16_NS for recipe_NS, bf16_NS in losses]).mean(axis=0)
    control_NS = control[0] - control[1]

    def groups(keys_NS: Ints, name: Callable[[int], str]) -> list[Group]:
        ours, theirs = _means(keys_NS, difference_NS), _means(keys_NS, control_NS)
        return [
            Group(name(key), int(count), *map(float, (mean, error, control_mean, control_error)))
            for key, (count, mean, error), (_, control_mean, control_error) in zip(
                np.unique(keys_NS).tolist(), ours, theirs, strict=True
            )
        ]

    frequent = [group for group in groups(tokens_NS, readable) if group.count >= MIN_OCCURRENCES]
    position_NS = np.broadcast_to(np.log2(np.arange(1, tokens_NS.shape[1] + 1)).astype(np.int64), tokens_NS.shape)
    log10_V = np.log10(np.maximum(frequency_V, 1e-3))  # a token that does not occur counts as one in a billion
    half_decade_V = np.floor(2 * log10_V).astype(np.int64)
    return TokenDifferences(
        recipe=recipe,
        mean=float(difference_NS.mean()),
        tokens=len(frequent),
        worse=sum(g.mean > 2 * g.error for g in frequent),
        better=sum(g.mean < -2 * g.error for g in frequent),
        control_worse=sum(g.control_mean > 2 * g.control_error for g in frequent),
        control_better=sum(g.control_mean < -2 * g.control_error for g in frequent),
        worst=tuple(sorted(frequent, key=lambda g: 2 * g.error - g.mean)[:MAX_TOKENS_SHOWN]),
        best=tuple(sorted(frequent, key=lambda g: g.mean + 2 * g.error)[:MAX_TOKENS_SHOWN]),
        positions=tuple(groups(position_NS, lambda power: f"{2**power:,}")),
        frequencies=tuple(groups(half_decade_V[tokens_NS], lambda half: _round(10 ** (half / 2)))),
        passage=_passage(tokens_NS, difference_NS, text),
    )


def _means(keys: Ints, values: Floats) -> list[tuple[float, float, float]]:
    """For each key in order: the number of values, their mean, and its standard error (NaN for a single value)."""
    _, group = np.unique(keys, return_inverse=True)
    group, values = group.ravel(), values.ravel()
    count = np.bincount(group)
    mean = np.bincount(group, values) / count
    squares = np.bincount(group, (values - mean[group]) ** 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(squares / (count - 1) / count)
    return list(zip(count.tolist(), mean.tolist(), error.tolist(), strict=True))


def _round(value: float) -> str:
    """Three significant digits: 3.16, 31.6, 316, 3,160."""
    return f"{value:.3g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def _passage(tokens_NS: Ints, difference_NS: Floats, text: Callable[[int], str]) -> tuple[tuple[str, float], ...]:
    """The passage of at most PASSAGE tokens, aligned to PASSAGE in its window, with the largest mean difference."""
    starts = range(0, tokens_NS.shape[1], PASSAGE)
    best = max(
        ((n, start) for n in range(len(tokens_NS)) for start in starts),
        key=lambda at: difference_NS[at[0], at[1] : at[1] + PASSAGE].mean(),
    )
    part = (best[0], slice(best[1], best[1] + PASSAGE))
    return tuple(
        (text(t), round(d, 3)) for t, d in zip(tokens_NS[part].tolist(), difference_NS[part].tolist(), strict=True)
    )
