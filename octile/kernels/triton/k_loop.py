# mypy: allow-untyped-defs
"""The loop over k-blocks of all GEMM kernels, with promotion and scales at every k-block.

Hopper's FP8 tensor cores keep 13 fraction bits of the accumulator, so a long sum loses its small terms. Each k-block
therefore starts from zero and sums at most 128 products on the tensor cores; its result is scaled and added to an FP32
accumulator (promotion). Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.

Blocks of 32, as in MXFP8, are for tensor cores that read their scales and keep 25 fraction bits. Those are emulated:
operands are converted to FP16, exactly, and the FP16 tensor cores, which keep 25 bits, sum each k-block.

All GEMMs have the form a[M, K] · b[N, K]ᵀ; wgrad takes transposed views, with tokens as K. Both operands must be
contiguous along K (`layout.to_k_major`). A k-block must lie within one block of the scales along K, so that it needs
one scale per row.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from octile.kernels.cuda.gemm.request import Operand
from octile.kernels.memory_layout import padded
from octile.kernels.triton.device import DeviceProperties, tile
from octile.kernels.triton.fp8_bits import FORMAT_OF_DTYPE, format_constants, to_half
from octile.kernels.triton.layout import to_k_major

MAX_BLOCK_K = 128  # the promotion interval
MIN_BLOCK_K = 32  # K of one FP8 instruction
MAX_TILE_N = 128


def choose_tile(
    m: int, n: int, k: int, num_gemms: int, a_block: Sequence[int], b_block: Sequence[int], gpu: DeviceProperties
) -> dict[str, Any]:
    """Choose the tile for num_gemms GEMMs [m, k] · [n, k]ᵀ, with the largest k-block that fits the blocks of both.

    Returns:
        constants and compile options of the kernel, as `device.tile`.

    Raises:
        ValueError: a block extends over neither all of K nor a multiple of 32 along K.
    """
    block_k = math.gcd(MAX_BLOCK_K, *(cols for _, cols in (a_block, b_block) if cols < k))
    if block_k < MIN_BLOCK_K:
        raise ValueError(
            f"blocks must extend over a multiple of {MIN_BLOCK_K} along K on a GPU, "
            f"but a has {tuple(a_block)} and b {tuple(b_block)}"
        )
    rows = b_block[0]
    gpu = replace(gpu, fp8=_is_native(block_k, gpu))
    return tile(m, n, num_gemms, block_k, rows >= n or rows % MAX_TILE_N == 0, gpu)


def operand_arguments(a: Operand, b: Operand, block_k: int, gpu: DeviceProperties) -> dict[str, Any]:
    """The kernel arguments of both operands, [M, K] and [N, K] or with a leading dimension of groups: `a…`, `b…`, `K`.

    Data stays FP8 if the FP8 tensor cores multiply it; otherwise the kernels take encoded values as integers.
    """
    fp8 = _is_native(block_k, gpu) and torch.int8 not in (a.data.dtype, b.data.dtype)
    k = padded(a.data.shape[-1])
    both = _operand_arguments("a", a, block_k, fp8) | _operand_arguments("b", b, block_k, fp8)
    return both | {"K": k, "MASK_K": k % block_k != 0}


def _is_native(block_k: int, gpu: DeviceProperties) -> bool:
    """Whether FP8 tensor cores multiply such k-blocks; shorter ones than theirs are emulated."""
    return gpu.fp8 and block_k == MAX_BLOCK_K


def _operand_arguments(name: str, operand: Operand, block_k: int, fp8: bool) -> dict[str, Any]:
    # a block that covers a whole dimension has stride 0 along it, so that no kernel is compiled for its length
    data, scale, (rows, cols) = operand.parts()
    m, k = data.shape[-2:]
    scale_row, rows = (scale.stride(-2), rows) if rows < m else (0, MAX_TILE_N)
    scale_col, cols = (scale.stride(-1), cols) if cols < k else (0, block_k)
    encoded = to_k_major(data)
    grouped = data.dim() == 3
    runtime = {
        "": encoded if fp8 or data.dtype == torch.int8 else encoded.view(torch.uint8),
        "_scale": scale,
        "_group": encoded.stride(0) if grouped else 0,
        "_row": encoded.stride(-2),
        "_scale_group": scale.stride(0) if grouped else 0,
        "_scale_row": scale_row,
        "_scale_col": scale_col,
    }
    constant = {"_ROWS": rows, "_COLS": cols, "_MANTISSA": format_constants(FORMAT_OF_DTYPE[data.dtype])["MANTISSA"]}
    return {name + key: v for key, v in runtime.items()} | {name.upper() + key: v for key, v in constant.items()}


@triton.jit
def sum_over_k(
    a, a_row, a_scale, a_scale_row, a_scale_col, m_first, m_end,
    b, b_row, b_scale, b_scale_row, b_scale_col, n_first, n_end, K, k_first, k_end,
    A_ROWS: tl.constexpr, A_COLS: tl.constexpr, A_MANTISSA: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLS: tl.constexpr, B_MANTISSA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    """Σ a[m, k] · b[n, k] over k_first ≤ k < k_end in float32, for TILE_M rows from m_first and TILE_N from n_first.

    Rows past an end are read as the last row before it, so that loads need no mask along the rows; their results must
    not be stored. Without MASK_K, k_first and k_end must be multiples of BLOCK_K. n_first must be a multiple of TILE_N.
    """
    m = tl.minimum(m_first + tl.arange(0, TILE_M), m_end - 1)
    n = tl.minimum(n_first + tl.arange(0, TILE_N), n_end - 1)
    k = tl.arange(0, BLOCK_K)
    a_tile = a + m.to(tl.int64)[:, None] * a_row + k[None, :]
    b_tile = b + n.to(tl.int64)[None, :] * b_row + k[:, None]
    a_scales = a_scale + (m // A_ROWS).to(tl.int64) * a_scale_row
    ONE_B_SCALE: tl.constexpr = B_ROWS % TILE_N == 0  # then scaling costs one operation per element
    b_scales = b_scale + (n_first // B_ROWS if ONE_B_SCALE else (n // B_ROWS).to(tl.int64)) * b_scale_row

    accumulator = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    first_block = k_first // BLOCK_K * BLOCK_K
    last_block = k_end // BLOCK_K * BLOCK_K
    for start in range(tl.cdiv(k_first, BLOCK_K) * BLOCK_K, last_block, BLOCK_K):
        a_operand = _dot_operand(tl.load(a_tile + start), A_MANTISSA)
        b_operand = _dot_operand(tl.load(b_tile + start), B_MANTISSA)
        scale = _scale(a_scales + start // A_COLS * a_scale_col, b_scales + start // B_COLS * b_scale_col, ONE_B_SCALE)
        accumulator += tl.dot(a_operand, b_operand) * scale

    if MASK_K:
        # the partial k-blocks: the first one if k_first lies inside it, and the last one if k_end does
        begin = tl.where(k_first == first_block, last_block, first_block)
        begin = tl.where(k_first < k_end, begin, k_end)
        for start in tl.range(begin, k_end, tl.maximum(last_block - begin, BLOCK_K), num_stages=1):
            inside = (start + k >= k_first) & (start + k < k_end)
            a_encoded = tl.load(a_tile + start, mask=(start + k < K)[None, :], other=0.0)
            b_encoded = tl.load(b_tile + start, mask=(start + k < K)[:, None], other=0.0)
            a_operand = _dot_operand(_zero_unless(inside[None, :], a_encoded), A_MANTISSA)
            b_operand = _dot_operand(_zero_unless(inside[:, None], b_encoded), B_MANTISSA)
            scale = _scale(
                a_scales + start // A_COLS * a_scale_col, b_scales + start // B_COLS * b_scale_col, ONE_B_SCALE
            )
            accumulator += tl.dot(a_operand, b_operand) * scale
    return accumulator


@triton.jit
def _dot_operand(encoded, MANTISSA: tl.constexpr):
    """Convert encoded values in integers to FP16, exactly; FP8 needs no conversion."""
    if encoded.dtype == tl.uint8 or encoded.dtype == tl.int8:
        return to_half(encoded, MANTISSA)
    else:
        return encoded


@triton.jit
def _zero_unless(inside, encoded):
    """Set encoded values outside to zero, which is encoded as 0 in every format; unmasked loads are faster."""
    return tl.where(inside, encoded.to(tl.int8, bitcast=True), 0).to(encoded.dtype, bitcast=True)


@triton.jit
def _scale(a_scales, b_scales, ONE_B_SCALE: tl.constexpr):
    """The scales of a k-block's accumulator: a column [M, 1] if all rows of b share a scale, else [M, N]."""
    if ONE_B_SCALE:
        return (tl.load(a_scales) * tl.load(b_scales))[:, None]
    else:
        return tl.load(a_scales)[:, None] * tl.load(b_scales)[None, :]


@triton.jit
def raster_tile(program, m_tiles, n_tiles):
    """The tile of a program: 8 tiles along M, then the next column, so that concurrent programs share operands."""
    HEIGHT: tl.constexpr = 8
    first = program // (HEIGHT * n_tiles) * HEIGHT
    height = tl.minimum(m_tiles - first, HEIGHT)
    within = program % (HEIGHT * n_tiles)
    return first + within % height, within // height


@triton.jit
def store_tile(out, out_row, out_col, accumulator, m_first, m_end, n_first, n_end, ACCUMULATE: tl.constexpr):
    """Store an accumulator [m, n] up to m_end and n_end; with ACCUMULATE, add it in FP32 to the output."""
    m = m_first + tl.arange(0, accumulator.shape[0])
    n = n_first + tl.arange(0, accumulator.shape[1])
    at = out + m.to(tl.int64)[:, None] * out_row + n.to(tl.int64)[None, :] * out_col
    inside = (m < m_end)[:, None] & (n < n_end)[None, :]
    if ACCUMULATE:
        accumulator += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, accumulator.to(out.dtype.element_ty), mask=inside)
