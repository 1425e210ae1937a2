# mypy: allow-untyped-defs
"""Tiles of groups of rows, as `octile.ops.groups` specifies them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import GROUP_TILES


def launch(offs: Tensor, rows: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """Divide groups of rows, which end at offs int32 [G], any stride, into tiles [num_tiles, 2]; → tiles, offs [G]."""
    groups = offs.shape[0]
    tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=offs.device)
    aligned = torch.empty(groups, dtype=torch.int32, device=offs.device)
    ends = triton.next_power_of_2(groups + 1)
    tiles_per_program = max(GROUP_TILES["elements"] // ends, 1)
    grid = (max(triton.cdiv(num_tiles, tiles_per_program), 1),)
    with torch.cuda.device_of(offs):
        align_groups[grid](
            offs, offs.stride(0), rows, groups, num_tiles, tiles, aligned, ENDS=ends, TILES=tiles_per_program,
            num_warps=GROUP_TILES["num_warps"],
        )  # fmt: skip
    return tiles, aligned


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    offs = cases.empty(cases.GROUPS, dtype=torch.int32)
    return {"tiles of groups": lambda: launch(offs, cases.T, len(cases.group_tiles()))}


@triton.jit(do_not_specialize=["T", "num_tiles"])
def align_groups(offs, offs_step, T, G, num_tiles, tiles, aligned, ENDS: tl.constexpr, TILES: tl.constexpr):
    """A program finds the rows of TILES tiles; the first program also stores where groups end.

    Rows after the last group are group G. Offsets are clamped: the host cannot check them, and no tile may lead outside
    of the rows.
    """
    g = tl.arange(0, ENDS)
    before = tl.load(offs + (g - 1) * offs_step, mask=(g > 0) & (g <= G), other=0)
    starts = tl.minimum(tl.maximum(before, 0), T)
    ends = tl.minimum(tl.maximum(tl.load(offs + g * offs_step, mask=g < G, other=0), 0), T)
    ends = tl.where(g < G, ends, T)
    counts = tl.where(g <= G, tl.cdiv(tl.maximum(ends - starts, 0), 128), 0)
    tile_ends = tl.cumsum(counts, axis=0)
    if tl.program_id(0) == 0:
        tl.store(aligned + g, tile_ends * 128, mask=g < G)

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    first_tile = tile_ends - counts
    is_own = (first_tile[None, :] <= tile[:, None]) & (tile[:, None] < tile_ends[None, :])
    first = tl.sum(tl.where(is_own, starts[None, :] + (tile[:, None] - first_tile[None, :]) * 128, 0), axis=1)
    end = tl.minimum(tl.sum(tl.where(is_own, ends[None, :], 0), axis=1), first + 128)
    tl.store(tiles + 2 * tile, first, mask=tile < num_tiles)
    tl.store(tiles + 2 * tile + 1, end, mask=tile < num_tiles)
