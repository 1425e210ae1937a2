"""The accumulation experiment: the error of a long FP8 sum, by its length, its data and the promotion interval.

The operands are FP8 numbers already, so the accumulator causes the only error. It is measured against the exact result
in FP64, in units of that result's RMS, because single outputs can be near zero. Data of one sign are the hard case: the
sum grows in proportion to K and soon exceeds every product by far, while a sum of both signs grows with √K only.

Source of the claim, "nearly 2%" at K = 4096: DeepSeek-V3 (arXiv 2412.19437) §3.5.2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.formats import E4M3, FloatFormat
from octile.lab.tensor_core import tensor_core_matmul
from octile.scaled import quantize

KS = (256, 512, 1024, 2048, 4096, 8192, 16384)
INTERVALS = (32, 64, 128, 256, None)


@dataclass(frozen=True)
class AccumulationError:
    """The accumulation error of one GEMM, in units of the RMS of its exact result.

    Attributes:
        k: the number of products in a sum.
        data: "normal", N(0, 1), or "positive", |N(0, 1)|.
        promote_every: the promotion interval; None for no promotion.
        error: the RMS error.
        worst: the largest error.
        bias: the mean error, positive if results are too large.
    """

    k: int
    data: str
    promote_every: int | None
    error: float
    worst: float
    bias: float


def accumulate(
    ks: Iterable[int] = KS,
    data: Iterable[str] = ("normal", "positive"),
    intervals: Sequence[int | None] = INTERVALS,
    arch: str = "sm_90",
    fmt: FloatFormat = E4M3,
    rows: int = 256,
    columns: int = 256,
    seed: int = 0,
) -> list[AccumulationError]:
    """Run the experiment on GEMMs [rows, k] · [columns, k]ᵀ with per-tensor scaling.

    Raises:
        ValueError: a kind of data is neither "normal" nor "positive"; arch or an interval is invalid for
            `tensor_core_matmul`.
    """
    results = []
    for kind in data:
        for k in ks:
            generator = torch.Generator().manual_seed(seed)
            a, b = (_operand(kind, (side, k), fmt, generator) for side in (rows, columns))
            exact = a.double() @ b.double().T
            for interval in intervals:
                sums = tensor_core_matmul(a, b, arch=arch, promote_every=interval)
                results.append(AccumulationError(k, kind, interval, *errors(sums, exact)))
    return results


def errors(sums: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Return RMS, largest and mean error of float32 sums against exact float64 sums, over the RMS of the latter."""
    rms = exact.square().mean().sqrt()
    difference = (sums.double() - exact) / rms
    return difference.square().mean().sqrt().item(), difference.abs().max().item(), difference.mean().item()


def _operand(kind: str, shape: tuple[int, int], fmt: FloatFormat, generator: torch.Generator) -> Tensor:
    if kind not in ("normal", "positive"):
        raise ValueError(f"data must be 'normal' or 'positive', not {kind!r}")
    x = torch.randn(shape, generator=generator)
    return quantize(x.abs() if kind == "positive" else x, (None, None), fmt).data


if __name__ == "__main__":  # the table in experiments/
    print(f"{'data':8}  {'K':>5}  {'promoted':>8}  {'error':>8}  {'worst':>8}  {'bias':>9}")
    for r in accumulate():
        print(f"{r.data:8}  {r.k:5}  {r.promote_every or 'never':>8}  {r.error:8.1e}  {r.worst:8.2%}  {r.bias:+9.1e}")
