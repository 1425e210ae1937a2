"""Schedules in which all micro-batches pass the ranks in one direction, with one stage a rank: GPipe, 1F1B and ZB1P."""

from octile.parallel.schedules.actions import Action, backward, forward, input_gradient, weight_gradient
from octile.parallel.schedules.schedule import Schedule, check_sizes


def gpipe(n_stages: int, n_micro_batches: int) -> Schedule:
    """GPipe: every rank runs all forward passes, then all backward passes.

    Source: Huang et al. 2019 (arXiv 1811.06965) §2.3.

    Raises:
        ValueError: there is no stage or no micro-batch.
    """
    check_sizes("gpipe", n_stages, n_micro_batches)
    return _schedule(
        "gpipe",
        n_micro_batches,
        [[make(stage, m) for make in (forward, backward) for m in range(n_micro_batches)] for stage in range(n_stages)],
    )


def one_f_one_b(n_stages: int, n_micro_batches: int) -> Schedule:
    """1F1B: after enough forward passes to fill the pipeline, a rank alternates one forward and one backward pass.

    Source: PipeDream-Flush, Narayanan et al. 2021 (arXiv 2006.09503) §3.2.

    Raises:
        ValueError: there is no stage or no micro-batch.
    """
    check_sizes("1f1b", n_stages, n_micro_batches)
    return _schedule(
        "1f1b", n_micro_batches, [_alternate(n_stages, stage, n_micro_batches) for stage in range(n_stages)]
    )


def zb1p(n_stages: int, n_micro_batches: int) -> Schedule:
    """ZB1P (ZB-H1): 1F1B whose weight gradients are deferred, so that they fill the idle time at the end.

    Rank r defers them by r micro-batches. Thus every rank holds the activations of PP micro-batches at most, as many as
    the first rank of 1F1B.

    Source: Qi et al. 2023 (arXiv 2401.10241) §2.2.

    Raises:
        ValueError: there is no stage, or there are fewer micro-batches than stages.
    """
    check_sizes("zb1p", n_stages, n_micro_batches, least_batches=n_stages)
    table = []
    for stage in range(n_stages):
        actions: list[Action] = []
        for action in _alternate(n_stages, stage, n_micro_batches):
            batch = action.microbatch_index
            if batch is None or action == forward(stage, batch):
                actions.append(action)
                continue
            actions.append(input_gradient(stage, batch))
            if batch >= stage:
                actions.append(weight_gradient(stage, batch - stage))
        deferred = range(n_micro_batches - stage, n_micro_batches)
        table.append([*actions, *(weight_gradient(stage, batch) for batch in deferred)])
    return _schedule("zb1p", n_micro_batches, table)


def _alternate(n_stages: int, stage: int, n_micro_batches: int) -> list[Action]:
    """The actions of a rank in 1F1B."""
    ahead = min(n_stages - 1 - stage, n_micro_batches)  # forward passes before the first alternation
    actions = [forward(stage, batch) for batch in range(ahead)]
    for batch in range(n_micro_batches):
        if batch + ahead < n_micro_batches:
            actions.append(forward(stage, batch + ahead))
        actions.append(backward(stage, batch))
    return actions


def _schedule(name: str, n_micro_batches: int, table: list[list[Action]]) -> Schedule:
    placement = (tuple(range(len(table))),)
    return Schedule(name, n_micro_batches, placement, tuple(map(tuple, table)))
