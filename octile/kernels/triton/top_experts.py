# mypy: allow-untyped-defs
"""The order in which experts are chosen, as `octile.ops.gate` specifies it, of scores in a tile.

Scores are compared as integers of 32 bits, which the GPU reduces over a warp in one instruction; of equal ones the
lower index comes first.
"""

import triton
import triton.language as tl

ABSENT = tl.constexpr(-(2**31))  # below the order of every score
LAST = tl.constexpr(2**31 - 1)  # above every index


@triton.jit
def choice_order(
    score, expert, exists, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, GROUPS: tl.constexpr
):
    """Return the order of scores [rows, groups, experts], in which those outside of the best groups are absent."""
    order = tl.where(exists, order_of(score), ABSENT)
    if TOPK_GROUP < N_GROUP:
        highest = tl.max(order, axis=2)
        total = _score(highest)
        if BEST == 2:
            first = tl.min(tl.where(order == highest[:, :, None], expert, LAST), axis=2)
            total += _score(tl.max(tl.where(expert == first[:, :, None], ABSENT, order), axis=2))
        group = tl.arange(0, GROUPS)[None, :]
        group_order = tl.where(group < N_GROUP, order_of(total), ABSENT)
        outside = group_order == group_order
        for _ in tl.static_range(TOPK_GROUP):
            best, group_order = take_highest(group_order, group)
            outside = outside & (group != best)
        order = tl.where(outside[:, :, None], ABSENT, order)
    return order


@triton.jit
def take_highest(order, index):
    """Return the index [rows, 1] of each row's highest element of order [rows, columns], and the others' order."""
    highest = tl.max(order, axis=1)[:, None]
    first = tl.min(tl.where(order == highest, index, LAST), axis=1)[:, None]
    return first, tl.where(index == first, ABSENT, order)


@triton.jit
def order_of(score):
    """Return an int32 that orders scores; NaN is the highest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # +0.0 makes −0 the same as 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, 0x7FFFFFFF, ordered)


@triton.jit
def _score(order):
    """Return the score of an order."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
