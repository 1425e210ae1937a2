"""Statistics of one operand before and after quantization, in a form that can be added over micro-batches.

`OperandStats` holds sums and maxima (a minimum is the negative of a maximum) on the operand's device until the step
ends. The largest value of each channel is computed over all values, so that rare outliers are never missed. Everything
else is measured on at most SAMPLE values of a large operand, in whole rows of tiles that are evenly spaced. Scales and
their histogram cover all tiles except tiles of zeros, whose scale is 1 by definition.

Names follow TransformerEngine where it has them (debug features LogFp8TensorStats and LogTensorStats, version 2.12):
`underflows%`, `overflows%`, `scale_inv_min`, `scale_inv_max`, `mse`, `cur_amax`, `dynamic_range` and
`max_blockwise_dynamic_range`. Dynamic ranges are in octaves: log₂(largest magnitude / smallest nonzero magnitude).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octile.formats import FloatFormat, IntFormat
from octile.ops.groups import take_tiles
from octile.ops.quantize import decode, split_into_blocks
from octile.scaled import ScaledTensor
from octile.train.step.diagnostics import zero_blocks

SAMPLE = 1 << 14  # the maximum number of sampled values, unless one row of tiles has more
OUTLIER_RATIO = 10.0  # a channel is an outlier if its amax is this multiple of the median channel's
EXPONENTS = range(-150, 129)  # log₂ of scales, the bins of the histogram
TOP_CHANNELS = 3

TelemetryRow = dict[str, Any]


@dataclass
class OperandStats:
    """Statistics of one operand, on its device.

    Attributes:
        sums: name → float64 scalar, to be added.
        maxima: name → float32 scalar, of which the larger is taken.
        scales: float32 [EXPONENTS], the number of blocks whose scale rounds to each power of two, without blocks of
            zeros.
        channels: float32 [K], the largest magnitude of each channel.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    scales: Tensor
    channels: Tensor

    def add(self, other: OperandStats) -> None:
        """Add the statistics of another micro-batch."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value)
        self.scales = self.scales + other.scales
        self.channels = torch.maximum(self.channels, other.channels)

    def packed(self) -> Tensor:
        """Return all fields as one float64 vector, which a single copy brings to the host."""
        scalars = [value.double() for value in (*self.sums.values(), *self.maxima.values())]
        return torch.cat([torch.stack(scalars), self.scales.double(), self.channels.double()])

    def row(self, packed: list[float]) -> TelemetryRow:
        """Compute the row of telemetry from a `packed` vector on the host."""
        names = (*self.sums, *self.maxima)
        v = dict(zip(names, packed, strict=False))
        scales = packed[len(names) : len(names) + len(EXPONENTS)]
        return _row(v, scales, packed[len(names) + len(EXPONENTS) :])


@torch.no_grad()
def measure_operand(before: Tensor, q: ScaledTensor, tiles: Tensor | None = None) -> OperandStats:
    """Measure an operand before and after quantization.

    Args:
        before: [..., M, K], the values before quantization. M are tokens or output channels of a weight, K channels.
        q: the same operand after quantization.
        tiles: int32 [P/128, 2], where q is [P, K] in the tiles of groups of these rows (`octile.ops.groups`). The zeros
            that fill up a tile are not counted as values.
    """
    channels = before.abs().flatten(0, -2).amax(0).float()
    values, is_row = before.numel(), before.new_ones(before.shape[-2], 1)
    if tiles is not None:
        before, is_row = take_tiles(before, tiles), take_tiles(is_row, tiles)
    x, decoded, scale, is_row = _sampled(before, q, is_row, values)
    rows, cols = min(_tile_rows(q), before.shape[-2]), q.block[1]
    n = is_row.count_nonzero() * (x.numel() // max(len(is_row), 1))
    x, decoded = (split_into_blocks(t, rows, cols) for t in (x, decoded))  # [..., tiles, rows, tiles, columns]
    scale = scale[..., :, None, :, None]
    size = x.abs()
    tile_amax = size.amax(dim=(-3, -1))
    tile_amin = torch.where(x != 0, size, torch.inf).amin(dim=(-3, -1))
    with_values = tile_amax > 0
    octaves = torch.where(with_values, (tile_amax / tile_amin).log2(), 0.0)
    empty = zero_blocks(q)
    unit = tile_amax.amax().clamp(min=2.0**-100)  # scaled by it, fourth powers and squared errors stay within FP32
    u, e, unit = (x / unit).flatten(), ((decoded * scale - x) / unit).flatten(), unit.double()
    u2 = u * u
    zeros = decoded == 0
    sums = {
        "values": n,
        "nonzero": x.count_nonzero(),
        "underflows": ((x != 0) & zeros).sum(),
        "overflows": (size > scale * _clamp_threshold(q.fmt)).sum(),
        "subnormals": ((decoded.abs() < _smallest_normal(q.fmt)) & ~zeros).sum(),
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
    maxima = {
        "amax": channels.amax(),
        "-amin": -tile_amin.amin(),
        "-tile_amax": -torch.where(with_values, tile_amax, torch.inf).amin(),
        "octaves": octaves.amax(),
        "error": e.abs().amax() * unit,
        "scale": torch.where(empty, -torch.inf, q.scale).amax(),
        "-scale": -torch.where(empty, torch.inf, q.scale).amin(),
    }
    exponents = q.scale.log2().round().clamp(EXPONENTS[0], EXPONENTS[-1])
    exponents = torch.where(empty, torch.inf, exponents).flatten()  # outside the histogram's range, so not counted
    return OperandStats(
        {name: value.double() for name, value in sums.items()},
        {f"max {name}": value.float() for name, value in maxima.items()},
        torch.histc(exponents, len(EXPONENTS), EXPONENTS[0] - 0.5, EXPONENTS[-1] + 0.5),
        channels,
    )


def _sampled(before: Tensor, q: ScaledTensor, is_row: Tensor, values: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values and decoded data, float32 [..., M, K], the scales of their tiles, [..., tiles, ⌈K/C⌉], and is_row.

    A large operand is reduced to as many whole rows of tiles as SAMPLE allows, in one matrix.
    """
    m, k = before.shape[-2:]
    tile = _tile_rows(q)
    scale_row = torch.arange(-(-m // tile), device=before.device) * tile // q.block[0]
    tile = min(tile, m)
    if values <= max(SAMPLE, tile * k):
        return before.float(), decode(q.data), q.scale[..., scale_row, :], is_row
    whole = m // tile  # a partial tile at the edge is not sampled
    candidates = torch.arange(before.numel() // (m * k) * whole, device=before.device)
    chosen = candidates[:: -(-min(len(candidates) * tile * k, values) // SAMPLE)]
    matrix, tile_row = chosen // whole, chosen % whole
    row = ((matrix * m + tile_row * tile)[:, None] + torch.arange(tile, device=before.device)).flatten()
    data = q.data.flatten(0, -2).view(torch.uint8)[row].view(q.data.dtype)
    scale = q.scale.flatten(0, -2)[matrix * q.scale.shape[-2] + scale_row[tile_row]]
    return before.flatten(0, -2)[row].float(), decode(data), scale, is_row[row % m]


def _tile_rows(q: ScaledTensor) -> int:
    """Return the number of rows of a tile; a scale for the whole tensor is treated as tiles of 128 rows."""
    rows = q.block[0]
    return 128 if rows % 128 == 0 or rows >= max(q.shape[-2], 128) else rows


def _clamp_threshold(fmt: FloatFormat | IntFormat) -> float:
    """Return the magnitude above which a value is clamped rather than rounded to the largest value."""
    if isinstance(fmt, IntFormat):
        return fmt.max + 0.5
    return fmt.max + fmt.epsilon * 2.0 ** (math.floor(math.log2(fmt.max)) - 1)


def _smallest_normal(fmt: FloatFormat | IntFormat) -> float:
    return fmt.smallest_normal if isinstance(fmt, FloatFormat) else 0.0


def _row(v: dict[str, float], scales: list[float], channels: list[float]) -> TelemetryRow:
    n, nonzero = v["values"], max(v["nonzero"], 1.0)
    amax, amin, smallest = v["max amax"], -v["max -amin"], -v["max -tile_amax"]  # the sample may hold only zeros
    mean, variance = v["x"] / n, v["x2"] / n - (v["x"] / n) ** 2
    fourth = v["x4"] / n - 4 * mean * v["x3"] / n + 6 * mean**2 * v["x2"] / n - 3 * mean**4
    if not math.isfinite(v["x2"]):  # comparisons with NaN count nothing, which would read as no loss
        v = v | dict.fromkeys(("underflows", "overflows", "subnormals", "size", "max octaves", "octaves"), math.nan)
    channels = [math.inf if math.isnan(c) else c for c in channels]  # NaN has no order
    ordered = sorted(channels)
    median = ordered[len(ordered) // 2]
    top = sorted(range(len(channels)), key=lambda c: -channels[c])[:TOP_CHANNELS]
    row: TelemetryRow = {
        "values": int(n),
        "underflows%": 100 * v["underflows"] / nonzero,
        "overflows%": 100 * v["overflows"] / nonzero,
        "subnormals%": 100 * v["subnormals"] / nonzero,
        "cur_amax": amax,
        "dynamic_range": _octaves(amax, amin),
        "max_blockwise_dynamic_range": v["max octaves"],
        "mean_blockwise_dynamic_range": v["octaves"] / max(v["tiles"], 1.0),
        "between_blocks_dynamic_range": _octaves(amax, smallest),
        "scale_inv_min": -v["max -scale"],
        "scale_inv_max": v["max scale"],
        "kurtosis": fourth / variance**2 if variance > 0 else None,
        "outlier_channels": sum(c > OUTLIER_RATIO * median for c in channels) if math.isfinite(median) else None,
        "mse": v["error2"] / n,
        "snr_db": snr_db(v["x2"], v["error2"]),
        "worst_over_rms": v["max error"] / math.sqrt(v["x2"] / n) if v["x2"] else 0.0,
        "bias": v["outward"] / v["size"] if v["size"] else 0.0,
        "top_channels": [[c, channels[c] / median if median > 0 and channels[c] < math.inf else None] for c in top],
        "scale_histogram": {
            "log2": [e for e, count in zip(EXPONENTS, scales, strict=True) if count],
            "count": [int(count) for count in scales if count],
        },
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def _octaves(largest: float, smallest: float) -> float:
    """Return log₂(largest / smallest); 0 if there is no value but zeros, NaN if the largest is not finite."""
    if not math.isfinite(largest):
        return math.nan
    return math.log2(largest / smallest) if 0 < smallest <= largest else 0.0


def snr_db(signal: float, noise: float) -> float | None:
    """Return 10·log₁₀(signal / noise); None if there is no signal, no noise, or one of them is not finite."""
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return 10 * (math.log10(signal) - math.log10(noise))  # their ratio may underflow
