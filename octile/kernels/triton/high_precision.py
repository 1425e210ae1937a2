# mypy: allow-untyped-defs
"""Grouped GEMMs of BF16 and FP16 operands, as `octile.ops.high_precision` specifies.

torch's grouped GEMM rounds its result to the dtype of the operands. These kernels sum in FP32 and can store the sums.
And torch's tiles have 64 rows or more, so with few rows in a group, as in decoding, it waits longer for the weights
than a kernel with small tiles and deep pipelines. As in `grouped`, the sizes of the groups are on the device, tiles
begin where their group begins, and nothing is padded.

Shapes: T rows of all groups together, G groups, N and K of a weight.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import DeviceProperties, device_properties
from octile.kernels.triton.grouped import clamp_offset, group_tile
from octile.kernels.triton.k_loop import raster_tile, store_tile

BLOCK_K = 64
BYTES = 2  # of an element of an operand
MAX_STAGES, MAX_STAGES_OF_FEW_ROWS = 4, 6
FEW_ROWS = 32  # of a group: then loading the weights bounds the time
ZERO_ELEMENTS = 4096  # of a program at a time


def launch_nt(
    a: Tensor, b: Tensor, offs: Tensor, expected_rows: int = 0, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Multiply the rows of group g of a[T, K] by b[g]ᵀ of b[G, N, K], any strides → [T, N] in out_dtype.

    Rows past offs[-1] are zero. expected_rows are those of a group, by which the tile is chosen; 0: the mean.
    """
    (t, k), (groups, n, _) = a.shape, b.shape
    gpu = device_properties(a.device)
    with_rows = groups if expected_rows else min(groups, t)
    tile = _choose_tile(expected_rows or mean_rows(a, b), n, max(with_rows, 1), gpu)
    out = a.new_empty(t, n, dtype=out_dtype)
    if out.numel() == 0:
        return out
    # each group, and the rows past the last group, end in a tile that may have a single row
    max_tiles = min((t + (groups + 1) * (tile["TILE_M"] - 1)) // tile["TILE_M"], t)
    with torch.cuda.device_of(a):
        high_precision_nt[(max_tiles * triton.cdiv(n, tile["TILE_N"]),)](
            out, offs, a, b, t, n, k, groups, max_tiles, *a.stride(), *b.stride(),
            ENDS=triton.next_power_of_2(groups + 1), **tile,
        )  # fmt: skip
    return out


def mean_rows(a: Tensor, b: Tensor) -> int:
    """Return the mean of the rows of a group, rounded up, for a[T, K] and b[G, N, K]."""
    return triton.cdiv(len(a), max(len(b), 1))


def launch_tn(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute aᵀ · b over the rows of each group: a[T, N], b[T, K], any strides → [G, N, K] float32.

    The result of a group without rows is zero.
    """
    (t, n), k, groups = a.shape, b.shape[1], offs.shape[0]
    tile = _choose_tile(n, k, groups, device_properties(a.device))
    out = a.new_empty(groups, n, k, dtype=torch.float32)
    if out.numel() == 0:
        return out
    grid = (groups * triton.cdiv(n, tile["TILE_M"]) * triton.cdiv(k, tile["TILE_N"]),)
    with torch.cuda.device_of(a):
        high_precision_tn[grid](out, offs, a, b, t, n, k, *a.stride(), *b.stride(), **tile)
    return out


def zero_rest(y: Tensor, offs: Tensor) -> None:
    """Set the rows of y [T, N], contiguous, past offs[-1] to zero, all if there is no group. Usually there are none."""
    t, n = y.shape
    if y.numel():
        programs = min(triton.cdiv(y.numel(), ZERO_ELEMENTS), device_properties(y.device).num_sms)
        with torch.cuda.device_of(y):
            zero_past_groups[(programs,)](y, offs, offs.stride(0), t, n, offs.shape[0], ELEMENTS=ZERO_ELEMENTS)


def _choose_tile(m: int, n: int, num_gemms: int, gpu: DeviceProperties) -> dict[str, Any]:
    """Choose the tile, as `device.tile` does for 8-bit operands, and as many stages as shared memory holds.

    Hopper's holds all stages of a tile of 128×256, whose accumulator takes 128 registers per thread. Where more than a
    tenth of the columns of these tiles would lie outside, as of 384 columns, they are half as wide. With few rows tiles
    of 128 columns and more stages load the weights faster: on an H200 3 rows in each of 64 groups take 165 µs for
    [2816, 2048] and 24 rows 185, where torch takes 250 and 238.
    """
    tile_m = min(max(triton.next_power_of_2(m), 16), 128)
    few, wide = tile_m <= FEW_ROWS, gpu.shared_bytes >= MAX_STAGES * _stage_bytes(128, 256)
    tile_n = min(max(triton.next_power_of_2(n), 32), 256 if wide and not few else 128)
    if tile_n == 256 and _covered(n, 256) > 1.1 * _covered(n, 128):
        tile_n = 128
    while tile_n > 32 and num_gemms * triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n) < gpu.num_sms:
        tile_n //= 2
    stages = gpu.shared_bytes // _stage_bytes(tile_m, tile_n)
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "BLOCK_K": BLOCK_K,
        "num_warps": 8 if tile_m * tile_n >= 128 * 128 else 4,
        "num_stages": min(max(stages, 2), MAX_STAGES_OF_FEW_ROWS if few else MAX_STAGES),
    }


def _covered(n: int, tile_n: int) -> int:
    return triton.cdiv(n, tile_n) * tile_n


def _stage_bytes(tile_m: int, tile_n: int) -> int:
    return (tile_m + tile_n) * BLOCK_K * BYTES


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    offs, weights = cases.empty(cases.GROUPS, dtype=torch.int32), cases.empty(cases.GROUPS, cases.N, cases.K)
    x, dy, few = cases.empty(cases.T, cases.K), cases.empty(cases.T, cases.N), cases.empty(3 * cases.GROUPS, cases.K)
    return {
        "grouped x · wᵀ of BF16": lambda: launch_nt(x, weights, offs),
        "grouped dy · w of BF16": lambda: launch_nt(dy, weights.mT, offs),
        "grouped x · wᵀ of BF16, few rows": lambda: launch_nt(few, weights, offs, 0, cases.BF16),
        "rows past the last group": lambda: zero_rest(dy, offs),
        "grouped dyᵀ · x of BF16": lambda: launch_tn(dy, x, offs),
    }


@triton.jit(do_not_specialize=["T", "max_tiles"])
def high_precision_nt(
    out, offs, a, b, T, N, K, G, max_tiles, a_row, a_col, b_group, b_row, b_col,
    ENDS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes up to TILE_M rows of one group and TILE_N columns; rows past the last group become zero."""
    m_tile, n_tile = raster_tile(tl.program_id(0), max_tiles, tl.cdiv(N, TILE_N))
    group, m_first, m_end = group_tile(offs, m_tile, T, G, T, TILE_M, ENDS)
    if m_first >= m_end:
        return
    m = tl.minimum(m_first + tl.arange(0, TILE_M), m_end - 1).to(tl.int64)
    n = n_tile * TILE_N + tl.arange(0, TILE_N)  # not clamped as m is: of a transposed weight it is contiguous
    k = tl.arange(0, BLOCK_K)
    a_tile = a + m[:, None] * a_row + k[None, :] * a_col
    b_tile = b + group.to(tl.int64) * b_group + n.to(tl.int64)[None, :] * b_row + k[:, None] * b_col
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, tl.where(group < G, K, 0), BLOCK_K):
        inside = k < K - first
        x = tl.load(a_tile, mask=inside[None, :], other=0.0)
        w = tl.load(b_tile, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(x, w, total)
        a_tile += BLOCK_K * a_col
        b_tile += BLOCK_K * b_col
    store_tile(out, N, 1, total, m_first, m_end, n_tile * TILE_N, N, False)


@triton.jit(do_not_specialize=["T"])
def high_precision_tn(
    out, offs, a, b, T, M, N, a_row, a_col, b_row, b_col,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes TILE_M×TILE_N of one group's output [M, N], summed over the group's rows."""
    m_tiles, n_tiles = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = (tl.program_id(0) // (m_tiles * n_tiles)).to(tl.int64)
    m_tile, n_tile = raster_tile(tl.program_id(0) % (m_tiles * n_tiles), m_tiles, n_tiles)
    start = clamp_offset(tl.load(offs + group - 1, mask=group > 0, other=0), T)
    end = clamp_offset(tl.load(offs + group), T)
    m = m_tile * TILE_M + tl.arange(0, TILE_M)
    n = n_tile * TILE_N + tl.arange(0, TILE_N)
    row = tl.arange(0, BLOCK_K)
    a_tile = a + (start + row).to(tl.int64)[:, None] * a_row + m.to(tl.int64)[None, :] * a_col
    b_tile = b + (start + row).to(tl.int64)[:, None] * b_row + n.to(tl.int64)[None, :] * b_col
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        inside = (row < end - first)[:, None]
        dy = tl.load(a_tile, mask=inside & (m < M)[None, :], other=0.0)
        x = tl.load(b_tile, mask=inside & (n < N)[None, :], other=0.0)
        total = tl.dot(tl.trans(dy), x, total)
        a_tile += BLOCK_K * a_row
        b_tile += BLOCK_K * b_row
    store_tile(out + group * M * N, N, 1, total, m_tile * TILE_M, M, n_tile * TILE_N, N, False)


@triton.jit(do_not_specialize=["T"])
def zero_past_groups(y, offs, offs_step, T, N, G, ELEMENTS: tl.constexpr):
    """The programs set the elements of the rows past the last group to zero, ELEMENTS at a time."""
    first = clamp_offset(tl.load(offs + (G - 1) * offs_step, mask=G > 0, other=0), T).to(tl.int64) * N
    end = T.to(tl.int64) * N
    for start in range(first + tl.program_id(0) * ELEMENTS, end, tl.num_programs(0) * ELEMENTS):
        at = start + tl.arange(0, ELEMENTS)
        tl.store(y + at, tl.zeros([ELEMENTS], y.dtype.element_ty), mask=at < end)
