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
from itertools import accumulate, pairwise

Bounds = list[tuple[int, int]]  # (begin, end) of each part


@lru_cache
def divide(costs: tuple[float, ...], n: int) -> Bounds:
    """Divide a sequence of costs into n parts that are not empty, so that the largest sum is as small as possible.

    No cost is negative. Among such divisions the one with the smallest sum of squares is taken, which spares the
    other parts.

    Returns:
        The (begin, end) of each part.
    """
    sums = _sums(costs)
    limit = _smallest_limit(sums, n)
    best: dict[int, tuple[int, Bounds]] = {0: (0, [])}  # by where the parts so far end
    for parts_left in range(n - 1, -1, -1):
        longer: dict[int, tuple[int, Bounds]] = {}
        for end in range(1, len(costs) - parts_left + 1) if parts_left else (len(costs),):
            found = [
                (squares + (sums[end] - sums[begin]) ** 2, [*parts, (begin, end)])
                for begin, (squares, parts) in best.items()
                if begin < end and sums[end] - sums[begin] <= limit
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return best[len(costs)][1]


@lru_cache
def fold(costs: tuple[float, ...], n: int) -> Bounds:
    """Divide a sequence into 2n parts that are not empty, so that the largest cost of part r and part 2n−1−r is small.

    No cost is negative. Among divisions with the smallest such cost the one with the smallest sum of squares over the
    parts is taken.

    Returns:
        The (begin, end) of each part.
    """
    sums = _sums(costs)
    parts = [sums[end] - sums[begin] for begin, end in divide(costs, 2 * n)]
    reached = max(map(sum, zip(parts[:n], reversed(parts[n:]), strict=True)))
    limit, _ = _fold(sums, n, reached, lambda largest, front, back: max(largest, front + back))
    return _fold(sums, n, limit, lambda squares, front, back: squares + front**2 + back**2)[1]


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


def _smallest_limit(sums: list[int], n: int) -> int:
    """Return the smallest limit that n parts of a sequence can keep."""
    low, high = max(end - begin for begin, end in pairwise(sums)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_within(sums, middle) <= n:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_within(sums: list[int], limit: int) -> int:
    """Return how many parts there are if each ends as late as a limit allows, which no cost exceeds."""
    parts, begin = 1, 0
    for index in range(1, len(sums)):
        if sums[index] - sums[begin] > limit:
            parts, begin = parts + 1, index - 1
    return parts
