# mypy: allow-untyped-defs
"""Rows of tokens to their experts and back, bit for bit as `octile.ops.permute` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import TILE
from octile.kernels.cuda.jit.launch import loads_others_early, only_activations_are_new
from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton import launch_config
from octile.kernels.triton.launch_config import EXACT, PERMUTE_SCALES, UNPERMUTE, UNPERMUTE_BACKWARD
from octile.kernels.triton.overlap import overlap_options, wait_for_previous


def launch(data: Tensor, scale: Tensor, row_ids: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Copy row t of data [T, D] and scale [T, ⌈D/128⌉], any strides, to the rows row_ids[t] of the results.

    order [T·K] is the inverse of row_ids [T, K].
    """
    (t, d), k = data.shape, row_ids.shape[1]
    rows = t * k
    moved = torch.empty(rows, d, dtype=data.dtype, device=data.device)
    moved_scale = new_scale(moved, 1, 128)
    if moved.numel():
        cols = min(max(triton.next_power_of_2(d), 128), launch_config.PERMUTE_BYTES)
        tokens = launch_config.PERMUTE_BYTES // cols
        warps = launch_config.PERMUTE_BYTES // launch_config.PERMUTE_BYTES_PER_WARP
        row_programs = triton.cdiv(rows, PERMUTE_SCALES["ROWS"])
        scale_programs = row_programs * triton.cdiv(scale.shape[1], PERMUTE_SCALES["TILES"])
        with torch.cuda.device_of(data):
            permute[(scale_programs + triton.cdiv(t, tokens) * triton.cdiv(d, cols),)](
                data.view(torch.uint8), scale, row_ids, order, rows, d, *data.stride(), *scale.stride(),
                *row_ids.stride(), order.stride(0), moved.view(torch.uint8), moved_scale, moved_scale.stride(1),
                scale_programs, K=k, TOKENS=tokens, COLS=cols, **PERMUTE_SCALES, num_warps=warps,
                **overlap_options(data.device),
            )  # fmt: skip
    return moved, moved_scale


def launch_back(y: Tensor, row_ids: Tensor, add: Tensor | None, weight: Tensor | None = None) -> Tensor:
    """Sum add [T, D] and the rows row_ids[t] of y [T·K, D], times weight [T, K], any strides → [T, D]."""
    out = torch.empty(len(row_ids), y.shape[1], dtype=y.dtype, device=y.device)
    _launch_back(out, False, y, row_ids, add, weight)
    return out


def launch_add(x: Tensor, y: Tensor, row_ids: Tensor, add: Tensor | None, weight: Tensor | None) -> None:
    """Add what `launch_back` returns to contiguous x [T, D]."""
    _launch_back(x, True, y, row_ids, add, weight)


def _launch_back(
    out: Tensor, accumulates: bool, y: Tensor, row_ids: Tensor, add: Tensor | None, weight: Tensor | None
) -> None:
    (t, k), d = row_ids.shape, y.shape[1]
    if out.numel():
        cols = min(max(triton.next_power_of_2(d), 128), UNPERMUTE["cols"])
        added = y if add is None else add  # not read without add
        weights, overlap = y if weight is None else weight, overlap_options(y.device)
        early_ids = overlap["OVERLAPS"] and loads_others_early()
        with torch.cuda.device_of(y):
            unpermute[(t * triton.cdiv(d, cols),)](
                y, row_ids, added, weights, out, d, *y.stride(), *row_ids.stride(), *added.stride(), *weights.stride(),
                K=k, ADD=add is not None, WEIGHTED=weight is not None, ACCUMULATES=accumulates, COLS=cols,
                num_warps=cols // UNPERMUTE["cols_per_warp"], EARLY_IDS=early_ids, **EXACT, **overlap,
            )  # fmt: skip


def launch_back_backward(dsum: Tensor, y: Tensor, row_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dsum [T, D], y [T·K, D], row_ids and weight [T, K], any strides → gradients of y and of weight."""
    (t, k), d = row_ids.shape, y.shape[1]
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dweight = torch.empty(t, k, dtype=torch.float32, device=y.device)
    if dweight.numel():
        cols = min(max(triton.next_power_of_2(d), 128), UNPERMUTE_BACKWARD["cols"])
        rows = UNPERMUTE_BACKWARD["elements"] // cols
        with torch.cuda.device_of(y):
            unpermute_backward[(triton.cdiv(t * k, rows),)](
                dsum, y, row_ids, weight, t * k, d, *dsum.stride(), *y.stride(), *row_ids.stride(), *weight.stride(),
                dy, dweight, K=k, ROWS=rows, COLS=cols, num_warps=UNPERMUTE_BACKWARD["num_warps"], **EXACT,
            )  # fmt: skip
    return dy, dweight


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    row_ids, sums, rows = cases.rows_of_tokens(), cases.empty(cases.T, cases.K), cases.empty(8 * cases.T, cases.K)
    weight = cases.empty(cases.T, 8, dtype=cases.FP32)

    def with_older_ids() -> None:
        with only_activations_are_new():
            launch_add(sums, rows, row_ids, sums, None)

    return {
        "permute": lambda: launch(*cases.quantized(cases.T, cases.K, TILE)[:2], row_ids, row_ids.flatten()),
        "unpermute": lambda: launch_back(rows, row_ids, sums),
        "unpermute with weights": lambda: launch_back(rows, row_ids, sums, weight),
        "unpermute, added": lambda: launch_add(sums, rows, row_ids, sums, None),
        "unpermute, added to older rows": with_older_ids,
        "unpermute backward": lambda: launch_back_backward(sums, rows, row_ids, weight),
    }


@triton.jit(do_not_specialize=["R", "SCALE_PROGRAMS"])
def permute(
    data, scale, row_ids, order, R, D, data_row, data_col, scale_row, scale_col, row_ids_row, row_ids_col, order_step,
    moved, moved_scale, moved_scale_col, SCALE_PROGRAMS,
    K: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program copies COLS bytes of TOKENS rows to K rows each, or gathers the scales of ROWS rows and TILES tiles.

    Scales are contiguous along the rows, so programs of their own write them in that order. Written by the programs of
    the tokens, each scale would be a separate write of 4 bytes, as many writes as the data takes.
    """
    wait_for_previous(OVERLAPS)
    if tl.program_id(0) < SCALE_PROGRAMS:
        blocks = tl.cdiv(R, ROWS)
        to = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
        source = tl.load(order + to.to(tl.int64) * order_step, mask=to < R, other=0).to(tl.int64) // K
        tile = (tl.program_id(0) // blocks * TILES + tl.arange(0, TILES)).to(tl.int64)[:, None]
        inside = (tile < tl.cdiv(D, 128)) & (to < R)[None, :]
        factor = tl.load(scale + source[None, :] * scale_row + tile * scale_col, mask=inside)
        tl.store(moved_scale + to[None, :] + tile * moved_scale_col, factor, mask=inside)
    else:
        index = tl.program_id(0) - SCALE_PROGRAMS
        parts = tl.cdiv(D, COLS)
        token = index // parts * TOKENS + tl.arange(0, TOKENS)
        exists = token < R // K
        token = token.to(tl.int64)
        column = index % parts * COLS + tl.arange(0, COLS)[None, :]
        there = exists[:, None] & (column < D)
        values = tl.load(data + token[:, None] * data_row + column.to(tl.int64) * data_col, mask=there)
        for k in tl.static_range(K):
            row = tl.load(row_ids + token * row_ids_row + k * row_ids_col, mask=exists, other=0).to(tl.int64)
            tl.store(moved + row[:, None] * D + column, values, mask=there)


@triton.jit
def unpermute(
    y, row_ids, add, weight, out, D, y_row, y_col, row_ids_row, row_ids_col, add_row, add_col, weight_row, weight_col,
    K: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, ACCUMULATES: tl.constexpr, COLS: tl.constexpr,
    EARLY_IDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program sums COLS columns of a token, and adds the rounded sums to out if it accumulates.

    It waits for the previous kernel before it loads row ids, or after that if they are older (EARLY_IDS).
    """
    if not EARLY_IDS:
        wait_for_previous(OVERLAPS)
    parts = tl.cdiv(D, COLS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * COLS + tl.arange(0, COLS)
    wide = column.to(tl.int64)
    ids = ()
    for k in tl.static_range(K):
        ids += (tl.load(row_ids + token * row_ids_row + k * row_ids_col).to(tl.int64),)  # type: ignore[assignment]
    if EARLY_IDS:
        wait_for_previous(OVERLAPS)
    total = tl.zeros([COLS], tl.float32)
    if ADD:
        total = tl.load(add + token * add_row + wide * add_col, mask=column < D, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        # Each row is read once. What the previous kernel stored last stays in the L2 cache until it is read.
        at = y + ids[k] * y_row + wide * y_col
        value = tl.load(at, mask=column < D, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weight + token * weight_row + k * weight_col)
        total += value
    rounded = total.to(out.dtype.element_ty)
    if ACCUMULATES:
        before = tl.load(out + token * D + column, mask=column < D, other=0.0)
        rounded = (before.to(tl.float32) + rounded.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * D + column, rounded, mask=column < D)


@triton.jit(do_not_specialize=["R"])
def unpermute_backward(
    dsum, y, row_ids, weight, R, D, dsum_row, dsum_col, y_row, y_col, row_ids_row, row_ids_col, weight_row, weight_col,
    dy, dweight, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS of the R entries of row_ids, COLS columns at a time."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = entry < R
    token = (entry // K).to(tl.int64)
    k = entry % K
    row = tl.load(row_ids + token * row_ids_row + k * row_ids_col, mask=exists, other=0).to(tl.int64)[:, None]
    factor = tl.load(weight + token * weight_row + k * weight_col, mask=exists, other=0.0)[:, None]
    dot = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, D, COLS):
        column = first + tl.arange(0, COLS)[None, :]
        wide = column.to(tl.int64)
        inside = exists[:, None] & (column < D)
        gradient = tl.load(dsum + token[:, None] * dsum_row + wide * dsum_col, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row * y_row + wide * y_col, mask=inside, other=0.0).to(tl.float32)
        dot += gradient * value
        tl.store(dy + row * D + column, (gradient * factor).to(dy.dtype.element_ty), mask=inside)
    tl.store(dweight + entry, tl.sum(dot, axis=1), mask=exists)
