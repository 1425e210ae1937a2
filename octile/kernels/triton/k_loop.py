# mypy: allow-untyped-defs
"""The sum over K that every product shares, with the scales applied every 128.

Hopper's FP8 tensor cores keep 13 fraction bits of a running sum, so a long sum loses its small terms. Each step
therefore starts from zero, adds at most 128 products on the tensor cores, and its result is multiplied by the scales
and added to an FP32 sum outside them. Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.

Every product has the form a[M, K] · b[N, K]ᵀ, for the weight gradient with transposed views and tokens as K. FP8 tensor
cores want both operands contiguous along K: `layout.k_major` sees to that. A scale stands for R×C numbers, and a step
must lie within one block along K, so that it needs one scale a row.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import padded
from octile.kernels.triton.device import Machine, tile
from octile.kernels.triton.fp8_bits import FORMAT_OF, constants, to_half
from octile.kernels.triton.layout import k_major

LONGEST_STEP = 128  # between two promotions
SHORTEST_STEP = 32  # K of one FP8 instruction
WIDEST_TILE = 128


def choose_tile(
    m: int, n: int, k: int, products: int, a_block: Sequence[int], b_block: Sequence[int], gpu: Machine
) -> dict[str, Any]:
    """The tile for `products` products [m, k] · [n, k]ᵀ, with the longest step that stays within the blocks of both.

    Raises:
        ValueError: a block covers neither K nor a multiple of 32 of it.
    """
    step = math.gcd(LONGEST_STEP, *(cols for _, cols in (a_block, b_block) if cols < k))
    if step < SHORTEST_STEP:
        raise ValueError(
            f"blocks must extend over a multiple of {SHORTEST_STEP} along K on a GPU, "
            f"but a has {tuple(a_block)} and b {tuple(b_block)}"
        )
    rows = b_block[0]
    return tile(m, n, products, step, rows >= n or rows % WIDEST_TILE == 0, gpu)


def operands(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    step: int,
    gpu: Machine,
) -> dict[str, Any]:
    """What the kernels take of the operands [M, K] and [N, K], either with groups in front: names `a…`, `b…` and `K`.

    The data stays FP8 where the tensor cores multiply FP8; otherwise the kernels see the integers of the codes.
    """
    fp8 = gpu.fp8 and torch.int8 not in (a.dtype, b.dtype)
    k = padded(a.shape[-1])
    both = _operand("a", a, a_scale, a_block, step, fp8) | _operand("b", b, b_scale, b_block, step, fp8)
    return both | {"K": k, "PARTIAL_STEPS": k % step != 0}


def _operand(name: str, data: Tensor, scale: Tensor, block: Sequence[int], step: int, fp8: bool) -> dict[str, Any]:
    # a block that covers a whole side has stride 0 along it, so that nothing is compiled for that side's length
    rows, cols = block
    m, k = data.shape[-2:]
    scale_row, rows = (scale.stride(-2), rows) if rows < m else (0, WIDEST_TILE)
    scale_col, cols = (scale.stride(-1), cols) if cols < k else (0, step)
    codes = k_major(data)
    grouped = data.dim() == 3
    runtime = {
        "": codes if fp8 or data.dtype == torch.int8 else codes.view(torch.uint8),
        "_scale": scale,
        "_group": codes.stride(0) if grouped else 0,
        "_row": codes.stride(-2),
        "_scale_group": scale.stride(0) if grouped else 0,
        "_scale_row": scale_row,
        "_scale_col": scale_col,
    }
    constant = {"_ROWS": rows, "_COLS": cols, "_MANTISSA": constants(FORMAT_OF[data.dtype])["MANTISSA"]}
    return {name + key: v for key, v in runtime.items()} | {name.upper() + key: v for key, v in constant.items()}


@triton.jit
def sum_of_products(
    a, a_row, a_scale, a_scale_row, a_scale_col, m_first, m_end,
    b, b_row, b_scale, b_scale_row, b_scale_col, n_first, n_end, K, k_first, k_end,
    A_ROWS: tl.constexpr, A_COLS: tl.constexpr, A_MANTISSA: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLS: tl.constexpr, B_MANTISSA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STEP: tl.constexpr, PARTIAL_STEPS: tl.constexpr,
):  # fmt: skip
    """Σ a[m, k] · b[n, k] over k_first ≤ k < k_end in float32, for TILE_M rows from m_first and TILE_N from n_first.

    Rows past an end read the last row before it, so that loads need no mask along the rows: their sums must not be
    stored. Without PARTIAL_STEPS, k_first and k_end are multiples of STEP. n_first is a multiple of TILE_N.
    """
    m = tl.minimum(m_first + tl.arange(0, TILE_M), m_end - 1)
    n = tl.minimum(n_first + tl.arange(0, TILE_N), n_end - 1)
    k = tl.arange(0, STEP)
    a_tile = a + m.to(tl.int64)[:, None] * a_row + k[None, :]
    b_tile = b + n.to(tl.int64)[None, :] * b_row + k[:, None]
    a_scales = a_scale + (m // A_ROWS).to(tl.int64) * a_scale_row
    ONE_B_SCALE: tl.constexpr = B_ROWS % TILE_N == 0  # for all rows: scaling then costs one operation an element
    b_scales = b_scale + (n_first // B_ROWS if ONE_B_SCALE else (n // B_ROWS).to(tl.int64)) * b_scale_row

    total = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    first_step = k_first // STEP * STEP
    last_step = k_end // STEP * STEP
    for start in range(tl.cdiv(k_first, STEP) * STEP, last_step, STEP):
        a_step = _multiplicand(tl.load(a_tile + start), A_MANTISSA)
        b_step = _multiplicand(tl.load(b_tile + start), B_MANTISSA)
        scale = _scale(a_scales + start // A_COLS * a_scale_col, b_scales + start // B_COLS * b_scale_col, ONE_B_SCALE)
        total += tl.dot(a_step, b_step) * scale

    if PARTIAL_STEPS:
        # the step that k_first cuts, if it does, and the one that k_end cuts: one or two, perhaps far apart
        begin = tl.where(k_first == first_step, last_step, first_step)
        begin = tl.where(k_first < k_end, begin, k_end)
        for start in tl.range(begin, k_end, tl.maximum(last_step - begin, STEP), num_stages=1):
            inside = (start + k >= k_first) & (start + k < k_end)
            a_codes = tl.load(a_tile + start, mask=(start + k < K)[None, :], other=0.0)
            b_codes = tl.load(b_tile + start, mask=(start + k < K)[:, None], other=0.0)
            a_step = _multiplicand(_zero_unless(inside[None, :], a_codes), A_MANTISSA)
            b_step = _multiplicand(_zero_unless(inside[:, None], b_codes), B_MANTISSA)
            scale = _scale(
                a_scales + start // A_COLS * a_scale_col, b_scales + start // B_COLS * b_scale_col, ONE_B_SCALE
            )
            total += tl.dot(a_step, b_step) * scale
    return total


@triton.jit
def _multiplicand(codes, MANTISSA: tl.constexpr):
    """What the tensor cores multiply: FP8 as it is, integer codes as the FP16 numbers that they are exactly."""
    if codes.dtype == tl.uint8 or codes.dtype == tl.int8:
        return to_half(codes, MANTISSA)
    else:
        return codes


@triton.jit
def _zero_unless(inside, codes):
    """Code 0 is zero in every format. Codes load faster in whole vectors, so they are dropped afterwards."""
    return tl.where(inside, codes.to(tl.int8, bitcast=True), 0).to(codes.dtype, bitcast=True)


@triton.jit
def _scale(a_scales, b_scales, ONE_B_SCALE: tl.constexpr):
    """What a step's sums are multiplied by: a column where all rows of b share their scale, else a tile."""
    if ONE_B_SCALE:
        return (tl.load(a_scales) * tl.load(b_scales))[:, None]
    else:
        return tl.load(a_scales)[:, None] * tl.load(b_scales)[None, :]


@triton.jit
def tile_of_program(program, m_tiles, n_tiles):
    """Takes tiles in bands of eight along M, column by column, so that programs that run together share operands."""
    HEIGHT: tl.constexpr = 8
    first = program // (HEIGHT * n_tiles) * HEIGHT
    height = tl.minimum(m_tiles - first, HEIGHT)
    within = program % (HEIGHT * n_tiles)
    return first + within % height, within // height


@triton.jit
def store_tile(out, out_row, out_col, total, m_first, m_end, n_first, n_end, ACCUMULATE: tl.constexpr):
    """Stores a tile of sums [m, n] up to the ends, or adds it in FP32 to what is there."""
    m = m_first + tl.arange(0, total.shape[0])
    n = n_first + tl.arange(0, total.shape[1])
    at = out + m.to(tl.int64)[:, None] * out_row + n.to(tl.int64)[None, :] * out_col
    inside = (m < m_end)[:, None] & (n < n_end)[None, :]
    if ACCUMULATE:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
