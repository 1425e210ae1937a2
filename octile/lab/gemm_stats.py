"""Quantization error and accumulation error of one GEMM, measured separately on a sample of its outputs.

    exact         a · bᵀ of the operands before quantization                   FP64
    quantized     a · bᵀ of the operands after quantization                    FP64
    accumulated   the same on the tensor core model, promoted every 128        `octile.lab.tensor_core`

    quantization error = quantized − exact        accumulation error = accumulated − quantized

The sample is SAMPLE evenly spaced rows of a and of b, so SAMPLE² outputs with complete sums. It gives a signal-to-noise
ratio within about half a decibel, but can miss the rarest large errors. Of experts, the one with the most tokens is
sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.lab.operand_stats import TelemetryRow, snr_db
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.ops.quantize import decode
from octile.scaled import ScaledTensor

SAMPLE = 32
ARCH, PROMOTE_EVERY = "sm_90", 128


def evenly_spaced(n: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """Return at most SAMPLE evenly spaced indices from start to start + n, int64."""
    count = min(n, SAMPLE)
    return start + torch.arange(count, device=device) * n // max(count, 1)


@dataclass
class ErrorSums:
    """Sums of differences from a reference, which can be added over micro-batches; float64 scalars on their device.

    Attributes:
        sums: the number of outputs, and sums of their squares, their magnitudes, the squared errors, and the errors
            away from zero.
        worst: the largest error.
    """

    sums: dict[str, Tensor]
    worst: Tensor

    @classmethod
    def between(cls, found: Tensor, reference: Tensor) -> ErrorSums:
        """Compare float64 outputs with a reference of the same shape."""
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

    def add(self, other: ErrorSums) -> None:
        """Add the errors of another micro-batch."""
        self.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        self.worst = torch.maximum(self.worst, other.worst)

    def packed(self) -> Tensor:
        """Return all fields as one float64 vector, which a single copy brings to the host."""
        return torch.stack([*self.sums.values(), self.worst])

    def row(self, prefix: str, packed: list[float]) -> TelemetryRow:
        """Compute the row of telemetry from a `packed` vector on the host.

        It holds the SNR in dB, the worst error over the RMS of the outputs, and the bias: the mean error away from
        zero over the mean magnitude.
        """
        v = dict(zip((*self.sums, "worst"), packed, strict=True))
        rms = math.sqrt(v["signal2"] / v["outputs"]) if v["outputs"] and v["signal2"] > 0 else math.nan
        figures = {
            "snr_db": snr_db(v["signal2"], v["error2"]),
            "worst_over_rms": v["worst"] / rms,
            "bias": v["outward"] / v["size"] if v["size"] > 0 else math.nan,
        }
        return {
            f"{prefix}_{name}": value if value is not None and math.isfinite(value) else None
            for name, value in figures.items()
        }


@dataclass(frozen=True, eq=False)
class OperandSample:
    """Sampled rows of one operand, over the columns of a sum.

    Attributes:
        before: [R, K] in any dtype, the values before quantization.
        data: [R, K], 8-bit.
        scale: float32 [R, ⌈K/C⌉].
        block_columns: C.
    """

    before: Tensor
    data: Tensor
    scale: Tensor
    block_columns: int

    @classmethod
    def of(cls, before: Tensor, q: ScaledTensor, rows: Tensor, columns: range | None = None) -> OperandSample:
        """Sample rows of q, over all columns or those of a group; `before` [R, K] holds these rows already.

        If a group begins inside a block, the sample begins with the block, and columns of other groups are set to
        zero. Zeros change neither a sum nor the alignment of its terms in a tensor core.
        """
        columns = range(q.shape[-1]) if columns is None else columns
        block = min(q.block[1], q.shape[-1])
        first = columns.start // block
        window = slice(first * block, columns.stop)
        excluded = columns.start - window.start
        data = q.data.view(torch.uint8)[rows, window].index_fill(1, torch.arange(excluded, device=rows.device), 0)
        scale = q.scale[rows // q.block[0], first : -(-columns.stop // block)]
        own = before[:, window].index_fill(1, torch.arange(excluded, device=rows.device), 0.0)
        return cls(own, data.view(q.data.dtype), scale, block)

    def values(self) -> Tensor:
        """Return the values after quantization, float64 [R, K]."""
        per_column = self.scale.repeat_interleave(self.block_columns, dim=1)[:, : self.data.shape[1]]
        return decode(self.data).double() * per_column.double()


@torch.no_grad()
def gemm_errors(a: OperandSample, b: OperandSample) -> tuple[ErrorSums, ErrorSums | None]:
    """Return the quantization error and the accumulation error of a · bᵀ.

    For INT8, whose sums are exact integers, the accumulation error is None.
    """
    exact = a.before.double() @ b.before.double().mT
    quantized = a.values() @ b.values().mT
    quantization = ErrorSums.between(quantized, exact)
    if torch.int8 in (a.data.dtype, b.data.dtype):
        return quantization, None
    blocks = (1, a.block_columns), (1, b.block_columns)
    accumulated = tensor_core_scaled_matmul(a.data, a.scale, blocks[0], b.data, b.scale, blocks[1], ARCH, PROMOTE_EVERY)
    return quantization, ErrorSums.between(accumulated.double(), quantized)
