# mypy: allow-untyped-defs
"""Rows to their experts and back; bit for bit what `octile.ops.permute` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import launch_config
from octile.kernels.triton.launch_config import EXACT, PERMUTE_SCALES, UNPERMUTE


def launch(data: Tensor, scale: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Row t of data [T, D] with scale [T, ⌈D/128⌉], any strides, to the rows place[t] of the result."""
    (t, d), k = data.shape, place.shape[1]
    rows = t * k
    moved = torch.empty(rows, d, dtype=data.dtype, device=data.device)
    moved_scale = new_scale(moved, 1, 128)
    if moved.numel():
        token = torch.empty(rows, dtype=torch.int32, device=data.device)
        cols = min(max(triton.next_power_of_2(d), 128), launch_config.PERMUTE_BYTES)
        warps = max(cols // launch_config.PERMUTE_BYTES_A_WARP, 1)
        of_scales = triton.cdiv(rows, PERMUTE_SCALES["ROWS"]) * triton.cdiv(scale.shape[1], PERMUTE_SCALES["TILES"])
        with torch.cuda.device_of(data):
            find_tokens[(triton.cdiv(rows, 1024),)](place, *place.stride(), token, rows, K=k, ROWS=1024)
            permute[(of_scales + t * triton.cdiv(d, cols),)](
                data.view(torch.uint8), scale, place, token, rows, d, *data.stride(), *scale.stride(), *place.stride(),
                moved.view(torch.uint8), moved_scale, moved_scale.stride(1), of_scales,
                K=k, COLS=cols, **PERMUTE_SCALES, num_warps=warps,
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


@triton.jit(do_not_specialize=["R"])
def find_tokens(place, place_row, place_col, token, R, K: tl.constexpr, ROWS: tl.constexpr):
    """Whose row each of the result is."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(place + (index // K).to(tl.int64) * place_row + index % K * place_col, mask=index < R, other=0)
    tl.store(token + row, index // K, mask=index < R)


@triton.jit(do_not_specialize=["R", "OF_SCALES"])
def permute(
    data, scale, place, token_of, R, D, data_row, data_col, scale_row, scale_col, place_row, place_col,
    moved, moved_scale, moved_scale_col, OF_SCALES,
    K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: COLS bytes of a token's row, read once, written K times; or the scales of ROWS rows and TILES tiles.

    A tile's scales lie one beside the other across the rows, so they are written in the rows' order: by the token's
    program, each would be a write of four bytes, and as many writes as all of the codes.
    """
    if tl.program_id(0) < OF_SCALES:
        blocks = tl.cdiv(R, ROWS)
        to = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
        whose = tl.load(token_of + to, mask=to < R, other=0).to(tl.int64)
        tile = (tl.program_id(0) // blocks * TILES + tl.arange(0, TILES)).to(tl.int64)[:, None]
        inside = (tile < tl.cdiv(D, 128)) & (to < R)[None, :]
        factor = tl.load(scale + whose[None, :] * scale_row + tile * scale_col, mask=inside)
        tl.store(moved_scale + to[None, :] + tile * moved_scale_col, factor, mask=inside)
    else:
        index = tl.program_id(0) - OF_SCALES
        parts = tl.cdiv(D, COLS)
        token = (index // parts).to(tl.int64)
        column = index % parts * COLS + tl.arange(0, COLS)
        codes = tl.load(data + token * data_row + column.to(tl.int64) * data_col, mask=column < D)
        for k in tl.static_range(K):
            row = tl.load(place + token * place_row + k * place_col).to(tl.int64)
            tl.store(moved + row * D + column, codes, mask=column < D)


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
