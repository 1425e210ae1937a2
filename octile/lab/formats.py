"""What each number format can say, in figures: its values, gaps and range, and what goes wrong where they end.

Everything here is computed by the formats themselves (`octile.formats`), none of it is copied from a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octile.formats import BF16, E2M1, E4M3, E5M2, E5M6, FP16, FP32, INT8, UE8M0, FloatFormat, IntFormat
from octile.scaled import quantize

Format = FloatFormat | IntFormat
Floats = NDArray[np.float64]

ALL: tuple[Format, ...] = (FP32, BF16, FP16, E5M6, E4M3, E5M2, INT8, E2M1, UE8M0)


@dataclass(frozen=True)
class Facts:
    """A format in figures.

    Attributes:
        name, bits: of the format.
        largest, smallest_normal, smallest: positive values; smallest is the smallest subnormal, or 1 for integers.
        epsilon: the gap between 1 and the next value.
        finite_values: how many distinct numbers there are, zero once.
        between_1_and_2: how many lie strictly between them.
        octaves: log₂(largest / smallest): how many doublings the format spans.
        bytes_a_value: bits / 8.
        of_fp32: the share of FP32's bytes.
    """

    name: str
    bits: int
    largest: float
    smallest_normal: float
    smallest: float
    epsilon: float
    finite_values: int
    between_1_and_2: int
    octaves: float
    bytes_a_value: float
    of_fp32: float


def facts(fmt: Format) -> Facts:
    """The figures of one format."""
    if isinstance(fmt, IntFormat):
        normal = smallest = gap = 1.0
        values, between = 2 * int(fmt.max) + 1, 0
    else:
        normal, smallest, gap = fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon
        positive = int(fmt.encode(torch.tensor(fmt.max)))  # codes count upwards as their values do
        values = 2 * positive + 1 if fmt.signed else positive + 1
        between = (1 << fmt.mantissa_bits) - 1
    octaves = math.log2(fmt.max) - math.log2(smallest)
    return Facts(
        fmt.name, fmt.bits, fmt.max, normal, smallest, gap, values, between, octaves, fmt.bits / 8, fmt.bits / FP32.bits
    )


def stored_bits(fmt: Format, block: tuple[int, int], scale: Format = FP32) -> float:
    """Bits a value with one scale a block."""
    return fmt.bits + scale.bits / (block[0] * block[1])


def positive_values(fmt: Format) -> Floats:
    """All positive finite values, ascending."""
    values = torch.arange(1.0, fmt.max + 1) if isinstance(fmt, IntFormat) else fmt.values()
    return np.unique(values[values.isfinite() & (values > 0)].double().numpy())


def gaps(fmt: Format) -> tuple[Floats, Floats]:
    """The positive values but the last, and how far it is from each to the next."""
    values = positive_values(fmt)
    return values[:-1], np.diff(values)


def worst_relative_error(fmt: Format, octaves: Sequence[int], points: int = 4096) -> Floats:
    """The largest |round(x) − x| / x over `points` numbers x of each octave [2ᵏ, 2ᵏ⁺¹); too large ones saturate."""
    offsets = 1 + torch.arange(points, dtype=torch.float32) / points
    worst = []
    for k in octaves:
        x = torch.ldexp(offsets, torch.tensor(k))
        worst.append(float(((fmt.round(x) - x).abs().double() / x.double()).max()))
    return np.array(worst)


def add_many_times(fmt: FloatFormat, update: float, times: int) -> Floats:
    """A weight of 1 that receives the same update, 0 < update < 1, again and again and is kept in fmt: [times + 1].

    The update is an FP32 number, so w + update is exact in FP64 and every step is rounded once, to nearest even.
    """
    update = float(np.float32(update))
    weights = [1.0]
    for _ in range(times):
        exact = weights[-1] + update
        gap = fmt.epsilon * 2.0 ** math.floor(math.log2(exact))
        weights.append(round(exact / gap) * gap)  # Python's round takes ties to even
    return np.array(weights)


@dataclass(frozen=True)
class Underflow:
    """What becomes of gradients in a format when the loss is multiplied by `scale`.

    lost: share of the non-zero values that become 0. subnormal: share that lose bits. overflowed: share beyond max.
    """

    scale: float
    lost: float
    subnormal: float
    overflowed: float


def underflow(gradients: Tensor, scale: float, fmt: FloatFormat = FP16) -> Underflow:
    """Counts what fmt does to scale · gradients (scale a power of two; zeros are not counted)."""
    x = gradients[gradients != 0].float() * scale
    rounded = fmt.round(x, saturate=False)
    small = (rounded != 0) & (rounded.abs() < fmt.smallest_normal)
    n = max(x.numel(), 1)
    return Underflow(scale, int((rounded == 0).sum()) / n, int(small.sum()) / n, int((~rounded.isfinite()).sum()) / n)


@dataclass(frozen=True)
class TileErrors:
    """What tiles of 1×128 in one 8-bit format do to an activation.

    Attributes:
        fmt: name of the format.
        flushed: share of the non-zero values that become 0.
        snr_db: 10·log₁₀(Σx² / Σ(q−x)²).
        error_by_size: mean |q−x|/|x| by octaves below the tile's largest value; NaN where no value lies.
    """

    fmt: str
    flushed: float
    snr_db: float
    error_by_size: Floats


TILE_OCTAVES = 24  # below a tile's largest value


def octaves_below_amax(x: Tensor) -> Tensor:
    """How many octaves each value lies below the largest of its 1×128 tile: 0 up to 1 is octave 0. x [M, K] → int64."""
    tiles = x.float().split(128, dim=-1)
    below = torch.cat([(t.abs().amax(-1, keepdim=True) / t.abs()).log2().floor() for t in tiles], dim=-1)
    return below.nan_to_num(TILE_OCTAVES, posinf=TILE_OCTAVES).clamp(0, TILE_OCTAVES).long()


def tile_errors(x: Tensor, fmt: Format) -> TileErrors:
    """Quantizes x [M, K] in tiles of 1×128 and says what was lost."""
    x = x.float()
    q = quantize(x, (1, 128), fmt).dequantize()
    known = x != 0
    relative = ((q - x).abs() / x.abs())[known].double()
    octave = octaves_below_amax(x)[known]
    count = torch.bincount(octave, minlength=TILE_OCTAVES + 1)
    total = torch.bincount(octave, relative, minlength=TILE_OCTAVES + 1)
    signal, noise = x.double().square().sum(), (q.double() - x.double()).square().sum()
    return TileErrors(
        fmt.name,
        int(((q == 0) & known).sum()) / max(int(known.sum()), 1),
        float(10 * torch.log10(signal / noise)),
        torch.where(count > 0, total / count, torch.nan).numpy(),
    )
