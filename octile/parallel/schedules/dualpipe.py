"""DualPipe and DualPipeV: a rank has two stages, and overlaps a forward pass of one with a backward pass of the other.

In DualPipe half of the micro-batches enters at each end of the pipeline, so that rank r of PP has stage r for one half
and stage PP−1−r for the other. In DualPipeV all enter at rank 0, go to the last of PP/2 ranks and come back, so that
rank r has stages r and PP−1−r, too. Both have the same order of actions: a rank has a *near* stage, which micro-batches
reach first, and a *far* stage, r ranks from the end of their way.

r counts the ranks from the nearer end, H = PP/2, and n micro-batches pass each of the two stages:

| phase | actions of a rank | times |
|---|---|---|
| 1 | near forward | 2(H−1−r) |
| 2 | near forward, far forward | r+1 |
| 3 | far input gradient, its weight gradient, far forward | H−1−r |
| 4 | near forward with far backward, far forward with near backward | n−2H+r+1 |
| 5 | far backward, far forward with near backward | H−1−r |
| 6 | far and near backward alternate; the first half of them are full, the others input gradients only | 2(r+1) |
| 7 | a deferred weight gradient, near input gradient | H−1−r |
| 8 | a deferred weight gradient | r+1 |

The middle ranks run the first forward and backward of phase 4 one after the other: the next rank waits for the first.

Sources: DeepSeek-V3 (arXiv 2412.19437) §3.2.1 and figure 5; DualPipeV is the "cut-in-half" of Qi et al.,
https://hackmd.io/@ufotalent/r1lVXsa9Jg.
"""

from collections import deque
from collections.abc import Callable

from octile.parallel.schedules.actions import (
    Action,
    backward,
    forward,
    input_gradient,
    overlapped,
    parts,
    weight_gradient,
)
from octile.parallel.schedules.schedule import Schedule, check_sizes

NEAR, FAR = 0, 1
StageAndBatch = Callable[[int, int], tuple[int, int]]  # (NEAR or FAR, number) → (stage, micro-batch)


def dualpipe(n_stages: int, n_micro_batches: int) -> Schedule:
    """DualPipe: micro-batches from both ends, on as many ranks as stages, with two copies of every stage.

    Raises:
        ValueError: the stages are odd, or the micro-batches are odd or fewer than twice the stages.
    """
    _check_even("dualpipe", "stages", n_stages)
    check_sizes("dualpipe", n_stages, n_micro_batches, least_stages=2, least_batches=2 * n_stages)
    _check_even("dualpipe", "micro-batches", n_micro_batches)
    half = n_micro_batches // 2

    def action_of(rank: int) -> StageAndBatch:
        near_direction = 0 if rank < n_stages // 2 else 1

        def stage_and_batch(which: int, number: int) -> tuple[int, int]:
            direction = near_direction ^ which
            return (n_stages - 1 - rank if direction else rank), number + direction * half

        return stage_and_batch

    ranks = range(n_stages)
    table = [_order(min(r, n_stages - 1 - r), n_stages // 2, half, action_of(r)) for r in ranks]
    return Schedule("dualpipe", n_micro_batches, (tuple(ranks), tuple(reversed(ranks))), tuple(table))


def dualpipev(n_stages: int, n_micro_batches: int) -> Schedule:
    """DualPipeV: micro-batches go down a V of ranks and up again, on half as many ranks as stages.

    Raises:
        ValueError: the stages are odd, or the micro-batches are fewer than the stages.
    """
    _check_even("dualpipev", "stages", n_stages)
    check_sizes("dualpipev", n_stages, n_micro_batches, least_stages=2, least_batches=n_stages)

    def action_of(rank: int) -> StageAndBatch:
        return lambda which, number: (n_stages - 1 - rank if which == FAR else rank, number)

    ranks = range(n_stages // 2)
    table = [_order(rank, len(ranks), n_micro_batches, action_of(rank)) for rank in ranks]
    return Schedule("dualpipev", n_micro_batches, ((*ranks, *reversed(ranks)),), tuple(table))


def _check_even(name: str, what: str, number: int) -> None:
    if number % 2:
        raise ValueError(f"{name} needs an even number of {what}, not {number}")


def _order(rank: int, half: int, count: int, stage_and_batch: StageAndBatch) -> tuple[Action, ...]:
    """The actions of a rank.

    Args:
        rank: counted from the nearer end.
        half: PP/2.
        count: micro-batches that pass each of the rank's stages.
        stage_and_batch: the stage and the micro-batch of the nth action of a kind.
    """
    actions: list[Action] = []
    forwards, backwards = [0, 0], [0, 0]
    deferred: deque[Action] = deque()

    def next_forward(which: int) -> Action:
        forwards[which] += 1
        return forward(*stage_and_batch(which, forwards[which] - 1))

    def next_backward(which: int) -> Action:
        backwards[which] += 1
        return backward(*stage_and_batch(which, backwards[which] - 1))

    def next_input_gradient(which: int) -> Action:
        backwards[which] += 1
        stage_batch = stage_and_batch(which, backwards[which] - 1)
        deferred.append(weight_gradient(*stage_batch))
        return input_gradient(*stage_batch)

    def next_pair(which: int) -> Action:
        return overlapped(next_forward(which), next_backward(1 - which))

    inner = half - 1 - rank  # ranks from here to the middle
    for _ in range(2 * inner):
        actions.append(next_forward(NEAR))
    for _ in range(rank + 1):
        actions += next_forward(NEAR), next_forward(FAR)
    for _ in range(inner):
        actions += next_input_gradient(FAR), deferred.popleft(), next_forward(FAR)
    for number in range(count - 2 * half + rank + 1):
        first = next_pair(NEAR)
        actions += parts(first) if number == inner == 0 else (first,)
        actions.append(next_pair(FAR))
    for _ in range(inner):
        actions += next_backward(FAR), next_pair(FAR)
    for number in range(2 * (rank + 1)):
        take = next_backward if number <= rank else next_input_gradient
        actions.append(take(NEAR if number % 2 else FAR))
    for _ in range(inner):
        actions += deferred.popleft(), next_input_gradient(NEAR)
    return (*actions, *deferred)
