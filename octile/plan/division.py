"""Divide the layers of a model among the stages of a pipeline, so that the slowest takes as little time as possible.

divide    consecutive parts of a sequence, one for each stage
fold      the same where a rank has two stages, the n-th and the n-th from the end, as in DualPipeV
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

Bounds = list[tuple[int, int]]  # (begin, end) of each part
ROUNDING = 1e-9  # of sums


@lru_cache
def divide(costs: tuple[float, ...], n: int) -> Bounds:
    """Divide a sequence of costs into n parts that are not empty, so that the largest sum is as small as possible.

    No cost is negative. Among such divisions the one with the smallest sum of squares is taken, which spares the
    other parts.

    Returns:
        The (begin, end) of each part.
    """
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, Bounds]] = {0: (0.0, 0.0, [])}
    for parts_left in range(n - 1, -1, -1):
        longer = {}
        first, last = min(best), max(best)
        for end in _ends(best, len(costs), parts_left):
            found = (math.inf, math.inf, Bounds(), 0)
            for begin in range(min(last, end - 1), first - 1, -1):
                cost = sums[end] - sums[begin]
                if cost > found[0]:  # and so are the parts that begin before
                    break
                largest, squares, cuts = best[begin]
                most = max(largest, cost)
                if most <= found[0]:
                    found = min(found, (most, squares + cost**2, cuts, begin))
            longer[end] = (*found[:2], [*found[2], (found[3], end)])
        best = longer
    return best[len(costs)][2]


def _ends(best: Iterable[int], total: int, parts_left: int) -> range:
    """Where a part may end: behind the first beginning, leaving an item for each part that follows."""
    return range(min(best) + 1, total - parts_left + 1) if parts_left else range(total, total + 1)


@lru_cache
def fold(costs: tuple[float, ...], n: int) -> Bounds:
    """Divide a sequence into 2n parts that are not empty, so that the largest cost of part r and part 2n−1−r is small.

    No cost is negative. Among divisions with the smallest such cost the one with the smallest sum of squares over the
    parts is taken.

    Returns:
        The (begin, end) of each part.
    """
    sums = [0.0, *accumulate(costs)]
    parts = [sums[end] - sums[begin] for begin, end in divide(costs, 2 * n)]
    limit = max(map(sum, zip(parts[:n], reversed(parts[n:]), strict=True)))  # what any division reaches that counts
    best: dict[tuple[int, int], tuple[float, float, Bounds, Bounds]] = {(0, len(costs)): (0.0, 0.0, [], [])}
    for left in range(n - 1, -1, -1):  # pairs of parts that lie inside the next one
        longer: dict[tuple[int, int], tuple[float, float, Bounds, Bounds]] = {}
        for (begin, end), (largest, squares, before, after) in best.items():
            for front in range(begin + 1, end - 2 * left):
                front_cost = sums[front] - sums[begin]
                for back in range(end - 1, front + 2 * left - 1, -1) if left else (front,):
                    back_cost = sums[end] - sums[back]
                    if front_cost + back_cost > limit:
                        break
                    if sums[back] - sums[front] > left * limit * (1 + ROUNDING):  # too much for the pairs inside
                        continue
                    cost = max(largest, front_cost + back_cost), squares + front_cost**2 + back_cost**2
                    if (front, back) not in longer or cost < longer[front, back][:2]:
                        longer[front, back] = (*cost, [*before, (begin, front)], [(back, end), *after])
        best = longer
    _, _, before, after = min(best.values())
    return before + after
