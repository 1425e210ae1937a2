"""Products as a tensor core sums them, in plain torch: whole tiles of outputs take a step at once.

`octile.lab.reference` is what each step means; `octile.lab.native` is the same in C++, an order of magnitude faster.
Cutting a term to F fraction bits is `trunc(term · 2^(F − e_max))`: the powers of two are exact, the integers have at
most F + 2 bits and their sum F + 8, which FP32 holds for F = 13 and FP64 for F = 25.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octile.lab.architectures import NAN, Instruction
from octile.lab.operand import NOTHING, Operand

TILE_M, TILE_N = 64, 256  # wide enough that torch's calls cost little beside what they do


@dataclass(frozen=True)
class Sum:
    """How a long sum is made of steps.

    Attributes:
        row: the instruction.
        interval: products along K between two visits of the accumulator to the CUDA cores, a multiple of a step.
        promote: at a visit the accumulator, times its scales, is added to an FP32 sum and begins again at zero;
            otherwise it stays the running sum, and is rescaled to the next interval's scales.
        a_scale, b_scale: float32 [M, intervals], [N, intervals], or None for 1.
        half: accumulator and result are FP16.
    """

    row: Instruction
    interval: int
    promote: bool
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    half: bool = False

    def of_rows(self, rows: Tensor) -> "Sum":
        """The same for some rows of a."""
        return self if self.a_scale is None else replace(self, a_scale=self.a_scale[rows])


def sum_products(a: Operand, b: Operand, start: Tensor, how: Sum) -> Tensor:
    """start [M, N] + a[M, K] · b[N, K]ᵀ, float32 (float16 values where `how.half`), NaN as the hardware writes it."""
    out = torch.empty_like(start)
    a_KM = Operand(a.value.T.contiguous(), a.exponent.T.contiguous())
    b_KN = Operand(b.value.T.contiguous(), b.exponent.T.contiguous())
    work = a.value.new_empty(2, how.row.terms * TILE_M * TILE_N)  # new memory for each step would cost more than it
    for m in range(0, start.shape[0], TILE_M):
        for n in range(0, start.shape[1], TILE_N):
            rows, columns = slice(m, m + TILE_M), slice(n, n + TILE_N)
            tile = _Tile(
                Operand(a_KM.value[:, rows], a_KM.exponent[:, rows]),
                Operand(b_KN.value[:, columns], b_KN.exponent[:, columns]),
                None if how.a_scale is None else how.a_scale[rows],
                None if how.b_scale is None else how.b_scale[columns],
                how,
                work,
            )
            sums = tile.sum(start[rows, columns], ieee=False)
            if not sums.isfinite().all():
                sums = tile.sum(start[rows, columns], ieee=True)
            out[rows, columns] = sums
    out.view(torch.int32).masked_fill_(out.isnan(), NAN)
    return out


@dataclass(frozen=True)
class _Tile:
    """Operands [K, M] and [K, N] and scales [M, intervals] and [N, intervals] of a tile of outputs."""

    a: Operand
    b: Operand
    a_scale: Tensor | None
    b_scale: Tensor | None
    how: Sum
    work: Tensor

    def sum(self, start: Tensor, ieee: bool) -> Tensor:
        """Steps on the tensor core, and between intervals the CUDA cores. What is not finite is right only if ieee."""
        k, how = self.a.value.shape[0], self.how
        total, accumulator, scale = start, torch.zeros_like(start) if how.promote else start, None
        for i, first in enumerate(range(0, k, how.interval)):
            previous, scale = scale, self._scale(i)
            if not how.promote and previous is not None:
                accumulator = accumulator * (previous / scale)
            for at in range(first, min(first + how.interval, k), how.row.terms):
                accumulator = self._step(slice(at, at + how.row.terms), accumulator, ieee)
            if how.promote:
                total = total + accumulator if scale is None else fma(accumulator, scale, total)
                accumulator = torch.zeros_like(start)
        if how.promote:
            return total
        return accumulator if scale is None else accumulator * scale

    def _scale(self, i: int) -> Tensor | None:
        return None if self.a_scale is None or self.b_scale is None else self.a_scale[:, i, None] * self.b_scale[:, i]

    def _step(self, k: slice, c: Tensor, ieee: bool) -> Tensor:
        """One step of `octile.lab.reference` for every output [M, N]."""
        row, half = self.how.row, self.how.half
        a, b = self.a.value[k, :, None], self.b.value[k, None, :]
        e_max = (self.a.exponent[k, :, None] + self.b.exponent[k, None, :]).amax(0).int()
        e_c = (c.view(torch.int32) >> 23 & 0xFF).sub_(127).clamp_(min=-14 if half else -126)
        floor = row.half_floor if half else row.floor
        e_max = torch.maximum(e_max, e_c.masked_fill_(c == 0, NOTHING)).clamp_(min=floor)

        unit = _power_of_2(row.fraction_bits - e_max)
        products, fractions = (w[: a.shape[0] * c.numel()].view(-1, *c.shape) for w in self.work)
        torch.mul(a, b, out=products)
        # as FP32 the factor would overflow where e_max is tiny; there all FP8 products are zero
        products *= unit if products.dtype == torch.float64 else unit.clamp(max=2.0**100).float()
        term_c = c * unit
        if row.cut == "down":
            integer = products.floor_().sum(0) + term_c.floor_()
        else:  # x − frac(x) is trunc(x) in vector instructions, which torch's own lacks on a CPU
            products -= torch.frac(products, out=fractions)
            integer = products.sum(0) + (term_c - term_c.frac())
        result = _rounded(integer / unit, row, half)
        if not ieee:
            return result
        exact = (a.double() * b).sum(0) + c
        return torch.where(exact.isfinite(), result, exact.float())


def _rounded(x: Tensor, row: Instruction, half: bool) -> Tensor:
    """float64 → the accumulator, as float32: cut to `output_bits`, or rounded to FP16."""
    if row.output_bits < 23 and row.fraction_bits <= 13 and not half:  # a sum of 13 + 8 bits is an FP32 number
        result = x.float()
        result.view(torch.int32).bitwise_and_(-1 << 23 - row.output_bits)
        return result.add_(0.0)  # there is no −0
    magnitude = x.abs()
    result = magnitude.float()
    bits = result.view(torch.int32)
    bits -= ((result > magnitude) & (magnitude < 2.0**128)).int()  # rounded up: the number below
    if half:  # what was cut off decides ties only, and for that an odd last bit is as good
        bits |= (result < magnitude).int()
        result = result.half().float()
    else:
        bits &= -1 << 23 - row.output_bits
    return torch.where(x < 0, -result, result) + 0.0  # + 0.0: there is no −0


def _power_of_2(exponent: Tensor) -> Tensor:
    return (exponent.long() + 1023 << 52).view(torch.float64)


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
