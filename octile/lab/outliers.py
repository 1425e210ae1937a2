"""Outliers among a layer's inputs: which tokens and channels have them, and what would be without them.

Large models hold a few "massive activations" at the first token, at "." and at a newline, always in the same channels.
One scale for many values is set by them, and everything else pays. Here a value is massive from MASSIVE times the
median magnitude of the layer's input on (of normally distributed data none reaches ten times). The massive values of
some tokens are set to zero, and three things looked at: how much of the cast's error goes, how much of that in tokens
which lost nothing and share a scale only, and how much of the output.

Source: Sun et al., "Massive Activations in Large Language Models" (arXiv 2402.17762).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.formats import E4M3, INT8, FloatFormat, IntFormat
from octile.lab.capture import Capture, CapturedGemm
from octile.lab.what_if import SAMPLE
from octile.recipe import Extent
from octile.scaled import quantize

MASSIVE = 100.0
KINDS = ("first token", ".", "newline", "other tokens")
SCHEMES: Mapping[str, tuple[FloatFormat | IntFormat, tuple[Extent, Extent]]] = {
    "INT8, one scale a tensor": (INT8, (None, None)),
    "E4M3, one scale a tensor": (E4M3, (None, None)),
    "E4M3, tiles of 1×128": (E4M3, (1, 128)),
}
WEIGHT: tuple[Extent, Extent] = (128, 128)


@dataclass(frozen=True)
class Without:
    """What changes when the massive values of some tokens are zero.

    Attributes:
        kind: of tokens, one of KINDS, or "all tokens".
        tokens: how many there are.
        massive: how many of their values are massive.
        largest: their largest value over the median of the layer's input.
        output: how far y = x · wᵀ moves, ‖Δy‖ / ‖y‖.
        error: scheme → power of the cast's error in y with them zero, over that with them there; 1 is no change.
        others: the same over the tokens that have no massive value at all; NaN where there are none.
    """

    kind: str
    tokens: int
    massive: int
    largest: float
    output: float
    error: Mapping[str, float]
    others: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Outliers:
    """A layer's input.

    Attributes:
        layer: its name.
        size: |x| over its median, float32 [T, K].
        kinds: of each token; sequence: how many tokens a sequence has.
        without: for each kind of token that occurs, and for all.
    """

    layer: str
    size: Tensor
    kinds: Sequence[str]
    sequence: int
    without: Sequence[Without]


def token_kinds(tokens: Tensor, text_of: Callable[[int], str] | None) -> list[str]:
    """The kind of each token of a batch [B, S], B·S of them. Without text_of only the first one's is known."""
    kinds = []
    for row in tokens.tolist():
        for place, token in enumerate(row):
            text = text_of(token) if text_of else "?"
            stop, end = text.strip() == ".", text.strip() == "" and "\n" in text
            kinds.append(KINDS[0] if place == 0 else "." if stop else "newline" if end else KINDS[3])
    return kinds


def gemms_by_token(capture: Capture) -> list[CapturedGemm]:
    """The products of a capture in which every row of x is a token: fprop, and no experts.

    Raises:
        ValueError: there is none, or the capture does not say what the model read.
    """
    if capture.tokens is None:
        raise ValueError("the capture does not say which tokens the model read")
    found = [
        p for p in capture.products if p.product == "fprop" and p.expert is None and len(p.a) == capture.tokens.numel()
    ]
    if not found:
        raise ValueError("the capture has no fprop whose rows are the tokens: experts have other rows")
    return found


def outliers(p: CapturedGemm, kinds: Sequence[str], sequence: int, sample: int = SAMPLE, seed: int = 0) -> Outliers:
    """Analyze the input of a layer, from one of `gemms_by_token`, on a sample of its output channels."""
    x = p.a.float()
    size = x.abs() / _median(x)
    rows = torch.randperm(len(p.b), generator=torch.Generator().manual_seed(seed))[:sample].sort().values
    w = p.b[rows].double()
    w_cast = quantize(p.b.contiguous(), WEIGHT).dequantize()[rows].double()
    y = x.double() @ w.T
    noise = {name: _noise(x, name, w, w_cast) for name in SCHEMES}
    massive = size >= MASSIVE
    other = ~massive.any(1)
    without = []
    for kind in (*KINDS, "all tokens"):
        here = torch.tensor([kind in (each, "all tokens") for each in kinds])
        if not here.any():
            continue
        removed = massive & here[:, None]
        kept = x.masked_fill(removed, 0.0)
        after = {name: _noise(kept, name, w, w_cast) for name in SCHEMES}
        without.append(
            Without(
                kind,
                int(here.sum()),
                int(removed.sum()),
                size[here].max().item(),
                math.sqrt((kept.double() @ w.T - y).square().sum() / y.square().sum()),
                {name: (after[name].sum() / noise[name].sum()).item() for name in SCHEMES},
                {name: (after[name][other].sum() / noise[name][other].sum()).item() for name in SCHEMES},
            )
        )
    return Outliers(p.layer, size, kinds, sequence, without)


def most_outlying(products: Sequence[CapturedGemm]) -> CapturedGemm:
    """The one whose input reaches furthest beyond its median."""
    return max(products, key=lambda p: (p.a.float().abs().max() / _median(p.a.float())).item())


def _median(x: Tensor) -> Tensor:
    """Of the magnitudes that are not zero; 1 where all are."""
    sizes = x.abs()[x != 0]
    return sizes.median() if len(sizes) else x.new_ones(())


def _noise(x: Tensor, scheme: str, w: Tensor, w_cast: Tensor) -> Tensor:
    """Squared error of each token's outputs, x · wᵀ with both cast: float64 [T]."""
    fmt, block = SCHEMES[scheme]
    q = quantize(x, block, fmt).dequantize().double()
    return (q @ w_cast.T - x.double() @ w.T).square().sum(1)
