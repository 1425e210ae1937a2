"""Properties of number formats: their values, gaps and ranges, and the errors they cause.

Everything is computed from the definitions in `octile.formats`.
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
    """Properties of a format.

    Attributes:
        name: the format's name.
        bits: its number of bits.
        largest, smallest_normal, smallest: positive values; smallest is the smallest subnormal number, or 1 for
            integers.
        epsilon: the gap between 1 and the next value.
        finite_values: the number of distinct finite values, with zero counted once.
        between_1_and_2: the number of values strictly between 1 and 2.
        octaves: log₂(largest / smallest), the number of doublings that the format spans.
        bytes_a_value: bits / 8.
        share_of_fp32: bits as a share of FP32's.
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
    share_of_fp32: float


def facts(fmt: Format) -> Facts:
    """Compute the properties of a format."""
    if isinstance(fmt, IntFormat):
        normal = smallest = gap = 1.0
        values, between = 2 * int(fmt.max) + 1, 0
    else:
        normal, smallest, gap = fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon
        positive = int(fmt.encode(torch.tensor(fmt.max)))  # encoded values are ordered as their values are
        values = 2 * positive + 1 if fmt.signed else positive + 1
        between = (1 << fmt.mantissa_bits) - 1
    octaves = math.log2(fmt.max) - math.log2(smallest)
    return Facts(
        fmt.name, fmt.bits, fmt.max, normal, smallest, gap, values, between, octaves, fmt.bits / 8, fmt.bits / FP32.bits
    )


def stored_bits(fmt: Format, block: tuple[int, int], scale: Format = FP32) -> float:
    """Return the bits per value with one scale per block."""
    return fmt.bits + scale.bits / (block[0] * block[1])


def positive_values(fmt: Format) -> Floats:
    """Return all positive finite values in ascending order."""
    values = torch.arange(1.0, fmt.max + 1) if isinstance(fmt, IntFormat) else fmt.values()
    return np.unique(values[values.isfinite() & (values > 0)].double().numpy())


def gaps(fmt: Format) -> tuple[Floats, Floats]:
    """Return the positive values except the last, and the gap from each to the next."""
    values = positive_values(fmt)
    return values[:-1], np.diff(values)


def worst_relative_error(fmt: Format, octaves: Sequence[int], points: int = 4096) -> Floats:
    """Return the largest |round(x) − x| / x over `points` values x of each octave [2ᵏ, 2ᵏ⁺¹); rounding saturates."""
    offsets = 1 + torch.arange(points, dtype=torch.float32) / points
    worst = []
    for k in octaves:
        x = torch.ldexp(offsets, torch.tensor(k))
        worst.append(float(((fmt.round(x) - x).abs().double() / x.double()).max()))
    return np.array(worst)


def add_many_times(fmt: FloatFormat, update: float, times: int) -> Floats:
    """Add an update, 0 < update < 1, repeatedly to a weight of 1 that is stored in fmt; return its values [times + 1].

    The update is rounded to FP32, so that w + update is exact in FP64 and each step rounds once, to nearest even.
    """
    update = float(np.float32(update))
    weights = [1.0]
    for _ in range(times):
        exact = weights[-1] + update
        gap = fmt.epsilon * 2.0 ** math.floor(math.log2(exact))
        weights.append(round(exact / gap) * gap)  # round() breaks ties to even
    return np.array(weights)


@dataclass(frozen=True)
class Underflow:
    """The effect of a format on gradients of a loss that is multiplied by `scale`, as shares of the nonzero values.

    Attributes:
        scale: the loss scale.
        lost: the share that becomes 0.
        subnormal: the share that becomes subnormal, and so loses bits.
        overflowed: the share beyond the largest value.
    """

    scale: float
    lost: float
    subnormal: float
    overflowed: float


def underflow(gradients: Tensor, scale: float) -> Underflow:
    """Measure underflow and overflow of scale · gradients in FP16. The scale is a power of two; zeros do not count."""
    x = gradients[gradients != 0].float() * scale
    rounded = FP16.round(x, saturate=False)
    small = (rounded != 0) & (rounded.abs() < FP16.smallest_normal)
    n = max(x.numel(), 1)
    return Underflow(scale, int((rounded == 0).sum()) / n, int(small.sum()) / n, int((~rounded.isfinite()).sum()) / n)


@dataclass(frozen=True)
class TileErrors:
    """The errors of an activation that is quantized to an 8-bit format in 1×128 tiles.

    Attributes:
        fmt: the name of the format.
        flushed: the share of the nonzero values that become 0.
        snr_db: 10·log₁₀(Σx² / Σ(q−x)²).
        error_by_size: mean |q−x|/|x| by octaves below the tile's largest value; NaN for octaves without values.
    """

    fmt: str
    flushed: float
    snr_db: float
    error_by_size: Floats


TILE_OCTAVES = 24  # octaves below a tile's largest value to distinguish


def octaves_below_amax(x: Tensor) -> Tensor:
    """Return for each value of x [M, K] the whole octaves between it and the largest value of its 1×128 tile, int64."""
    tiles = x.float().split(128, dim=-1)
    below = torch.cat([(t.abs().amax(-1, keepdim=True) / t.abs()).log2().floor() for t in tiles], dim=-1)
    return below.nan_to_num(TILE_OCTAVES, posinf=TILE_OCTAVES).clamp(0, TILE_OCTAVES).long()


def tile_errors(x: Tensor, fmt: Format) -> TileErrors:
    """Quantize x [M, K] in 1×128 tiles, and measure the errors."""
    x = x.float()
    q = quantize(x, (1, 128), fmt).dequantize()
    nonzero = x != 0
    relative = ((q - x).abs() / x.abs())[nonzero].double()
    octave = octaves_below_amax(x)[nonzero]
    count = torch.bincount(octave, minlength=TILE_OCTAVES + 1)
    total = torch.bincount(octave, relative, minlength=TILE_OCTAVES + 1)
    signal, noise = x.double().square().sum(), (q.double() - x.double()).square().sum()
    return TileErrors(
        fmt.name,
        int(((q == 0) & nonzero).sum()) / max(int(nonzero.sum()), 1),
        float(10 * torch.log10(signal / noise)),
        torch.where(count > 0, total / count, torch.nan).numpy(),
    )
