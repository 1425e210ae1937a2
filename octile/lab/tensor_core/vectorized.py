"""Products as a tensor core sums them, in plain torch: whole tiles of outputs take a step at once.

`octile.lab.tensor_core.reference` is what each step means; `octile.lab.tensor_core.native` is the same in C++, an
order of magnitude faster.
Cutting a term to F fraction bits is `trunc(term / 2^(e_max − F))`: the powers of two are exact, the integers have at
most F + 2 bits and their sum F + 8, which FP32 holds for F = 13 and FP64 for F = 25.

What takes time is the memory that each product passes through: five times here, a division that truncates being one
operation of torch's, in bands of rows that a cache holds. What an output needs once a step is done for whole tiles.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from octile.lab.tensor_core.architectures import NAN, Instruction
from octile.lab.tensor_core.operand import ZERO_EXPONENT, DecodedOperand

TILE_M, TILE_N = 128, 512  # outputs: enough that torch's calls cost little beside what they do
BAND = 32  # rows whose products are made at once
CUTS: dict[str, Literal["trunc", "floor"]] = {"zero": "trunc", "down": "floor"}
TINY = -100  # an exponent below those of FP8 products and above those that FP32 as such cannot hold
SMALLEST = 2.0**-149  # of FP32


@dataclass(frozen=True)
class Summation:
    """How a long sum is made of steps.

    Attributes:
        instruction: how one step sums.
        interval: products along K between two visits of the accumulator to the CUDA cores, a multiple of a step.
        promote: at a visit the accumulator, times its scales, is added to an FP32 sum and begins again at zero;
            otherwise it stays the running sum, and is rescaled to the next interval's scales.
        a_scale, b_scale: float32 [M, intervals], [N, intervals], or None for 1.
        fp16_accumulator: accumulator and result are FP16.
    """

    instruction: Instruction
    interval: int
    promote: bool
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    fp16_accumulator: bool = False

    def of_rows(self, rows: Tensor) -> "Summation":
        """The same for some rows of a."""
        return self if self.a_scale is None else replace(self, a_scale=self.a_scale[rows])


def sum_products(a: DecodedOperand, b: DecodedOperand, start: Tensor, how: Summation) -> Tensor:
    """start [M, N] + a[M, K] · b[N, K]ᵀ, float32 (FP16 values for an FP16 accumulator), NaN as hardware writes it."""
    out = torch.empty_like(start)
    a_KM1 = DecodedOperand(*(x.T.contiguous()[..., None] for x in (a.value, a.exponent)))
    b_K1N = DecodedOperand(*(x.T.contiguous()[:, None] for x in (b.value, b.exponent)))
    room = [
        x.new_empty(how.instruction.terms * BAND * TILE_N) for x in (a.value, a.exponent)
    ]  # new memory would cost more
    for m in range(0, start.shape[0], TILE_M):
        for n in range(0, start.shape[1], TILE_N):
            rows, columns = slice(m, m + TILE_M), slice(n, n + TILE_N)
            tile = _Tile(
                DecodedOperand(a_KM1.value[:, rows], a_KM1.exponent[:, rows]),
                DecodedOperand(b_K1N.value[..., columns], b_K1N.exponent[..., columns]),
                None if how.a_scale is None else how.a_scale[rows],
                None if how.b_scale is None else how.b_scale[columns],
                how,
                DecodedOperand(*room),
            )
            sums = tile.sum(start[rows, columns], ieee=False)
            if not sums.isfinite().all():
                sums = tile.sum(start[rows, columns], ieee=True)
            out[rows, columns] = sums
    out.view(torch.int32).masked_fill_(out.isnan(), NAN)
    return out


@dataclass(frozen=True)
class _Tile:
    """Operands [K, M, 1] and [K, 1, N] and scales [M, intervals] and [N, intervals] of a tile of outputs."""

    a: DecodedOperand
    b: DecodedOperand
    a_scale: Tensor | None
    b_scale: Tensor | None
    how: Summation
    room: DecodedOperand

    def sum(self, start: Tensor, ieee: bool) -> Tensor:
        """Steps on the tensor core, and between intervals the CUDA cores. What is not finite is right only if ieee."""
        k, how = self.a.value.shape[0], self.how
        total, accumulator, scale = start, torch.zeros_like(start) if how.promote else start, None
        for i, first in enumerate(range(0, k, how.interval)):
            previous, scale = scale, self._scale(i)
            if not how.promote and previous is not None:
                accumulator = accumulator * (previous / scale)
            wide = ieee or how.fp16_accumulator or (not how.promote and _is_extreme(accumulator))
            real = torch.float64 if wide else self.a.value.dtype
            for at in range(first, min(first + how.interval, k), how.instruction.terms):
                accumulator = self._step(slice(at, at + how.instruction.terms), accumulator, real, ieee)
            if how.promote:
                total = total + accumulator if scale is None else fma(accumulator, scale, total)
                accumulator = torch.zeros_like(start)
        if how.promote:
            return total
        return accumulator if scale is None else accumulator * scale

    def _scale(self, i: int) -> Tensor | None:
        return None if self.a_scale is None or self.b_scale is None else self.a_scale[:, i, None] * self.b_scale[:, i]

    def _step(self, k: slice, c: Tensor, real: torch.dtype, ieee: bool) -> Tensor:
        """One step of `octile.lab.tensor_core.reference` for every output [M, N]; what is done once an output is done
        in `real`."""
        row, fp16_accumulator, cut = (
            self.how.instruction,
            self.how.fp16_accumulator,
            CUTS[self.how.instruction.truncation],
        )
        a, b = (DecodedOperand(x.value[k], x.exponent[k]) for x in (self.a, self.b))
        bands = [slice(m, m + BAND) for m in range(0, len(c), BAND)]
        e_max = c.new_empty(c.shape, dtype=torch.int16)
        for rows in bands:
            exponents = _pairs(torch.add, a.exponent[:, rows], b.exponent, self.room.exponent)
            torch.amax(exponents, 0, out=e_max[rows])
        floor = row.fp16_floor if fp16_accumulator else row.floor if real == torch.float64 else max(row.floor, TINY)
        e = torch.maximum(e_max.int(), _exponent(c, fp16_accumulator)).clamp_(min=floor)
        unit = _power_of_2(e.sub_(row.fraction_bits), real)

        divisor = unit if real == a.value.dtype else unit.clamp(min=2.0**TINY).float()  # where e < TINY all are zero
        sums = divisor.new_empty(c.shape)
        for rows in bands:
            products = _pairs(torch.mul, a.value[:, rows], b.value, self.room.value)
            torch.div(products, divisor[rows], rounding_mode=cut, out=products)
            torch.sum(products, 0, out=sums[rows])
        integers = torch.div(c.to(real), unit, rounding_mode=cut).add_(sums)
        result = _rounded(integers.mul_(unit), row, fp16_accumulator)
        if not ieee:
            return result
        for rows in bands:
            products = _pairs(torch.mul, a.value[:, rows], b.value, self.room.value)
            exact = products.double().sum(0) + c[rows]
            result[rows] = torch.where(exact.isfinite(), result[rows], exact.float())
        return result


def _pairs(of: Callable[..., Tensor], a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """`of` a [k, M, 1] and b [k, 1, N], in some room."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return of(a, b, out=room[: math.prod(shape)].view(shape))


def _is_extreme(c: Tensor) -> bool:
    """Whether FP32 might not hold what a step makes of these accumulators in between."""
    magnitude = torch.where(c == 0, 1.0, c.abs())
    return bool(magnitude.amin() < 2.0**TINY or magnitude.amax() > 2.0**-TINY)


def _exponent(c: Tensor, fp16_accumulator: bool) -> Tensor:
    """⌊log2 |c|⌋, at least that of the smallest normal number, int32; far below any for zero."""
    bits = c.abs().view(torch.int32)
    is_not_zero = bits.clamp(max=1)
    field = (bits >> 23).clamp_(min=127 - 14 if fp16_accumulator else 1)
    return field.add_(is_not_zero, alpha=-ZERO_EXPONENT).add_(ZERO_EXPONENT - 127)


def _rounded(x: Tensor, row: Instruction, fp16_accumulator: bool) -> Tensor:
    """A sum, which is overwritten → the accumulator, as float32: cut to `output_bits`, or rounded to FP16."""
    if fp16_accumulator:
        magnitude = x.abs()
        result = magnitude.float()
        bits = result.view(torch.int32)
        bits -= ((result > magnitude) & (magnitude < 2.0**128)).int()  # rounded up: the number below
        bits |= (result < magnitude).int()  # what was cut off decides ties only, for which an odd last bit is as good
        result = result.half().float()
        return torch.where(x < 0, -result, result) + 0.0
    if row.fraction_bits > 13:  # else the sum has 13 + 8 bits
        torch.div(x, SMALLEST, rounding_mode="trunc", out=x).mul_(SMALLEST)
        x.view(torch.int64).bitwise_and_(-1 << 52 - 23)
    result = x.float()
    if row.output_bits < 23:
        result.view(torch.int32).bitwise_and_(-1 << 23 - row.output_bits)
    return result.add_(0.0)  # there is no −0


def _power_of_2(exponent: Tensor, real: torch.dtype) -> Tensor:
    if real == torch.float32:
        return (exponent + 127 << 23).view(real)
    return (exponent.long() + 1023 << 52).view(real)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in float32, rounded once.

    In FP64 the product is exact and the sum is not. An inexact sum whose last bit is made odd rounds to FP32 as the
    exact one would: between them lie no ties.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & error.isfinite() & (bits & 1 == 0), bits + away, bits)
    return odd.view(torch.float64).float()
