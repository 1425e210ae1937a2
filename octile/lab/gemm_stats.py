"""A product's two errors apart, on a sample of its outputs: what quantizing the operands cost, and what the sum cost.

    exact         a · bᵀ of the operands before their casts                       FP64
    quantized     the same of the operands after their casts                      FP64
    accumulated   the same as the tensor core sums it, promoted every 128         `octile.lab.tensor_core`

    quantization error = quantized − exact        accumulation error = accumulated − quantized

The sample is SAMPLE rows of a and SAMPLE rows of b, spread evenly, so SAMPLE² whole outputs of a product: enough for a
signal-to-noise ratio within about half a decibel, too few for the rarest of the worst. Of experts it is the one with
the most tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.lab.operand_stats import Row, decibels
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.ops.quantize import decode
from octile.scaled import ScaledTensor

SAMPLE = 32
ARCHITECTURE, PROMOTE_EVERY = "sm_90", 128


def spread(n: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """At most SAMPLE of the n indices from start on, evenly spaced: int64."""
    count = min(n, SAMPLE)
    return start + torch.arange(count, device=device) * n // max(count, 1)


@dataclass
class Errors:
    """Differences from a reference, as figures that add up; float64 scalars on their device.

    Attributes:
        sums: of the outputs, their squares, their magnitudes, the squared errors, and errors away from zero.
        worst: the largest error.
    """

    sums: dict[str, Tensor]
    worst: Tensor

    @classmethod
    def between(cls, found: Tensor, reference: Tensor) -> Errors:
        e = found - reference
        outputs = torch.tensor(float(e.numel()), dtype=torch.float64, device=e.device)
        sums = {
            "outputs": outputs,
            "signal2": reference.square().sum(),
            "size": reference.abs().sum(),
            "error2": e.square().sum(),
            "outward": (e * reference.sign()).sum(),
        }
        return cls(sums, e.abs().amax() if e.numel() else torch.zeros_like(outputs))

    def add(self, other: Errors) -> None:
        self.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        self.worst = torch.maximum(self.worst, other.worst)

    def packed(self) -> Tensor:
        return torch.stack([*self.sums.values(), self.worst])

    def row(self, prefix: str, packed: list[float]) -> Row:
        """SNR in dB; the worst error over the outputs' RMS; the mean error away from zero over the mean magnitude."""
        v = dict(zip((*self.sums, "worst"), packed, strict=True))
        rms = math.sqrt(v["signal2"] / v["outputs"]) if v["outputs"] and v["signal2"] > 0 else math.nan
        figures = {
            "snr_db": decibels(v["signal2"], v["error2"]),
            "worst_over_rms": v["worst"] / rms,
            "bias": v["outward"] / v["size"] if v["size"] > 0 else math.nan,
        }
        return {
            f"{prefix}_{name}": value if value is not None and math.isfinite(value) else None
            for name, value in figures.items()
        }


@dataclass(frozen=True, eq=False)
class OperandSample:
    """Some rows of one operand, over the columns that are summed.

    Attributes:
        before: [R, K] in any dtype, the values before the cast.
        data: [R, K] 8-bit; scale: [R, ⌈K/C⌉] float32; C = block_columns.
    """

    before: Tensor
    data: Tensor
    scale: Tensor
    block_columns: int

    @classmethod
    def of(cls, before: Tensor, q: ScaledTensor, rows: Tensor, columns: range | None = None) -> OperandSample:
        """Of the rows of q, all columns or a group's; before [R, K] are these rows already.

        A group that begins within a block is begun with the block, its foreign columns set to zero: zeros add nothing,
        also not to the alignment in a tensor core.
        """
        columns = range(q.shape[-1]) if columns is None else columns
        block = min(q.block[1], q.shape[-1])
        first = columns.start // block
        window = slice(first * block, columns.stop)
        foreign = columns.start - window.start
        data = q.data.view(torch.uint8)[rows, window].index_fill(1, torch.arange(foreign, device=rows.device), 0)
        scale = q.scale[rows // q.block[0], first : -(-columns.stop // block)]
        own = before[:, window].index_fill(1, torch.arange(foreign, device=rows.device), 0.0)
        return cls(own, data.view(q.data.dtype), scale, block)

    def values(self) -> Tensor:
        """After the cast, float64 [R, K]."""
        per_column = self.scale.repeat_interleave(self.block_columns, dim=1)[:, : self.data.shape[1]]
        return decode(self.data).double() * per_column.double()


@torch.no_grad()
def gemm_errors(a: OperandSample, b: OperandSample) -> tuple[Errors, Errors | None]:
    """Quantization and accumulation error of a · bᵀ. INT8 has no accumulation error: its sums are integers."""
    exact = a.before.double() @ b.before.double().mT
    quantized = a.values() @ b.values().mT
    quantization = Errors.between(quantized, exact)
    if torch.int8 in (a.data.dtype, b.data.dtype):
        return quantization, None
    blocks = (1, a.block_columns), (1, b.block_columns)
    accumulated = tensor_core_scaled_matmul(
        a.data, a.scale, blocks[0], b.data, b.scale, blocks[1], ARCHITECTURE, PROMOTE_EVERY
    )
    return quantization, Errors.between(accumulated.double(), quantized)
