# mypy: allow-untyped-defs
"""Grouped GEMMs of a mixture of experts, with the group sizes on the device.

The host knows shapes only, so it launches as many programs as any group sizes could need. Each program finds its group
and rows from the offsets; programs without rows exit. Tiles begin where their group begins, so nothing is padded.

Shapes: T rows of all groups together, G groups, N and K of a weight.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.device import device_properties
from octile.kernels.triton.k_loop import choose_tile, operand_arguments, raster_tile, store_tile, sum_over_k


def launch(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    offs: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of group g of a[T, K] by b[g]ᵀ of b[G, N, K] → [T, N].

    With out, contiguous and of out_dtype, the result is written there and returned, and rows past offs[-1] are not
    written; without out they are zero.

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    (t, k), (groups, n, _) = a.shape, b.shape
    gpu = device_properties(a.device)
    mean_rows = triton.cdiv(t, max(groups, 1))
    tile = choose_tile(mean_rows, n, k, max(groups, 1), a_block, b_block, gpu)
    rest = t if out is None else 0
    out = a.new_empty(t, n, dtype=out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    # each group, and the rows past the last group, end in a tile that may have a single row
    max_tiles = (t + (groups + 1) * (tile["TILE_M"] - 1)) // tile["TILE_M"]
    with torch.cuda.device_of(a):
        _grouped[(max_tiles * triton.cdiv(n, tile["TILE_N"]),)](
            out=out,
            offs=offs,
            T=t,
            N=n,
            G=groups,
            rest=rest,
            ENDS=triton.next_power_of_2(groups + 1),
            max_tiles=max_tiles,
            **operand_arguments(a, a_scale, a_block, b, b_scale, b_block, tile["BLOCK_K"], gpu),
            **tile,
        )
    return out


def launch_masked(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    counts: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the first counts[g] rows of a[g] by b[g]ᵀ: a[G, M, K], b[G, N, K] → [G, M, N], or into out.

    Other rows are not written.

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    (groups, m, k), n = a.shape, b.shape[1]
    gpu = device_properties(a.device)
    tile = choose_tile(m, n, k, groups, a_block, b_block, gpu)
    out = a.new_empty(groups, m, n, dtype=out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    grid = (groups * triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(n, tile["TILE_N"]),)
    with torch.cuda.device_of(a):
        _masked[grid](
            out=out,
            counts=counts,
            M=m,
            N=n,
            **operand_arguments(a, a_scale, a_block, b, b_scale, b_block, tile["BLOCK_K"], gpu),
            **tile,
        )
    return out


def launch_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Sequence[int],
    x: Tensor,
    x_scale: Tensor,
    x_block: Sequence[int],
    offs: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Compute dy[g]ᵀ · x[g] over the rows of each group g: dy[T, N], x[T, K] → [G, N, K], or into out.

    The result of a group without rows is zero. With accumulate, the result is added to out in FP32.

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    (t, n), k, groups = dy.shape, x.shape[1], offs.shape[0]
    a_block, b_block = (dy_block[1], dy_block[0]), (x_block[1], x_block[0])
    gpu = device_properties(x.device)
    tile = choose_tile(n, k, t, groups, a_block, b_block, gpu)
    out = x.new_empty(groups, n, k, dtype=out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    grid = (groups * triton.cdiv(n, tile["TILE_M"]) * triton.cdiv(k, tile["TILE_N"]),)
    with torch.cuda.device_of(x):
        _wgrad[grid](
            out=out,
            offs=offs,
            T=t,
            M=n,
            N=k,
            ACCUMULATE=accumulate,
            **operand_arguments(dy.mT, dy_scale.mT, a_block, x.mT, x_scale.mT, b_block, tile["BLOCK_K"], gpu)
            | {"MASK_K": True},
            **tile,
        )
    return out


@triton.jit(do_not_specialize=["T", "rest", "max_tiles"])
def _grouped(
    out, offs, T, N, K, G, rest, max_tiles,
    a, a_scale, a_group, a_row, a_scale_group, a_scale_row, a_scale_col,
    b, b_scale, b_group, b_row, b_scale_group, b_scale_row, b_scale_col,
    A_ROWS: tl.constexpr, A_COLS: tl.constexpr, A_MANTISSA: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLS: tl.constexpr, B_MANTISSA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """A program computes up to TILE_M rows of one group and TILE_N columns.

    Rows past the last group, up to row `rest`, are treated as a group G whose result is zero.
    """
    m_tile, n_tile = raster_tile(tl.program_id(0), max_tiles, tl.cdiv(N, TILE_N))

    # for all groups at once: where they end, how many tiles they take, and which of them has this program's tile
    g = tl.arange(0, ENDS)
    starts = _clamp_offset(tl.load(offs + g - 1, mask=(g > 0) & (g <= G), other=0), T)
    ends = tl.where(g < G, _clamp_offset(tl.load(offs + g, mask=g < G, other=0), T), rest)
    tiles = tl.where(g <= G, tl.cdiv(tl.maximum(ends - starts, 0), TILE_M), 0)
    tiles_before = tl.cumsum(tiles, axis=0) - tiles
    ours = (tiles_before <= m_tile) & (m_tile < tiles_before + tiles)
    group = tl.sum(tl.where(ours, g, 0), axis=0)
    m_first = tl.sum(tl.where(ours, starts + (m_tile - tiles_before) * TILE_M, 0), axis=0)
    m_end = tl.sum(tl.where(ours, ends, 0), axis=0)
    if m_first >= m_end:
        return

    n_first = n_tile * TILE_N
    group_b = b + group.to(tl.int64) * b_group
    group_b_scale = b_scale + group.to(tl.int64) * b_scale_group
    total = sum_over_k(
        a, a_row, a_scale, a_scale_row, a_scale_col, m_first, m_end,
        group_b, b_row, group_b_scale, b_scale_row, b_scale_col, n_first, N, K, 0, tl.where(group < G, K, 0),
        A_ROWS, A_COLS, A_MANTISSA, B_ROWS, B_COLS, B_MANTISSA, TILE_M, TILE_N, BLOCK_K, MASK_K,
    )  # fmt: skip
    store_tile(out, N, 1, total, m_first, m_end, n_first, N, False)


@triton.jit(do_not_specialize=["M"])
def _masked(
    out, counts, M, N, K,
    a, a_scale, a_group, a_row, a_scale_group, a_scale_row, a_scale_col,
    b, b_scale, b_group, b_row, b_scale_group, b_scale_row, b_scale_col,
    A_ROWS: tl.constexpr, A_COLS: tl.constexpr, A_MANTISSA: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLS: tl.constexpr, B_MANTISSA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    """A program computes TILE_M×TILE_N of one group's output, if the group has rows there."""
    m_tiles = tl.cdiv(M, TILE_M)
    n_tiles = tl.cdiv(N, TILE_N)
    group = (tl.program_id(0) // (m_tiles * n_tiles)).to(tl.int64)
    m_tile, n_tile = raster_tile(tl.program_id(0) % (m_tiles * n_tiles), m_tiles, n_tiles)
    m_first = m_tile * TILE_M
    n_first = n_tile * TILE_N
    m_end = tl.minimum(tl.load(counts + group), M)
    if m_first >= m_end:
        return
    total = sum_over_k(
        a + group * a_group, a_row, a_scale + group * a_scale_group, a_scale_row, a_scale_col, m_first, m_end,
        b + group * b_group, b_row, b_scale + group * b_scale_group, b_scale_row, b_scale_col, n_first, N, K, 0, K,
        A_ROWS, A_COLS, A_MANTISSA, B_ROWS, B_COLS, B_MANTISSA, TILE_M, TILE_N, BLOCK_K, MASK_K,
    )  # fmt: skip
    store_tile(out + group * M * N, N, 1, total, m_first, m_end, n_first, N, False)


@triton.jit(do_not_specialize=["T"])
def _wgrad(
    out, offs, T, M, N, K,
    a, a_scale, a_group, a_row, a_scale_group, a_scale_row, a_scale_col,
    b, b_scale, b_group, b_row, b_scale_group, b_scale_row, b_scale_col,
    A_ROWS: tl.constexpr, A_COLS: tl.constexpr, A_MANTISSA: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLS: tl.constexpr, B_MANTISSA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A program computes TILE_M×TILE_N of one group's output, summed over the group's tokens.

    The k-blocks are aligned with the blocks of the scales, not with the group; its first and last k-block are masked.
    """
    m_tiles = tl.cdiv(M, TILE_M)
    n_tiles = tl.cdiv(N, TILE_N)
    group = (tl.program_id(0) // (m_tiles * n_tiles)).to(tl.int64)
    m_tile, n_tile = raster_tile(tl.program_id(0) % (m_tiles * n_tiles), m_tiles, n_tiles)
    m_first = m_tile * TILE_M
    n_first = n_tile * TILE_N
    start = _clamp_offset(tl.load(offs + group - 1, mask=group > 0, other=0), T)
    end = _clamp_offset(tl.load(offs + group), T)
    total = sum_over_k(
        a, a_row, a_scale, a_scale_row, a_scale_col, m_first, M,
        b, b_row, b_scale, b_scale_row, b_scale_col, n_first, N, K, start, end,
        A_ROWS, A_COLS, A_MANTISSA, B_ROWS, B_COLS, B_MANTISSA, TILE_M, TILE_N, BLOCK_K, MASK_K,
    )  # fmt: skip
    store_tile(out + group * M * N, N, 1, total, m_first, M, n_first, N, ACCUMULATE)


@triton.jit
def _clamp_offset(offset, T):
    """Clamp an offset to 0 … T: the host cannot check it, and it must not reach outside of the tensors."""
    return tl.minimum(tl.maximum(offset, 0), T)
