"""Divide the layers of a model among the stages of a pipeline, so that the slowest takes as little time as possible.

divide    consecutive parts of a sequence, one for each stage
fold      the same where a rank has two stages, the n-th and the n-th from the end, as in DualPipeV

Both find the smallest possible time of the slowest first, and then the division with the smallest sum of squares among
those that reach it. Sums are exact: equal layers have equal costs, so many divisions tie, and rounding errors would
choose among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

Bounds = list[tuple[int, int]]  # (begin, end) of each part


@lru_cache
def divide(costs: tuple[float, ...], n: int) -> Bounds:
    """Divide a sequence of costs into n parts that are not empty, so that the largest sum is as small as possible.

    n is at most the number of costs, of which none is negative. Among such divisions the one with the smallest sum of
    squares is taken, which spares the other parts.

    Returns:
        The (begin, end) of each part.
    """
    sums = _sums(costs)
    limit, _ = _divide(sums, n, sums[-1], max)
    return _divide(sums, n, limit, lambda squares, part: squares + part**2)[1]


@lru_cache
def fold(costs: tuple[float, ...], n: int) -> Bounds:
    """Divide a sequence into 2n parts that are not empty, so that parts r and 2n−1−r together cost little.

    2n is at most the number of costs, of which none is negative. The largest cost of two such parts is as small as
    possible, and then the sum of squares over all parts.

    Returns:
        The (begin, end) of each part.
    """
    sums = _sums(costs)
    parts = [sums[end] - sums[begin] for begin, end in divide(costs, 2 * n)]
    reached = max(map(sum, zip(parts[:n], reversed(parts[n:]), strict=True)))
    limit, _ = _fold(sums, n, reached, lambda largest, front, back: max(largest, front + back))
    return _fold(sums, n, limit, lambda squares, front, back: squares + front**2 + back**2)[1]


def _divide(sums: list[int], n: int, limit: int, add: Callable[[int, int], int]) -> tuple[int, Bounds]:
    """Return the smallest score of a division in which no part costs more than a limit, and its parts.

    Args:
        sums: as from `_sums`.
        n, limit: how many parts there are, and the limit; some division must reach it.
        add: the score of parts and one more, from the score of these and its cost.
    """
    total = len(sums) - 1
    best: dict[int, tuple[int, Bounds]] = {0: (0, [])}  # by where the parts so far end
    for left in range(n - 1, -1, -1):
        longer: dict[int, tuple[int, Bounds]] = {}
        for end in range(1, total - left + 1) if left else (total,):
            found = [
                (add(score, sums[end] - sums[begin]), [*parts, (begin, end)])
                for begin, (score, parts) in best.items()
                if begin < end and sums[end] - sums[begin] <= limit
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return best[total]


def _fold(sums: list[int], n: int, limit: int, add: Callable[[int, int, int], int]) -> tuple[int, Bounds]:
    """Return the smallest score of a fold in which no pair of parts costs more than a limit, and its parts.

    Args:
        sums: as from `_sums`.
        n, limit: how many pairs there are, and the limit; some fold must reach it.
        add: the score of pairs and one more, from the score of these and the costs of its two parts.
    """
    total = len(sums) - 1
    best: dict[tuple[int, int], tuple[int, Bounds, Bounds]] = {(0, total): (0, [], [])}  # by what lies inside
    for left in range(n - 1, -1, -1):  # pairs of parts that lie inside the next one
        longer: dict[tuple[int, int], tuple[int, Bounds, Bounds]] = {}
        for (begin, end), (score, before, after) in best.items():
            for front in range(begin + 1, end - 2 * left):
                front_cost = sums[front] - sums[begin]
                for back in range(end - 1, front + 2 * left - 1, -1) if left else (front,):
                    back_cost = sums[end] - sums[back]
                    if front_cost + back_cost > limit:
                        break
                    if sums[back] - sums[front] > left * limit:  # too much for the pairs inside
                        continue
                    longer_score = add(score, front_cost, back_cost)
                    if (front, back) not in longer or longer_score < longer[front, back][0]:
                        longer[front, back] = (longer_score, [*before, (begin, front)], [(back, end), *after])
        best = longer
    score, before, after = min(best.values())
    return score, before + after


def _sums(costs: tuple[float, ...]) -> list[int]:
    """Return exact sums of the first 0, 1, 2, … costs, in a unit that divides them all."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in ratios)  # all are powers of two
    return [0, *accumulate(numerator * (unit // denominator) for numerator, denominator in ratios)]
