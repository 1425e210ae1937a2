# mypy: allow-untyped-defs
"""The experts with the highest scores, bit for bit as `octile.ops.top_experts` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import TOP_EXPERTS_ELEMENTS

LEAST = tl.constexpr(-(2**63))  # below the key of every score


def launch(scores: Tensor, n_chosen: int, n_group: int, topk_group: int, best: int) -> Tensor:
    """Choose K experts by scores [T, E], any strides → experts int64 [T, K]."""
    t, experts = scores.shape
    chosen = torch.empty(t, n_chosen, dtype=torch.int64, device=scores.device)
    groups, size = triton.next_power_of_2(n_group), triton.next_power_of_2(experts // n_group)
    rows = max(TOP_EXPERTS_ELEMENTS // (groups * size), 1)
    if t:
        with torch.cuda.device_of(scores):
            top_experts[(triton.cdiv(t, rows),)](
                scores, chosen, t, *scores.stride(), K=n_chosen, N_GROUP=n_group, GROUP=experts // n_group,
                TOPK_GROUP=topk_group, BEST=best, ROWS=rows, GROUPS=groups, SIZE=size,
            )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["T"])
def top_experts(
    scores, chosen, T, row_stride, column_stride,
    K: tl.constexpr, N_GROUP: tl.constexpr, GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program chooses for ROWS tokens. GROUPS and SIZE are the powers of two at or above N_GROUP and GROUP."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)[:, None]
    i = tl.arange(0, SIZE)[None, :]
    expert = g * GROUP + i
    exists = ((g < N_GROUP) & (i < GROUP))[None, :, :]
    at = t.to(tl.int64)[:, None, None] * row_stride + expert[None, :, :] * column_stride
    score = tl.load(scores + at, mask=exists & (t < T)[:, None, None], other=0.0)
    key = choice_keys(score, expert[None, :, :], exists, N_GROUP, TOPK_GROUP, BEST, GROUPS)
    key = tl.reshape(key, [ROWS, GROUPS * SIZE])
    for k in tl.static_range(K):
        highest = tl.max(key, axis=1)
        tl.store(chosen + t.to(tl.int64) * K + k, expert_of(highest), mask=t < T)
        key = tl.where(key == highest[:, None], LEAST, key)


@triton.jit
def choice_keys(
    score, expert, exists, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, GROUPS: tl.constexpr
):
    """Return keys of scores [rows, groups, experts] that order the experts: those outside of the best groups as −∞."""
    key = tl.where(exists, key_of(score, expert), LEAST)
    if TOPK_GROUP < N_GROUP:
        highest = tl.max(key, axis=2)
        total = _score(highest)
        if BEST == 2:
            total += _score(tl.max(tl.where(key == highest[:, :, None], LEAST, key), axis=2))
        group = tl.arange(0, GROUPS)[None, :]
        group_key = tl.where(group < N_GROUP, key_of(total, group), LEAST)
        outside = group_key == group_key
        for _ in tl.static_range(TOPK_GROUP):
            is_best = group_key == tl.max(group_key, axis=1)[:, None]
            outside = outside & ~is_best
            group_key = tl.where(is_best, LEAST, group_key)
        score = tl.where(outside[:, :, None], float("-inf"), score)
        key = tl.where(exists, key_of(score, expert), LEAST)
    return key


@triton.jit
def expert_of(key):
    """Return the expert of a key, int64."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def key_of(score, index):
    """Return an int64 that orders pairs: a higher score first (NaN is the highest), then a lower index."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # +0.0 makes −0 the same as 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score != score, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _score(key):
    """Return the score of a key."""
    ordered = (key >> 31).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
