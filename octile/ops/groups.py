"""Alignment of groups of rows to tiles, so that no tile along the tokens holds rows of two groups.

The rows of all experts lie one after the other, and a group ends at any row. wgrad sums over the rows of each group,
and its operands have one scale for 128 rows. In tiles counted from row 0 the first and the last tile of a group would
hold rows of its neighbors: an outlier of one expert would take precision from another one, and a NaN would reach it. So
a group's rows begin at a multiple of 128, and its last tile ends in zeros, which add nothing to a sum:

    rows of groups of 130, 0 and 70    0 … 129 | 130 … 199
    their tiles                        0 … 127 | 128 … 129, zeros | 130 … 199, zeros

The result has as many tiles as any groups could need, a number that the host knows from shapes, so nothing waits for
the group sizes. Rows after the last group have tiles of their own, and tiles that are left over have no rows.

Shapes: T rows of all groups together, G groups, P = 128 · number of tiles.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import check_device
from octile.ops.scale_layouts import refuse_unless

ROWS = 128  # of a tile
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # which torch can mask


class AlignedGroups(NamedTuple):
    """Groups of rows in tiles of 128.

    Attributes:
        tiles: int32 [P/128, 2]: the first row and the end of the rows of each tile; they are equal in a tile of zeros.
        offs: int32 [G], the end of each group among the P rows, all multiples of 128.
    """

    tiles: Tensor
    offs: Tensor


@operator()
def align_groups(offs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Divide groups of rows into tiles of 128, each of which holds rows of one group.

    Args:
        offs: int32 [G], nondecreasing: group g has the rows from offs[g−1] to offs[g], exclusive.
        rows: T, at least offs[G−1].

    Returns:
        tiles and offs of `AlignedGroups`, with ⌊(T + 127 · min(T, G + 1)) / 128⌋ tiles.

    Raises:
        TypeError: offs is not int32.
        ValueError: offs is not a vector, or, on a CPU, decreases or exceeds rows.
    """
    _check_offs(offs)
    ends = torch.cat([offs, offs.new_full((1,), rows)])  # the rows after the last group are one more
    starts = torch.cat([offs.new_zeros(1), ends[:-1]])
    refuse_unless(
        ((starts <= ends) & (starts >= 0)).all(), f"offs must be nondecreasing from 0 to at most {rows}, the rows"
    )
    tile_counts = (ends - starts + ROWS - 1) // ROWS
    tile_ends = tile_counts.cumsum(0)
    tile = torch.arange(num_tiles(rows, len(offs)), device=offs.device)
    group = torch.searchsorted(tile_ends, tile, right=True)
    is_used, group = group <= len(offs), group.clamp(max=len(offs))
    first = starts[group] + (tile - (tile_ends - tile_counts)[group]) * ROWS
    tiles = torch.stack((first, torch.minimum(first + ROWS, ends[group])), dim=1) * is_used[:, None]
    return tiles.to(torch.int32), (tile_ends[:-1] * ROWS).to(torch.int32)


@align_groups.register_fake
def _(offs, rows):
    return offs.new_empty(num_tiles(rows, offs.shape[0]), 2), torch.empty_like(offs)


@align_groups.register_kernel("cuda")
def _(offs, rows):
    from octile.kernels.triton import groups as kernel  # late: a machine without a GPU has no Triton

    _check_offs(offs)
    return kernel.launch(offs, rows, num_tiles(rows, len(offs)))


def num_tiles(rows: int, groups: int) -> int:
    """The most tiles of 128 that any groups of this many rows, and the rows after the last group, could need."""
    return (rows + (ROWS - 1) * torch.sym_min(rows, groups + 1)) // ROWS


def take_tiles(x: Tensor, tiles: Tensor) -> Tensor:
    """Copy the rows of x [T, K] to their tiles: [P, K], zeros where a tile has no row."""
    rows = (tiles[:, :1] + torch.arange(ROWS, dtype=torch.int32, device=x.device)).flatten()
    is_row = rows < tiles[:, 1].repeat_interleave(ROWS)
    bits = x.view(torch.uint8 if x.itemsize == 1 else SIGNED.get(x.dtype, x.dtype))
    return bits.index_select(0, torch.where(is_row, rows, 0)).masked_fill(~is_row[:, None], 0).view(x.dtype)


def check_tiles(name: str, x: Tensor, tiles: Tensor | None) -> None:
    """Raise TypeError or ValueError unless tiles are None, or those of `AlignedGroups` for a matrix x of this name."""
    if tiles is None:
        return
    if tiles.dtype != torch.int32:
        raise TypeError(f"tiles must be int32, not {tiles.dtype}")
    if tiles.dim() != 2 or tiles.shape[1] != 2 or not tiles.is_contiguous():
        raise ValueError(f"tiles must be [P/128, 2], contiguous, not {tuple(tiles.shape)}")
    if x.dim() != 2:
        raise ValueError(f"{name} must be a matrix where it has tiles of groups, not {tuple(x.shape)}")
    check_device(name, x, "tiles", tiles)


def _check_offs(offs: Tensor) -> None:
    if offs.dtype != torch.int32:
        raise TypeError(f"offs must be int32, not {offs.dtype}")
    if offs.dim() != 1:
        raise ValueError(f"offs must be [G], not {tuple(offs.shape)}")
