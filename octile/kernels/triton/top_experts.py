# mypy: allow-untyped-defs
"""The order in which experts are chosen, as `octile.ops.top_experts` specifies it: keys of scores, in a tile."""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**63))  # below the key of every score


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
    return (order_of(score).to(tl.int64) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def order_of(score):
    """Return an int32 that orders scores; NaN is the highest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # +0.0 makes −0 the same as 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, 0x7FFFFFFF, ordered)


@triton.jit
def _score(key):
    """Return the score of a key."""
    ordered = (key >> 31).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
