"""Tensor core arithmetic on whole matrices, in plain torch: a tile of outputs takes each step together.

`octile.lab.tensor_core.reference` specifies a step; `octile.lab.tensor_core.native` computes the same in C++, an order
of magnitude faster. A term is truncated to F fraction bits by `trunc(term / 2^(e_max − F))`. The powers of two are
exact, the integers have at most F + 2 bits and their sum F + 8, which FP32 holds for F = 13 and FP64 for F = 25.

The time goes into memory traffic: each product passes through memory five times, in bands of rows that fit the cache;
division and truncation are one torch operation. What is computed once per output and step covers a whole tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from octile.lab.tensor_core.architectures import NAN, Instruction
from octile.lab.tensor_core.operand import ZERO_EXPONENT, DecodedOperand

TILE_M, TILE_N = 128, 512  # outputs of a tile: large enough that the overhead of torch calls is small
BAND = 32  # rows whose products are computed together
ROUNDING_MODE: dict[str, Literal["trunc", "floor"]] = {"zero": "trunc", "down": "floor"}
TINY = -100  # an exponent that FP32 can hold and that no FP8 product reaches
SMALLEST = 2.0**-149  # the smallest subnormal number of FP32


@dataclass(frozen=True)
class Summation:
    """How the sum over K is divided into steps and intervals.

    Attributes:
        instruction: the instruction of a step.
        interval: products along K between two operations on the accumulator by CUDA cores, a multiple of a step.
        promote: whether, after an interval, the accumulator times its scales is added to an FP32 sum and starts again
            at zero. Otherwise the accumulator keeps the sum and is rescaled to the next interval's scales.
        a_scale, b_scale: float32 [M, intervals] and [N, intervals], or None for 1.
        fp16_accumulator: whether accumulator and result are FP16.
    """

    instruction: Instruction
    interval: int
    promote: bool
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    fp16_accumulator: bool = False

    def for_rows(self, rows: Tensor) -> "Summation":
        """Return the same summation for some rows of a."""
        return self if self.a_scale is None else replace(self, a_scale=self.a_scale[rows])


def sum_products(a: DecodedOperand, b: DecodedOperand, start: Tensor, summation: Summation) -> Tensor:
    """Compute start[M, N] + a[M, K] · b[N, K]ᵀ as float32, with NaN written as tensor cores write it.

    With an FP16 accumulator the float32 results hold FP16 values.
    """
    out = torch.empty_like(start)
    a_KM1 = DecodedOperand(*(x.T.contiguous()[..., None] for x in (a.value, a.exponent)))
    b_K1N = DecodedOperand(*(x.T.contiguous()[:, None] for x in (b.value, b.exponent)))
    workspace = [
        x.new_empty(summation.instruction.terms * BAND * TILE_N) for x in (a.value, a.exponent)
    ]  # allocating it in each step would cost more
    for m in range(0, start.shape[0], TILE_M):
        for n in range(0, start.shape[1], TILE_N):
            rows, columns = slice(m, m + TILE_M), slice(n, n + TILE_N)
            tile = _Tile(
                DecodedOperand(a_KM1.value[:, rows], a_KM1.exponent[:, rows]),
                DecodedOperand(b_K1N.value[..., columns], b_K1N.exponent[..., columns]),
                None if summation.a_scale is None else summation.a_scale[rows],
                None if summation.b_scale is None else summation.b_scale[columns],
                summation,
                DecodedOperand(*workspace),
            )
            sums = tile.sum(start[rows, columns], ieee=False)
            if not sums.isfinite().all():
                sums = tile.sum(start[rows, columns], ieee=True)
            out[rows, columns] = sums
    out.view(torch.int32).masked_fill_(out.isnan(), NAN)
    return out


@dataclass(frozen=True)
class _Tile:
    """A tile of outputs: operands [K, M, 1], [K, 1, N]; scales [M, intervals], [N, intervals]; a workspace."""

    a: DecodedOperand
    b: DecodedOperand
    a_scale: Tensor | None
    b_scale: Tensor | None
    summation: Summation
    workspace: DecodedOperand

    def sum(self, start: Tensor, ieee: bool) -> Tensor:
        """Sum the tile's products. Results that are not finite are right only with ieee."""
        k, summation = self.a.value.shape[0], self.summation
        total, accumulator, scale = start, torch.zeros_like(start) if summation.promote else start, None
        for i, first in enumerate(range(0, k, summation.interval)):
            previous, scale = scale, self._scale(i)
            if not summation.promote and previous is not None:
                accumulator = accumulator * (previous / scale)
            wide = ieee or summation.fp16_accumulator or (not summation.promote and _is_extreme(accumulator))
            real = torch.float64 if wide else self.a.value.dtype
            for at in range(first, min(first + summation.interval, k), summation.instruction.terms):
                accumulator = self._step(slice(at, at + summation.instruction.terms), accumulator, real, ieee)
            if summation.promote:
                total = total + accumulator if scale is None else fma(accumulator, scale, total)
                accumulator = torch.zeros_like(start)
        if summation.promote:
            return total
        return accumulator if scale is None else accumulator * scale

    def _scale(self, i: int) -> Tensor | None:
        return None if self.a_scale is None or self.b_scale is None else self.a_scale[:, i, None] * self.b_scale[:, i]

    def _step(self, k: slice, c: Tensor, real: torch.dtype, ieee: bool) -> Tensor:
        """Take one step of `octile.lab.tensor_core.reference` for every output [M, N], with sums of dtype real."""
        instruction, fp16_accumulator, rounding_mode = (
            self.summation.instruction,
            self.summation.fp16_accumulator,
            ROUNDING_MODE[self.summation.instruction.truncation],
        )
        a, b = (DecodedOperand(x.value[k], x.exponent[k]) for x in (self.a, self.b))
        bands = [slice(m, m + BAND) for m in range(0, len(c), BAND)]
        e_max = c.new_empty(c.shape, dtype=torch.int16)
        for rows in bands:
            exponents = _outer(torch.add, a.exponent[:, rows], b.exponent, self.workspace.exponent)
            torch.amax(exponents, 0, out=e_max[rows])
        floor = (
            instruction.fp16_floor
            if fp16_accumulator
            else instruction.floor
            if real == torch.float64
            else max(instruction.floor, TINY)
        )
        e = torch.maximum(e_max.int(), _exponent(c, fp16_accumulator)).clamp_(min=floor)
        unit = _power_of_2(e.sub_(instruction.fraction_bits), real)

        divisor = (
            unit if real == a.value.dtype else unit.clamp(min=2.0**TINY).float()
        )  # where e < TINY, all products are zero
        sums = divisor.new_empty(c.shape)
        for rows in bands:
            products = _outer(torch.mul, a.value[:, rows], b.value, self.workspace.value)
            torch.div(products, divisor[rows], rounding_mode=rounding_mode, out=products)
            torch.sum(products, 0, out=sums[rows])
        integers = torch.div(c.to(real), unit, rounding_mode=rounding_mode).add_(sums)
        result = _rounded(integers.mul_(unit), instruction, fp16_accumulator)
        if not ieee:
            return result
        for rows in bands:
            products = _outer(torch.mul, a.value[:, rows], b.value, self.workspace.value)
            exact = products.double().sum(0) + c[rows]
            result[rows] = torch.where(exact.isfinite(), result[rows], exact.float())
        return result


def _outer(operation: Callable[..., Tensor], a: Tensor, b: Tensor, workspace: Tensor) -> Tensor:
    """Apply an elementwise operation to a [k, M, 1] and b [k, 1, N], with the result in the workspace."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return operation(a, b, out=workspace[: math.prod(shape)].view(shape))


def _is_extreme(c: Tensor) -> bool:
    """Whether intermediate values of a step with these accumulators might exceed the range of FP32."""
    magnitude = torch.where(c == 0, 1.0, c.abs())
    return bool(magnitude.amin() < 2.0**TINY or magnitude.amax() > 2.0**-TINY)


def _exponent(c: Tensor, fp16_accumulator: bool) -> Tensor:
    """Return ⌊log2 |c|⌋ as int32, at least the smallest normal number's; ZERO_EXPONENT or less for zero."""
    bits = c.abs().view(torch.int32)
    is_not_zero = bits.clamp(max=1)
    field = (bits >> 23).clamp_(min=127 - 14 if fp16_accumulator else 1)
    return field.add_(is_not_zero, alpha=-ZERO_EXPONENT).add_(ZERO_EXPONENT - 127)


def _rounded(x: Tensor, instruction: Instruction, fp16_accumulator: bool) -> Tensor:
    """Round a sum to an accumulator, as float32: truncated to `output_bits`, or rounded to FP16. Overwrites x."""
    if fp16_accumulator:
        magnitude = x.abs()
        result = magnitude.float()
        bits = result.view(torch.int32)
        bits -= ((result > magnitude) & (magnitude < 2.0**128)).int()  # it was rounded up: take the number below
        bits |= (result < magnitude).int()  # the truncated bits decide only ties, so an odd last bit stands for them
        result = result.half().float()
        return torch.where(x < 0, -result, result) + 0.0
    if instruction.fraction_bits > 13:  # otherwise the sum has at most 13 + 8 bits
        torch.div(x, SMALLEST, rounding_mode="trunc", out=x).mul_(SMALLEST)
        x.view(torch.int64).bitwise_and_(-1 << 52 - 23)
    result = x.float()
    if instruction.output_bits < 23:
        result.view(torch.int32).bitwise_and_(-1 << 23 - instruction.output_bits)
    return result.add_(0.0)  # −0 becomes +0


def _power_of_2(exponent: Tensor, real: torch.dtype) -> Tensor:
    if real == torch.float32:
        return (exponent + 127 << 23).view(real)
    return (exponent.long() + 1023 << 52).view(real)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a · b + c in float32 with a single rounding.

    In FP64 the product is exact and the sum is not. If the last bit of an inexact sum is made odd, the sum rounds to
    FP32 as the exact one does, because no tie lies between them (round to odd).
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & error.isfinite() & (bits & 1 == 0), bits + away, bits)
    return odd.view(torch.float64).float()
