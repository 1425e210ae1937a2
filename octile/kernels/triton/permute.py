# mypy: allow-untyped-defs
"""Rows to their experts and back; bit for bit what `octile.ops.permute` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.storage import new_scale
from octile.kernels.triton import tuning
from octile.kernels.triton.tuning import EXACT, UNPERMUTE


def launch(data: Tensor, scale: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Row t of data [T, D] with scale [T, ⌈D/128⌉], any strides, to the rows place[t] of the result."""
    (t, d), k = data.shape, place.shape[1]
    moved = torch.empty(t * k, d, dtype=data.dtype, device=data.device)
    moved_scale = new_scale(moved, 1, 128)
    if moved.numel():
        cols = min(max(triton.next_power_of_2(d), 128), tuning.PERMUTE_BYTES)
        warps = max(cols // tuning.PERMUTE_BYTES_A_WARP, 1)
        with torch.cuda.device_of(data):
            permute[(t * triton.cdiv(d, cols),)](
                data.view(torch.uint8), scale, place, d, *data.stride(), *scale.stride(), *place.stride(),
                moved.view(torch.uint8), moved_scale, moved_scale.stride(1), K=k, COLS=cols, num_warps=warps,
            )  # fmt: skip
    return moved, moved_scale


def launch_back(y: Tensor, place: Tensor, add: Tensor | None) -> Tensor:
    """The sums of add [T, D] and the rows place[t] of y [T·K, D], any strides → [T, D]."""
    (t, k), d = place.shape, y.shape[1]
    out = torch.empty(t, d, dtype=y.dtype, device=y.device)
    if out.numel():
        grid = (t * triton.cdiv(d, UNPERMUTE["COLS"]),)
        added = y if add is None else add  # read only where given
        with torch.cuda.device_of(y):
            unpermute[grid](
                y, place, added, out, d, *y.stride(), *place.stride(), *added.stride(),
                K=k, ADD=add is not None, **UNPERMUTE, **EXACT,
            )  # fmt: skip
    return out


@triton.jit
def permute(
    data, scale, place, D, data_row, data_col, scale_row, scale_col, place_row, place_col,
    moved, moved_scale, moved_scale_col, K: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program: COLS bytes of a token's row and their scales, read once, written K times."""
    parts = tl.cdiv(D, COLS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    column = part * COLS + tl.arange(0, COLS)
    tile = part * (COLS // 128) + tl.arange(0, COLS // 128)
    codes = tl.load(data + token * data_row + column.to(tl.int64) * data_col, mask=column < D)
    has_tile = tile < tl.cdiv(D, 128)
    scales = tl.load(scale + token * scale_row + tile.to(tl.int64) * scale_col, mask=has_tile)
    for k in tl.static_range(K):
        row = tl.load(place + token * place_row + k * place_col).to(tl.int64)
        tl.store(moved + row * D + column, codes, mask=column < D)
        tl.store(moved_scale + row + tile.to(tl.int64) * moved_scale_col, scales, mask=has_tile)


@triton.jit
def unpermute(
    y, place, add, out, D, y_row, y_col, place_row, place_col, add_row, add_col,
    K: tl.constexpr, ADD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program: COLS sums of a token."""
    parts = tl.cdiv(D, COLS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * COLS + tl.arange(0, COLS)
    wide = column.to(tl.int64)
    total = tl.zeros([COLS], tl.float32)
    if ADD:
        total = tl.load(add + token * add_row + wide * add_col, mask=column < D, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token * place_row + k * place_col).to(tl.int64)
        total += tl.load(y + row * y_row + wide * y_col, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=column < D)
