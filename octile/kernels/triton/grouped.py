# mypy: allow-untyped-defs
"""Grouped GEMMs of a mixture of experts, with the group sizes on the device.

The host knows shapes only, so it launches as many programs as any group sizes could need. Each program finds its group
and rows from the offsets; programs without rows exit. Tiles begin where their group begins, so nothing is padded.

Shapes: T rows of all groups together, G groups, N and K of a weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, MX_COLUMN_TILE, TILE
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import Block, GemmRequest, Operand
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.k_loop import choose_tile, operand_arguments, raster_tile, store_tile, sum_over_k


def launch(request: GemmRequest) -> Tensor:
    """Multiply the rows of group g of a[T, K] by b[g]ᵀ of b[G, N, K], and return the request's out [T, N].

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    a, b = request.a, request.b
    (t, k), (groups, n, _) = a.data.shape, b.data.shape
    gpu = device_properties(a.data.device)
    mean_rows = triton.cdiv(t, max(groups, 1))
    tile = choose_tile(mean_rows, n, k, max(groups, 1), a.block, b.block, gpu)
    out = request.output()
    if out.numel() == 0:
        return out
    # each group, and the rows past the last group, end in a tile that may have a single row
    max_tiles = (t + (groups + 1) * (tile["TILE_M"] - 1)) // tile["TILE_M"]
    with torch.cuda.device_of(a.data):
        _grouped[(max_tiles * triton.cdiv(n, tile["TILE_N"]),)](
            out=out,
            offs=request.sizes,
            T=t,
            N=n,
            G=groups,
            rest=t if request.zero_rest else 0,
            ENDS=triton.next_power_of_2(groups + 1),
            max_tiles=max_tiles,
            **operand_arguments(a, b, tile["BLOCK_K"], gpu),
            **tile,
        )
    return out


def launch_masked(request: GemmRequest) -> Tensor:
    """Multiply the first sizes[g] rows of a[g] by b[g]ᵀ: a[G, M, K], b[G, N, K] → the request's out [G, M, N].

    Other rows are not written.

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    a, b = request.a, request.b
    (groups, m, k), n = a.data.shape, b.data.shape[1]
    gpu = device_properties(a.data.device)
    tile = choose_tile(m, n, k, groups, a.block, b.block, gpu)
    out = request.output()
    if out.numel() == 0:
        return out
    grid = (groups * triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(n, tile["TILE_N"]),)
    with torch.cuda.device_of(a.data):
        _masked[grid](
            out=out,
            counts=request.sizes,
            M=m,
            N=n,
            **operand_arguments(a, b, tile["BLOCK_K"], gpu),
            **tile,
        )
    return out


def launch_wgrad(request: GemmRequest) -> Tensor:
    """Compute a[g]ᵀ · b[g] over the rows of each group g: a[T, N], b[T, K] → the request's out [G, N, K].

    The result of a group without rows is zero. With accumulate, the result is added to out in FP32.

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    assert request.sizes is not None
    a, b = request.nt_operands()
    (n, t), k, groups = a.data.shape, b.data.shape[0], request.sizes.shape[0]
    gpu = device_properties(a.data.device)
    tile = choose_tile(n, k, t, groups, a.block, b.block, gpu)
    out = request.output()
    if out.numel() == 0:
        return out
    grid = (groups * triton.cdiv(n, tile["TILE_M"]) * triton.cdiv(k, tile["TILE_N"]),)
    with torch.cuda.device_of(a.data):
        _wgrad[grid](
            out=out,
            offs=request.sizes,
            T=t,
            M=n,
            N=k,
            ACCUMULATE=request.accumulate,
            **operand_arguments(a, b, tile["BLOCK_K"], gpu) | {"MASK_K": True},
            **tile,
        )
    return out


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    offs = cases.empty(cases.GROUPS, dtype=torch.int32)

    def request(schedule: Schedule, a: cases.Quantized, b: cases.Quantized, out_dtype: torch.dtype) -> GemmRequest:
        return GemmRequest(schedule, Operand(*a), Operand(*b), out_dtype, None, offs)

    def wgrad(block: Block) -> None:
        dy, x = cases.quantized(cases.T, cases.N, block), cases.quantized(cases.T, cases.K, block)
        launch_wgrad(request(Schedule.ALONG_K, dy, x, cases.FP32))

    def weights(k: int) -> cases.Quantized:
        return cases.quantized(cases.N, k, BLOCK, groups=cases.GROUPS)

    ragged = cases.quantized(cases.T, 10944, TILE), weights(10944), cases.BF16
    masked = cases.quantized(512, cases.K, TILE, groups=cases.GROUPS), weights(cases.K), cases.BF16
    return {
        "grouped, ragged K": lambda: launch(request(Schedule.GROUPED, *ragged)),
        "masked": lambda: launch_masked(request(Schedule.MASKED, *masked)),
        "grouped dyᵀ · x": lambda: wgrad(COLUMN_TILE),
        "grouped dyᵀ · x MXFP8": lambda: wgrad(MX_COLUMN_TILE),
    }


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

    group, m_first, m_end = group_tile(offs, m_tile, T, G, rest, TILE_M, ENDS)
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
    start = clamp_offset(tl.load(offs + group - 1, mask=group > 0, other=0), T)
    end = clamp_offset(tl.load(offs + group), T)
    total = sum_over_k(
        a, a_row, a_scale, a_scale_row, a_scale_col, m_first, M,
        b, b_row, b_scale, b_scale_row, b_scale_col, n_first, N, K, start, end,
        A_ROWS, A_COLS, A_MANTISSA, B_ROWS, B_COLS, B_MANTISSA, TILE_M, TILE_N, BLOCK_K, MASK_K,
    )  # fmt: skip
    store_tile(out + group * M * N, N, 1, total, m_first, M, n_first, N, ACCUMULATE)


@triton.jit
def group_tile(offs, m_tile, T, G, rest, TILE_M: tl.constexpr, ENDS: tl.constexpr):
    """Find a tile of rows: its group, its first row and the end of its group. Without rows the end is not larger.

    Rows past the last group, up to row `rest`, are the group G. ENDS is a power of two above G.
    """
    # for all groups at once: where they end, how many tiles they take, and which of them has this program's tile
    g = tl.arange(0, ENDS)
    starts = clamp_offset(tl.load(offs + g - 1, mask=(g > 0) & (g <= G), other=0), T)
    ends = tl.where(g < G, clamp_offset(tl.load(offs + g, mask=g < G, other=0), T), rest)
    tiles = tl.where(g <= G, tl.cdiv(tl.maximum(ends - starts, 0), TILE_M), 0)
    tiles_before = tl.cumsum(tiles, axis=0) - tiles
    ours = (tiles_before <= m_tile) & (m_tile < tiles_before + tiles)
    group = tl.sum(tl.where(ours, g, 0), axis=0)
    m_first = tl.sum(tl.where(ours, starts + (m_tile - tiles_before) * TILE_M, 0), axis=0)
    return group, m_first, tl.sum(tl.where(ours, ends, 0), axis=0)


@triton.jit
def clamp_offset(offset, T):
    """Clamp an offset to 0 … T: the host cannot check it, and it must not reach outside of the tensors."""
    return tl.minimum(tl.maximum(offset, 0), T)
