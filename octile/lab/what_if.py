"""Compute the GEMMs of a capture in every combination of `octile.lab.variants`, and measure their errors.

    exact         a · bᵀ of the captured operands                              FP64
    quantized     a · bᵀ of the quantized operands                             FP64
    accumulated   the same as the tensor core sums it, bit for bit             `octile.lab.tensor_core`

    quantization error = quantized − exact       accumulation error = accumulated − quantized       total = both

Operands are quantized completely. The GEMM uses `sample` rows of a and of b, drawn with a seed, so it has sample²
outputs with complete sums. Each operand is quantized from its captured values: a recipe that requantizes saved inputs
for wgrad is not modeled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octile.lab.capture import Capture, CapturedGemm
from octile.lab.layers import match_layers
from octile.lab.tensor_core import tensor_core_matmul, tensor_core_scaled_matmul
from octile.lab.variants import (
    SearchSpace,
    Variant,
    bits_per_value,
    operand_blocks,
    quantize_as,
    scales_in_tensor_core,
    why_not_applicable,
)
from octile.ops.matmul import nt_float32
from octile.ops.quantize import decode
from octile.recipe import GemmName
from octile.scaled import ScaledTensor

SAMPLE = 32


@dataclass(frozen=True)
class Error:
    """Error of outputs against a reference.

    Attributes:
        noise: mean squared error over the mean square of the reference. If the reference is all zeros: 0 without any
            error, otherwise ∞.
        worst: the largest error over the RMS of the reference.
        bias: the mean error away from zero over the mean magnitude; negative if results are too small.
    """

    noise: float
    worst: float
    bias: float

    @classmethod
    def between(cls, found: Tensor, reference: Tensor) -> Error:
        """Compare float64 tensors of one shape."""
        e = found - reference
        power = reference.square().mean()
        if not reference.any():
            infinite = math.inf if e.any() else 0.0
            return cls(infinite, infinite, 0.0)
        noise, worst = e.square().mean() / power, e.abs().max() / power.sqrt()
        return cls(noise.item(), worst.item(), ((e * reference.sign()).sum() / reference.abs().sum()).item())

    @property
    def snr_db(self) -> float | None:
        """The signal-to-noise ratio in dB; None without noise or without signal."""
        return noise_to_db(self.noise)

    def statistics(self) -> dict[str, float | None]:
        """Return the statistics for JSON."""
        known = {"worst_over_rms": self.worst, "bias": self.bias}
        return {"snr_db": self.snr_db, **{name: v if math.isfinite(v) else None for name, v in known.items()}}


def noise_to_db(noise: float) -> float | None:
    """Convert noise over signal to a signal-to-noise ratio in dB; None if it is 0 or infinite."""
    return -10 * math.log10(noise) if 0 < noise < math.inf else None


@dataclass(frozen=True)
class GemmErrors:
    """The errors of one GEMM in one combination, and the bits per value of its operands, scales included."""

    layer: str
    gemm: GemmName
    variant: Variant
    quantization: Error
    accumulation: Error
    total: Error
    bits: float


@dataclass(frozen=True)
class Rank:
    """One combination over all GEMMs.

    Noise is averaged over the GEMMs, with equal weights, so that the GEMMs with most noise dominate.

    Attributes:
        gemms: the number of GEMMs.
        quantization, accumulation, total: mean noise over signal.
        worst: the largest error of any output over its GEMM's RMS.
        bias: the mean bias.
        hardest: the layer and GEMM with most noise.
        bits: the mean number of bits per value.
    """

    variant: Variant
    gemms: int
    quantization: float
    accumulation: float
    total: float
    worst: float
    bias: float
    hardest: tuple[str, GemmName]
    bits: float


@dataclass(frozen=True)
class WhatIf:
    """The results of `what_if`.

    Attributes:
        rows: every GEMM in every combination that applies.
        refused: reason → the combinations that do not apply for it.
        sample, seed: the arguments of `what_if`.
        silent: GEMMs whose sampled outputs are all zeros, so that they have no error.
    """

    rows: Sequence[GemmErrors]
    refused: Mapping[str, Sequence[Variant]]
    sample: int
    seed: int
    silent: Sequence[str]

    def ranking(self) -> list[Rank]:
        """Return the combinations, the one with least noise first."""
        by_variant: dict[Variant, list[GemmErrors]] = {}
        for row in self.rows:
            by_variant.setdefault(row.variant, []).append(row)
        return sorted((_rank(variant, rows) for variant, rows in by_variant.items()), key=lambda rank: rank.total)

    def rows_of(self, variant: Variant) -> list[GemmErrors]:
        """Return the rows of one combination."""
        return [row for row in self.rows if row.variant == variant]


def what_if(
    gemms: Iterable[CapturedGemm],
    space: SearchSpace | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
    progress: Callable[[Iterable[CapturedGemm]], Iterable[CapturedGemm]] = lambda gemms: gemms,
) -> WhatIf:
    """Compute GEMMs in every combination of a search space, and measure their errors.

    Args:
        gemms: GEMMs of a capture; see `select_gemms`.
        space: the combinations; all if not given.
        sample: the number of rows of each operand to multiply.
        seed: the seed with which the rows are drawn.
        progress: a wrapper of the iteration over the GEMMs.

    Raises:
        ValueError: sample is below 1; no combination applies; an operand is not finite; all GEMMs are zero.
    """
    if sample < 1:
        raise ValueError(f"sample must be at least 1, not {sample}")
    applying: list[Variant] = []
    refused: dict[str, list[Variant]] = {}
    for variant in (space or SearchSpace()).combinations():
        reason = why_not_applicable(variant)
        (applying if reason is None else refused.setdefault(reason, [])).append(variant)
    if not applying:
        raise ValueError(f"no combination applies: {'; '.join(refused)}")
    rows: list[GemmErrors] = []
    silent: list[str] = []
    for captured in progress(list(gemms)):
        sampled = SampledGemm.draw(captured, sample, seed)
        if sampled.exact.any():
            rows += [sampled.row(variant) for variant in applying]
        else:
            silent.append(f"{captured.gemm} of {captured.layer}")
    if not rows:
        raise ValueError("there is nothing to measure: every GEMM is all zeros, or none was selected")
    return WhatIf(rows, refused, sample, seed, silent)


def select_gemms(capture: Capture, layers: str = "*", gemms: Sequence[GemmName] | None = None) -> list[CapturedGemm]:
    """Select GEMMs of a capture.

    Of a layer's experts, the one with most tokens is selected, unless a pattern names an expert by its number.

    Raises:
        ValueError: a pattern matches no layer, or the capture has no such GEMM.
    """
    names = tuple(dict.fromkeys(g.layer for g in capture.gemms))
    matched = set(match_layers(names, layers))
    captured = {g.gemm for g in capture.gemms}
    for name in gemms or ():
        if name not in captured:
            raise ValueError(f"the capture has no {name}: it has {', '.join(sorted(captured))}")
    candidates = [g for g in capture.gemms if g.layer in matched and g.gemm in (gemms or captured)]
    largest: dict[tuple[str, GemmName], CapturedGemm] = {}
    for g in candidates:
        if g.expert is not None:
            key = g.layer.rpartition(".")[0], g.gemm
            largest[key] = max(largest.get(key, g), g, key=_tokens)
    named = {part.strip() for part in layers.split(",")}
    return [g for g in candidates if g.expert is None or g.layer in named or g in largest.values()]


def _tokens(g: CapturedGemm) -> int:
    return g.a.shape[1] if g.gemm == "wgrad" else g.a.shape[0]


@dataclass(frozen=True, eq=False)
class QuantizedSample:
    """The sampled rows of both operands after quantization, their exact GEMM, and the bits per value."""

    a: ScaledTensor
    b: ScaledTensor
    quantized: Tensor
    bits: float


@dataclass
class SampledGemm:
    """A GEMM with sampled rows of its operands, and a cache of their quantized forms."""

    captured: CapturedGemm
    rows_a: Tensor
    rows_b: Tensor
    exact: Tensor
    cache: dict[tuple[object, ...], QuantizedSample] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, captured: CapturedGemm, sample: int, seed: int, remedy: str = "leave it out with --layers or --products"
    ) -> SampledGemm:
        """Draw `sample` rows of each operand, or all rows of an operand that has fewer.

        Raises:
            ValueError: an operand is not finite; the message ends with the remedy.
        """
        for operand in (captured.a, captured.b):
            if not operand.isfinite().all():
                raise ValueError(f"{captured.gemm} of {captured.layer} has operands that are not finite: {remedy}")
        random = torch.Generator().manual_seed(seed)
        rows_a, rows_b = (
            torch.randperm(len(t), generator=random)[:sample].sort().values for t in (captured.a, captured.b)
        )
        exact = captured.a[rows_a].double() @ captured.b[rows_b].double().mT
        return cls(captured, rows_a, rows_b, exact)

    def quantized(self, v: Variant) -> QuantizedSample:
        """Return the operands in one combination's format, blocks and scales, from the cache if possible."""
        block_a, block_b = operand_blocks(v, self.captured.gemm)
        key = v.fmt, block_a, block_b, v.scale
        if key not in self.cache:
            whole_a = quantize_as(self.captured.a, v.fmt, block_a, v.scale)
            whole_b = quantize_as(self.captured.b, v.fmt, block_b, v.scale)
            a, b = sample_rows(whole_a, self.rows_a), sample_rows(whole_b, self.rows_b)
            self.cache[key] = QuantizedSample(a, b, values(a) @ values(b).mT, bits_per_value(v, whole_a, whole_b))
        return self.cache[key]

    def row(self, v: Variant) -> GemmErrors:
        """Measure the GEMM in one combination, which must apply."""
        q = self.quantized(v)
        sums = accumulated(v, q.a, q.b, q.quantized)
        return GemmErrors(
            self.captured.layer,
            self.captured.gemm,
            v,
            Error.between(q.quantized, self.exact),
            Error.between(sums, q.quantized),
            Error.between(sums, self.exact),
            q.bits,
        )


def sample_rows(q: ScaledTensor, rows: Tensor) -> ScaledTensor:
    """Select rows of an operand, each with its own scales."""
    return ScaledTensor(q.data[rows], q.scale[rows // q.block[0]], (1, q.block[1]))


def values(q: ScaledTensor) -> Tensor:
    """Return data · scale of an operand with 1×C blocks, float64."""
    return decode(q.data).double() * q.scale.repeat_interleave(q.block[1], dim=1)[:, : q.data.shape[1]].double()


def accumulated(v: Variant, a: ScaledTensor, b: ScaledTensor, quantized: Tensor) -> Tensor:
    """Compute a · bᵀ as the combination's architecture sums it, float64 [M, N]; quantized is the exact result."""
    if v.arch == "exact":
        return quantized
    if v.arch == "fp32":
        return nt_float32(values(a).float(), values(b).float()).double()
    if scales_in_tensor_core(v):
        scales = (q.scale.to(torch.float8_e8m0fnu) for q in (a, b))
        return tensor_core_matmul(a.data, b.data, None, v.arch, v.promote, torch.float32, *scales).double()
    return tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, v.arch, v.promote).double()


def _rank(variant: Variant, rows: list[GemmErrors]) -> Rank:
    def mean(statistic: Callable[[GemmErrors], float]) -> float:
        return math.fsum(statistic(row) for row in rows) / len(rows)

    hardest = max(rows, key=lambda row: row.total.noise)
    return Rank(
        variant,
        len(rows),
        mean(lambda row: row.quantization.noise),
        mean(lambda row: row.accumulation.noise),
        mean(lambda row: row.total.noise),
        max(row.total.worst for row in rows),
        mean(lambda row: row.total.bias),
        (hardest.layer, hardest.gemm),
        mean(lambda row: row.bits),
    )
