"""What one operand looks like before and after its cast: all that is measured, as figures that add up.

What the micro-batches of a step measured is added (`sums`) or its largest is kept (`largest`: a smallest value is the
largest of its negatives), on the operand's device, until the step is over. One pass goes over all values, for the
largest of each channel: rare outliers are never missed. The rest is measured on SAMPLE values of a large operand, whole
rows of tiles spread evenly; scales and their histogram are those of all tiles but tiles of zeros, whose scale is 1 by
definition and says nothing about the numbers.

Names are TransformerEngine's where it has them (the debug features LogFp8TensorStats and LogTensorStats of its version
2.12): `underflows%`, `overflows%`, `scale_inv_min`, `scale_inv_max`, `mse`, `cur_amax`, `dynamic_range`, and
`max_blockwise_dynamic_range`. Dynamic ranges are in octaves: log₂(largest magnitude / smallest that is not zero).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octile.formats import FloatFormat, IntFormat
from octile.ops.quantize import decode, split_into_blocks
from octile.scaled import ScaledTensor
from octile.train.diagnostics import zero_blocks

SAMPLE = 1 << 14  # values that are measured in full at most, or one row of tiles
OUTLIER = 10.0  # a channel is an outlier where its largest value is so many times that of the median channel
EXPONENTS = range(-150, 129)  # of scales that the histogram tells apart
TOP_CHANNELS = 3

Row = dict[str, Any]


@dataclass
class OperandStats:
    """Of one operand; all fields lie on its device.

    Attributes:
        sums: name → float64 scalar.
        largest: name → float32 scalar.
        scales: float32 [EXPONENTS], blocks whose scale rounds to that power of two; blocks of zeros are in none.
        channels: float32 [K], the largest magnitude of each channel.
    """

    sums: dict[str, Tensor]
    largest: dict[str, Tensor]
    scales: Tensor
    channels: Tensor

    def add(self, other: OperandStats) -> None:
        """Takes in what another micro-batch measured."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value
        for name, value in other.largest.items():
            self.largest[name] = torch.maximum(self.largest[name], value)
        self.scales = self.scales + other.scales
        self.channels = torch.maximum(self.channels, other.channels)

    def packed(self) -> Tensor:
        """All of it as one float64 vector, so that one copy brings it to the host."""
        scalars = [value.double() for value in (*self.sums.values(), *self.largest.values())]
        return torch.cat([torch.stack(scalars), self.scales.double(), self.channels.double()])

    def row(self, packed: list[float]) -> Row:
        """The figures as they are written down, from `packed` on the host."""
        names = (*self.sums, *self.largest)
        v = dict(zip(names, packed, strict=False))
        scales = packed[len(names) : len(names) + len(EXPONENTS)]
        return _row(v, scales, packed[len(names) + len(EXPONENTS) :])


@torch.no_grad()
def measure(before: Tensor, q: ScaledTensor) -> OperandStats:
    """Measures an operand: before [..., M, K], its values before the cast, and q, the same after it.

    M are tokens or a weight's outputs, K are channels.
    """
    channels = before.abs().flatten(0, -2).amax(0).float()
    x, code, scale = _sampled(before, q)
    n, rows, cols = x.numel(), min(_rows_of_a_tile(q), before.shape[-2]), q.block[1]
    x, code = (
        split_into_blocks(x, rows, cols),
        split_into_blocks(code, rows, cols),
    )  # [..., tiles, rows, tiles, columns]
    scale = scale[..., :, None, :, None]
    size = x.abs()
    tile_amax = size.amax(dim=(-3, -1))
    tile_amin = torch.where(x != 0, size, torch.inf).amin(dim=(-3, -1))
    with_values = tile_amax > 0
    octaves = torch.where(with_values, (tile_amax / tile_amin).log2(), 0.0)
    empty = zero_blocks(q)
    unit = tile_amax.amax().clamp(min=2.0**-100)  # so that fourth powers and squared errors stay within FP32
    u, e, unit = (x / unit).flatten(), ((code * scale - x) / unit).flatten(), unit.double()
    u2 = u * u
    nonzero, kept = x.count_nonzero(), code.count_nonzero()
    sums = {
        "values": torch.tensor(n, device=x.device),
        "nonzero": nonzero,
        "underflows": nonzero - kept,
        "overflows": (size > scale * _clips_above(q.fmt)).sum(),
        "subnormals": (code.abs() < _smallest_normal(q.fmt)).sum().sub(code.numel() - kept).clamp(min=0),
        "x": u.sum() * unit,
        "x2": u2.sum() * unit**2,
        "x3": u2.dot(u) * unit**3,
        "x4": u2.dot(u2) * unit**4,
        "size": u.abs().sum() * unit,
        "error2": e.dot(e) * unit**2,
        "outward": e.dot(u.sign()) * unit,
        "tiles": with_values.sum(),
        "octaves": octaves.sum(),
    }
    largest = {
        "amax": channels.amax(),
        "-amin": -tile_amin.amin(),
        "-tile_amax": -torch.where(with_values, tile_amax, torch.inf).amin(),
        "octaves": octaves.amax(),
        "error": e.abs().amax() * unit,
        "scale": torch.where(empty, -torch.inf, q.scale).amax(),
        "-scale": -torch.where(empty, torch.inf, q.scale).amin(),
    }
    exponents = q.scale.log2().round().clamp(EXPONENTS[0], EXPONENTS[-1])
    exponents = torch.where(empty, torch.inf, exponents).flatten()  # the histogram leaves out what is outside of it
    return OperandStats(
        {name: value.double() for name, value in sums.items()},
        {f"max {name}": value.float() for name, value in largest.items()},
        torch.histc(exponents, len(EXPONENTS), EXPONENTS[0] - 0.5, EXPONENTS[-1] + 0.5),
        channels,
    )


def _sampled(before: Tensor, q: ScaledTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values and decoded codes, float32 [..., M, K], and the scales of their tiles, [..., tiles, ⌈K/C⌉].

    All of them, or as many whole rows of tiles as SAMPLE allows, in one matrix.
    """
    m, k = before.shape[-2:]
    tile = _rows_of_a_tile(q)
    scale_row = torch.arange(-(-m // tile), device=before.device) * tile // q.block[0]
    tile = min(tile, m)
    if before.numel() <= max(SAMPLE, tile * k):
        return before.float(), decode(q.data), q.scale[..., scale_row, :]
    whole = m // tile  # a smaller tile at the edge is left out
    everywhere = torch.arange(before.numel() // (m * k) * whole, device=before.device)
    chosen = everywhere[:: -(-len(everywhere) * tile * k // SAMPLE)]
    matrix, place = chosen // whole, chosen % whole
    row = ((matrix * m + place * tile)[:, None] + torch.arange(tile, device=before.device)).flatten()
    data = q.data.flatten(0, -2).view(torch.uint8)[row].view(q.data.dtype)
    scale = q.scale.flatten(0, -2)[matrix * q.scale.shape[-2] + scale_row[place]]
    return before.flatten(0, -2)[row].float(), decode(data), scale


def _rows_of_a_tile(q: ScaledTensor) -> int:
    """A tile's rows; one scale for the whole tensor is looked at in pieces of 128 rows."""
    rows = q.block[0]
    return 128 if rows % 128 == 0 or rows >= max(q.shape[-2], 128) else rows


def _clips_above(fmt: FloatFormat | IntFormat) -> float:
    """What is larger would be rounded to the value after the largest one, if there were one."""
    if isinstance(fmt, IntFormat):
        return fmt.max + 0.5
    return fmt.max + fmt.epsilon * 2.0 ** (math.floor(math.log2(fmt.max)) - 1)


def _smallest_normal(fmt: FloatFormat | IntFormat) -> float:
    return fmt.smallest_normal if isinstance(fmt, FloatFormat) else 0.0


def _row(v: dict[str, float], scales: list[float], channels: list[float]) -> Row:
    n, nonzero = v["values"], max(v["nonzero"], 1.0)
    amax, amin, smallest = v["max amax"], -v["max -amin"], -v["max -tile_amax"]  # the sample may hold only zeros
    mean, variance = v["x"] / n, v["x2"] / n - (v["x"] / n) ** 2
    fourth = v["x4"] / n - 4 * mean * v["x3"] / n + 6 * mean**2 * v["x2"] / n - 3 * mean**4
    ordered = sorted(channels)
    typical = ordered[len(ordered) // 2]
    top = sorted(range(len(channels)), key=lambda c: -channels[c])[:TOP_CHANNELS]
    row: Row = {
        "values": int(n),
        "underflows%": 100 * v["underflows"] / nonzero,
        "overflows%": 100 * v["overflows"] / nonzero,
        "subnormals%": 100 * v["subnormals"] / nonzero,
        "cur_amax": amax,
        "dynamic_range": math.log2(amax / amin) if nonzero and 0 < amin <= amax else 0.0,
        "max_blockwise_dynamic_range": v["max octaves"],
        "mean_blockwise_dynamic_range": v["octaves"] / max(v["tiles"], 1.0),
        "between_blocks_dynamic_range": math.log2(amax / smallest) if 0 < smallest <= amax else 0.0,
        "scale_inv_min": -v["max -scale"],
        "scale_inv_max": v["max scale"],
        "kurtosis": fourth / variance**2 if variance > 0 else None,
        "outlier_channels": sum(c > OUTLIER * typical for c in channels),
        "mse": v["error2"] / n,
        "snr_db": decibels(v["x2"], v["error2"]),
        "worst_over_rms": v["max error"] / math.sqrt(v["x2"] / n) if v["x2"] > 0 else 0.0,
        "bias": v["outward"] / v["size"] if v["size"] > 0 else 0.0,
        "top_channels": [[c, channels[c] / typical if 0 < typical < math.inf else None] for c in top],
        "scale_histogram": {
            "log2": [e for e, count in zip(EXPONENTS, scales, strict=True) if count],
            "count": [int(count) for count in scales if count],
        },
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def decibels(signal: float, noise: float) -> float | None:
    """10·log₁₀(signal / noise), None where there is no noise (or no number)."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 and math.isfinite(signal / noise) else None
