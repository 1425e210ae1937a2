# mypy: allow-untyped-defs
"""Bit-exact model of one GPU's tensor core that runs on any other: an A100 can sum FP8 products as Hopper does.

The algorithm is that of `octile.lab.tensor_core.reference`: the terms of an instruction are truncated to F fraction
bits below the largest exponent and added as integers. It does not use tensor cores and is slow, but fast enough for
experiments with whole models and for comparing 10⁹ outputs of a real tensor core within minutes.

A program computes a tile of outputs. Operands are given as values and exponents, [K, M] and [K, N], so that a row of
either is read in whole vectors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases

TILE_M, TILE_N = 32, 64


def launch(
    out: Tensor,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    interval: int,
    promote: bool,
    terms: int,
    fraction_bits: int,
    output_bits: int,
    floor: int,
    cut_down: bool = False,
) -> None:
    """Add a · bᵀ to out [M, N] float32, contiguous, as `octile.lab.tensor_core.vectorized.sum_products` does.

    Args:
        a, b: values (float32, or float64 for fraction_bits > 13) and exponents (int16), [M, K] and [N, K]; K must be a
            multiple of terms.
        scales: scales of a and b, float32 [M, intervals] and [N, intervals], contiguous; None: 1.
        cut_down: whether terms are truncated toward −∞ instead of toward zero.
        interval, promote, terms, fraction_bits, output_bits, floor: as in
            `octile.lab.tensor_core.vectorized.Summation` and `octile.lab.tensor_core.architectures.Instruction`.
    """
    (m, n), k = out.shape, a[0].shape[1]
    a_value, a_exponent, b_value, b_exponent = (t.T.contiguous() for t in (*a, *b))
    a_scale, b_scale = scales or (out, out)  # not read
    tensor_core[(triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N),)](
        out,
        a_value,
        a_exponent,
        a_scale,
        b_value,
        b_exponent,
        b_scale,
        m,
        n,
        k,
        interval,
        terms,
        FLOOR=floor,
        FRACTION_BITS=fraction_bits,
        CUT_BITS=23 - output_bits,
        CUT_DOWN=cut_down,
        PROMOTE=promote,
        SCALED=scales is not None,
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        num_warps=4,
        enable_fp_fusion=False,
    )


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def modeled(dtype: torch.dtype, terms: int, bits: int) -> None:
        t, n, k = cases.T, cases.N, cases.K
        a, b = ((cases.empty(side, k, dtype=dtype), cases.empty(side, k, dtype=torch.int16)) for side in (t, n))
        scales = cases.empty(t, k // 128, dtype=cases.FP32), cases.empty(n, k // 128, dtype=cases.FP32)
        out = cases.empty(t, n, dtype=cases.FP32)
        launch(out, a, b, scales, 128, True, terms, bits, min(bits, 23), -133)

    return {
        "Hopper's tensor core, FP8": lambda: modeled(cases.FP32, 32, 13),
        "Hopper's tensor core, BF16": lambda: modeled(torch.float64, 16, 25),
    }


@triton.jit
def tensor_core(
    out, a_value, a_exponent, a_scale, b_value, b_exponent, b_scale, M, N, K, interval, terms,
    FLOOR: tl.constexpr, FRACTION_BITS: tl.constexpr, CUT_BITS: tl.constexpr, CUT_DOWN: tl.constexpr,
    PROMOTE: tl.constexpr, SCALED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Compute a TILE_M×TILE_N tile of the output, float32 [M, N], as a tensor core sums.

    Operands are decoded: integer values and exponents, [M, K] and [N, K], with a scale for each block if SCALED. The
    sum is aligned and cut after every `terms` products, and promoted after every `interval` products if PROMOTE.
    """
    columns = tl.cdiv(N, TILE_N)
    m = tl.program_id(0) // columns * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) % columns * TILE_N + tl.arange(0, TILE_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = out + m.to(tl.int64)[:, None] * N + n[None, :]
    m = tl.minimum(m, M - 1)
    n = tl.minimum(n, N - 1)

    total = tl.load(at, mask=inside, other=0.0)
    accumulator = total
    scale = tl.full([TILE_M, TILE_N], 1.0, tl.float32)
    intervals = tl.cdiv(K, interval)
    for i in range(intervals):
        previous = scale
        if SCALED:
            scale = tl.load(a_scale + m * intervals + i)[:, None] * tl.load(b_scale + n * intervals + i)[None, :]
        if PROMOTE:
            accumulator = tl.zeros([TILE_M, TILE_N], tl.float32)
        elif SCALED:
            ratio = tl.div_rn(previous, scale)
            accumulator = tl.where(i > 0, accumulator * ratio, accumulator)
        for k in range(i * interval, tl.minimum(i * interval + interval, K), terms):
            accumulator = _step(
                accumulator, a_value, a_exponent, b_value, b_exponent, m, n, M, N, k, terms,
                FLOOR, FRACTION_BITS, CUT_BITS, CUT_DOWN, TILE_M, TILE_N,
            )  # fmt: skip
        if PROMOTE:
            total = _fma(accumulator, scale, total)
    if not PROMOTE:
        total = accumulator * scale
    total = tl.where(
        total != total, tl.full([TILE_M, TILE_N], 0x7FFFFFFF, tl.int32).to(tl.float32, bitcast=True), total
    )
    tl.store(at, total, mask=inside)


@triton.jit
def _step(
    c, a_value, a_exponent, b_value, b_exponent, m, n, M, N, first, terms,
    FLOOR: tl.constexpr, FRACTION_BITS: tl.constexpr, CUT_BITS: tl.constexpr, CUT_DOWN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One instruction of `octile.lab.tensor_core.reference` for a tile of accumulators."""
    c_bits = c.to(tl.int32, bitcast=True)
    e_c = tl.maximum((c_bits >> 23) & 0xFF, 1) - 127
    e_max = tl.maximum(tl.where((c_bits & 0x7FFFFFFF) == 0, -4096, e_c), FLOOR)
    for k in range(first, first + terms):
        e_a = tl.load(a_exponent + _row(k, M) + m).to(tl.int32)
        e_b = tl.load(b_exponent + _row(k, N) + n).to(tl.int32)
        e_max = tl.maximum(e_max, e_a[:, None] + e_b[None, :])

    unit = _power_of_2(FRACTION_BITS - e_max)
    term = c.to(tl.float64) * unit
    if FRACTION_BITS > 13:
        total = _integer(term, CUT_DOWN).to(tl.int64)
        factor = unit
    else:
        # in FP32 the factor would overflow for tiny e_max, where all FP8 products are zero
        total = _integer(term, CUT_DOWN).to(tl.int32)
        factor = tl.minimum(unit, 2.0**100).to(tl.float32)
    ieee = tl.zeros([TILE_M, TILE_N], factor.dtype) + c.to(factor.dtype)
    for k in range(first, first + terms):
        a = tl.load(a_value + _row(k, M) + m)
        b = tl.load(b_value + _row(k, N) + n)
        product = a[:, None] * b[None, :]
        total += _integer(product * factor, CUT_DOWN).to(total.dtype)
        ieee += product

    x = total.to(tl.float64) * _power_of_2(e_max - FRACTION_BITS)
    magnitude = tl.abs(x)
    rounded = magnitude.to(tl.float32)
    up = (rounded.to(tl.float64) > magnitude) & (magnitude < 2.0**128)
    bits = (rounded.to(tl.int32, bitcast=True) - up.to(tl.int32)) >> CUT_BITS << CUT_BITS
    cut = bits.to(tl.float32, bitcast=True)
    result = tl.where(x < 0, -cut, cut) + 0.0  # + 0.0: there is no −0
    finite = tl.abs(ieee) < float("inf")
    return tl.where(finite, result, ieee.to(tl.float32))


@triton.jit
def _integer(x, CUT_DOWN: tl.constexpr):
    """Prepare x for conversion to an integer, which truncates toward zero: with CUT_DOWN, round it toward −∞."""
    return tl.floor(x) if CUT_DOWN else x


@triton.jit
def _row(k, columns):
    """The offset of row k in int64; the interpreter's loop variables are Python integers without a dtype."""
    return (tl.zeros([1], tl.int64) + k) * columns


@triton.jit
def _power_of_2(exponent):
    """2^exponent in float64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _fma(a, b, c):
    """a · b + c in FP32, rounded once: the product is exact in FP64, and the sum is rounded to odd before FP32."""
    product = a.to(tl.float64) * b.to(tl.float64)
    c = c.to(tl.float64)
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.to(tl.int64, bitcast=True)
    away = tl.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & (tl.abs(error) < float("inf")) & ((bits & 1) == 0)
    return tl.where(inexact, bits + away, bits).to(tl.float64, bitcast=True).to(tl.float32)
