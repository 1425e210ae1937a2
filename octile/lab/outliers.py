"""Outliers in a layer's input: which tokens and channels hold them, and the effect of removing them.

Large models have a few "massive activations" at the first token, at "." and at a newline, always in the same channels.
They determine a scale that many values share, at the cost of all others. Here a value is massive if it is at least
MASSIVE times the median magnitude of the layer's input (no normally distributed value reaches 10 times). The massive
values of some tokens are set to zero, and three effects are measured. They are how much of the quantization error
disappears, how much of it in tokens that lost no value and only share a scale, and how much the output changes.

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
class Removal:
    """The effect of setting the massive values of some tokens to zero.

    Attributes:
        kind: the kind of tokens, one of KINDS, or "all tokens".
        tokens: the number of these tokens.
        massive: the number of their massive values.
        largest: their largest value over the median of the layer's input.
        output: the change of y = x · wᵀ, ‖Δy‖ / ‖y‖.
        error: scheme → quantization error of y without these values over that with them, as power; 1 is no change.
        others: the same over the tokens without any massive value; NaN if there are none.
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
    """Outliers in a layer's input.

    Attributes:
        layer: the layer's name.
        size: |x| over its median, float32 [T, K].
        kinds: the kind of each token.
        sequence: the number of tokens in a sequence.
        without: the effect of removal, for each kind of token that occurs, and for all.
    """

    layer: str
    size: Tensor
    kinds: Sequence[str]
    sequence: int
    without: Sequence[Removal]


def token_kinds(tokens: Tensor, text_of: Callable[[int], str] | None) -> list[str]:
    """Return the kind of each token of a batch [B, S]. Without text_of, only first tokens are recognized."""
    kinds = []
    for row in tokens.tolist():
        for position, token in enumerate(row):
            text = text_of(token) if text_of else "?"
            is_period, is_newline = text.strip() == ".", text.strip() == "" and "\n" in text
            kinds.append(KINDS[0] if position == 0 else "." if is_period else "newline" if is_newline else KINDS[3])
    return kinds


def gemms_by_token(capture: Capture) -> list[CapturedGemm]:
    """Return the GEMMs of a capture in which the rows of x are the tokens: fprop, except of experts.

    Raises:
        ValueError: there is none, or the capture has no token ids.
    """
    if capture.tokens is None:
        raise ValueError("the capture has no token ids")
    found = [g for g in capture.gemms if g.gemm == "fprop" and g.expert is None and len(g.a) == capture.tokens.numel()]
    if not found:
        raise ValueError("the capture has no fprop outside experts, whose rows are the tokens")
    return found


def find_outliers(
    fprop: CapturedGemm, kinds: Sequence[str], sequence: int, sample: int = SAMPLE, seed: int = 0
) -> Outliers:
    """Analyze the input of a layer, given one of `gemms_by_token`, with a sample of its output channels."""
    x = fprop.a.float()
    size = x.abs() / _median(x)
    rows = torch.randperm(len(fprop.b), generator=torch.Generator().manual_seed(seed))[:sample].sort().values
    w = fprop.b[rows].double()
    w_quantized = quantize(fprop.b.contiguous(), WEIGHT).dequantize()[rows].double()
    y = x.double() @ w.T
    noise = {name: _noise(x, name, w, w_quantized) for name in SCHEMES}
    massive = size >= MASSIVE
    other = ~massive.any(1)
    without = []
    for kind in (*KINDS, "all tokens"):
        selected = torch.tensor([kind in (each, "all tokens") for each in kinds])
        if not selected.any():
            continue
        removed = massive & selected[:, None]
        remaining = x.masked_fill(removed, 0.0)
        after = {name: _noise(remaining, name, w, w_quantized) for name in SCHEMES}
        without.append(
            Removal(
                kind,
                int(selected.sum()),
                int(removed.sum()),
                size[selected].max().item(),
                math.sqrt((remaining.double() @ w.T - y).square().sum() / y.square().sum()),
                {name: (after[name].sum() / noise[name].sum()).item() for name in SCHEMES},
                {name: (after[name][other].sum() / noise[name][other].sum()).item() for name in SCHEMES},
            )
        )
    return Outliers(fprop.layer, size, kinds, sequence, without)


def most_outlying(gemms: Sequence[CapturedGemm]) -> CapturedGemm:
    """Return the GEMM whose input has the largest amax over median."""
    return max(gemms, key=lambda g: (g.a.float().abs().max() / _median(g.a.float())).item())


def _median(x: Tensor) -> Tensor:
    """Return the median of the nonzero magnitudes; 1 if all are zero."""
    sizes = x.abs()[x != 0]
    return sizes.median() if len(sizes) else x.new_ones(())


def _noise(x: Tensor, scheme: str, w: Tensor, w_quantized: Tensor) -> Tensor:
    """Return the squared error of each token's outputs x · wᵀ with quantized operands, float64 [T]."""
    fmt, block = SCHEMES[scheme]
    q = quantize(x, block, fmt).dequantize().double()
    return (q @ w_quantized.T - x.double() @ w.T).square().sum(1)
