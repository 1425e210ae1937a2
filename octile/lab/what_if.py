"""What if: the products of a real run, from a capture, in every combination of `octile.lab.variants`.

    exact         a · bᵀ of the operands as they were captured                   FP64
    quantized     the same of the operands after their casts                     FP64
    accumulated   the same as the tensor core sums it, bit for bit               `octile.lab.tensor_core`

    quantization error = quantized − exact       accumulation error = accumulated − quantized       total = both

Operands are cast whole; the product is made of `sample` rows of a and of b, drawn with a seed, so of sample² outputs
whose sums are whole. Each operand is cast from what was captured: that a run's recipe may keep x in 8 bits and cast it
again for wgrad is not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octile.lab.capture import Capture, CapturedGemm
from octile.lab.layers import matching
from octile.lab.tensor_core import tensor_core_matmul, tensor_core_scaled_matmul
from octile.lab.variants import (
    Choice,
    Variant,
    bits_per_value,
    blocks_of,
    cast,
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
    """Differences of some outputs from a reference.

    Attributes:
        noise: their mean square over the reference's. Where that is all zeros: 0, or ∞ if there is any difference.
        worst: the largest of them over the reference's RMS.
        bias: the mean difference away from zero over the mean magnitude: below 0, results are too small.
    """

    noise: float
    worst: float
    bias: float

    @classmethod
    def between(cls, found: Tensor, reference: Tensor) -> Error:
        """Of float64 tensors of one shape."""
        e = found - reference
        power = reference.square().mean()
        if not reference.any():
            infinite = math.inf if e.any() else 0.0
            return cls(infinite, infinite, 0.0)
        noise, worst = e.square().mean() / power, e.abs().max() / power.sqrt()
        return cls(noise.item(), worst.item(), ((e * reference.sign()).sum() / reference.abs().sum()).item())

    @property
    def snr_db(self) -> float | None:
        """10·log₁₀(signal / noise); None where there is no noise, or no signal."""
        return decibels(self.noise)

    def figures(self) -> dict[str, float | None]:
        """For JSON."""
        known = {"worst_over_rms": self.worst, "bias": self.bias}
        return {"snr_db": self.snr_db, **{name: v if math.isfinite(v) else None for name, v in known.items()}}


def decibels(noise: float) -> float | None:
    """A share of noise as a signal-to-noise ratio."""
    return -10 * math.log10(noise) if 0 < noise < math.inf else None


@dataclass(frozen=True)
class Row:
    """One product in one combination. bits: a value of both operands takes, scales included."""

    layer: str
    product: GemmName
    variant: Variant
    quantization: Error
    accumulation: Error
    total: Error
    bits: float


@dataclass(frozen=True)
class Rank:
    """One combination over all products that it applies to.

    Noise is averaged over the products, each counting the same whatever its size, so the worse ones decide.

    Attributes:
        products: how many.
        quantization, accumulation, total: mean noise over signal.
        worst: the largest single error of any product over that product's RMS.
        bias: the mean of the products' biases.
        hardest: layer and product with the most noise.
        bits: a value takes on average.
    """

    variant: Variant
    products: int
    quantization: float
    accumulation: float
    total: float
    worst: float
    bias: float
    hardest: tuple[str, GemmName]
    bits: float


@dataclass(frozen=True)
class WhatIf:
    """What was found.

    Attributes:
        rows: every product in every combination that applies.
        refused: why a combination does not apply → those that do not.
        sample, seed: as they were asked for.
        silent: products whose sampled outputs are all zeros, which have no error.
    """

    rows: Sequence[Row]
    refused: Mapping[str, Sequence[Variant]]
    sample: int
    seed: int
    silent: Sequence[str]

    def ranking(self) -> list[Rank]:
        """The combinations, the one with the least noise first."""
        by_variant: dict[Variant, list[Row]] = {}
        for row in self.rows:
            by_variant.setdefault(row.variant, []).append(row)
        return sorted((_rank(variant, rows) for variant, rows in by_variant.items()), key=lambda rank: rank.total)

    def of(self, variant: Variant) -> list[Row]:
        return [row for row in self.rows if row.variant == variant]


def what_if(
    products: Iterable[CapturedGemm],
    choice: Choice | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
    progress: Callable[[Iterable[CapturedGemm]], Iterable[CapturedGemm]] = lambda all_of_them: all_of_them,
) -> WhatIf:
    """Makes the products in every combination of the choice.

    Args:
        products: of a capture; `chosen` picks some.
        choice: everything, if not given.
        sample: rows of each operand that are multiplied.
        seed: of their drawing.
        progress: wraps the products as they are gone through.

    Raises:
        ValueError: sample is below 1; no combination applies; a product has operands that are not finite, or all are
            zeros.
    """
    if sample < 1:
        raise ValueError(f"sample must be at least 1, not {sample}")
    applying: list[Variant] = []
    refused: dict[str, list[Variant]] = {}
    for variant in (choice or Choice()).combinations():
        reason = why_not_applicable(variant)
        (applying if reason is None else refused.setdefault(reason, [])).append(variant)
    if not applying:
        raise ValueError(f"no combination applies: {'; '.join(refused)}")
    rows: list[Row] = []
    silent: list[str] = []
    for captured in progress(list(products)):
        at = SampledGemm.of(captured, sample, seed)
        if at.exact.any():
            rows += [at.row(variant) for variant in applying]
        else:
            silent.append(f"{captured.product} of {captured.layer}")
    if not rows:
        raise ValueError("there is nothing to measure: every product is all zeros, or none was asked for")
    return WhatIf(rows, refused, sample, seed, silent)


def chosen(capture: Capture, layers: str = "*", products: Sequence[GemmName] | None = None) -> list[CapturedGemm]:
    """Some products of a capture; of experts, each layer's with the most tokens, unless a pattern names one by number.

    Raises:
        ValueError: a pattern matches no layer, or the capture has no such product.
    """
    names = tuple(dict.fromkeys(p.layer for p in capture.products))
    wanted = set(matching(names, layers))
    there = {p.product for p in capture.products}
    for name in products or ():
        if name not in there:
            raise ValueError(f"the capture has no {name}: it has {', '.join(sorted(there))}")
    found = [p for p in capture.products if p.layer in wanted and p.product in (products or there)]
    busiest: dict[tuple[str, GemmName], CapturedGemm] = {}
    for p in found:
        if p.expert is not None:
            place = p.layer.rpartition(".")[0], p.product
            busiest[place] = max(busiest.get(place, p), p, key=_tokens)
    named = {part.strip() for part in layers.split(",")}
    return [p for p in found if p.expert is None or p.layer in named or p in busiest.values()]


def _tokens(p: CapturedGemm) -> int:
    return p.a.shape[1] if p.product == "wgrad" else p.a.shape[0]


@dataclass(frozen=True, eq=False)
class Casts:
    """The sampled rows of both operands after a cast, their exact product, and the bits a value of the whole takes."""

    a: ScaledTensor
    b: ScaledTensor
    quantized: Tensor
    bits: float


@dataclass
class SampledGemm:
    """A product, its sampled rows, and what was already made of it."""

    captured: CapturedGemm
    rows_a: Tensor
    rows_b: Tensor
    exact: Tensor
    casts: dict[tuple[object, ...], Casts] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: CapturedGemm, sample: int, seed: int) -> SampledGemm:
        """Draws the rows: all of an operand that has no more."""
        for operand in (captured.a, captured.b):
            if not operand.isfinite().all():
                place = f"{captured.product} of {captured.layer}"
                raise ValueError(f"{place} has operands that are not finite: leave it out with --layers or --products")
        random = torch.Generator().manual_seed(seed)
        rows_a, rows_b = (
            torch.randperm(len(t), generator=random)[:sample].sort().values for t in (captured.a, captured.b)
        )
        exact = captured.a[rows_a].double() @ captured.b[rows_b].double().mT
        return cls(captured, rows_a, rows_b, exact)

    def casts_for(self, v: Variant) -> Casts:
        """The operands in one combination's format, blocks and scales; made once."""
        block_a, block_b = blocks_of(v, self.captured.product)
        key = v.fmt, block_a, block_b, v.scale
        if key not in self.casts:
            whole_a = cast(self.captured.a, v.fmt, block_a, v.scale)
            whole_b = cast(self.captured.b, v.fmt, block_b, v.scale)
            a, b = sampled(whole_a, self.rows_a), sampled(whole_b, self.rows_b)
            self.casts[key] = Casts(a, b, values(a) @ values(b).mT, bits_per_value(v, whole_a, whole_b))
        return self.casts[key]

    def row(self, v: Variant) -> Row:
        """The product in one combination, which must apply."""
        made = self.casts_for(v)
        sums = summed(v, made.a, made.b, made.quantized)
        return Row(
            self.captured.layer,
            self.captured.product,
            v,
            Error.between(made.quantized, self.exact),
            Error.between(sums, made.quantized),
            Error.between(sums, self.exact),
            made.bits,
        )


def sampled(q: ScaledTensor, rows: Tensor) -> ScaledTensor:
    """Some rows of an operand, each with scales of its own."""
    return ScaledTensor(q.data[rows], q.scale[rows // q.block[0]], (1, q.block[1]))


def values(q: ScaledTensor) -> Tensor:
    """data · scale of an operand in blocks of 1×C, float64."""
    return decode(q.data).double() * q.scale.repeat_interleave(q.block[1], dim=1)[:, : q.data.shape[1]].double()


def summed(v: Variant, a: ScaledTensor, b: ScaledTensor, quantized: Tensor) -> Tensor:
    """a · bᵀ as the combination's architecture sums it, float64 [M, N]; quantized is the exact sum."""
    if v.arch == "exact":
        return quantized
    if v.arch == "fp32":
        return nt_float32(values(a).float(), values(b).float()).double()
    if scales_in_tensor_core(v):
        scales = (q.scale.to(torch.float8_e8m0fnu) for q in (a, b))
        return tensor_core_matmul(a.data, b.data, None, v.arch, v.promote, torch.float32, *scales).double()
    return tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, v.arch, v.promote).double()


def _rank(variant: Variant, rows: list[Row]) -> Rank:
    def mean(of: Callable[[Row], float]) -> float:
        return math.fsum(of(row) for row in rows) / len(rows)

    hardest = max(rows, key=lambda row: row.total.noise)
    return Rank(
        variant,
        len(rows),
        mean(lambda row: row.quantization.noise),
        mean(lambda row: row.accumulation.noise),
        mean(lambda row: row.total.noise),
        max(row.total.worst for row in rows),
        mean(lambda row: row.total.bias),
        (hardest.layer, hardest.product),
        mean(lambda row: row.bits),
    )
