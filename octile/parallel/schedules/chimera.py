"""Chimera: two 1F1B pipelines in opposite directions on the same ranks."""

from octile.parallel.schedules.actions import Action, backward, forward
from octile.parallel.schedules.schedule import Schedule, check_sizes


def chimera(n_stages: int, n_micro_batches: int) -> Schedule:
    """Chimera, whose units of PP micro-batches, half from each end, follow one another (direct concatenation).

    If all actions took one slot, micro-batch m of a unit would pass stage s in slot s + 2m, and backward in slot
    2·PP − 1 − s + 2m, without a collision between the directions. The next unit begins 2·PP slots later. A rank runs
    its actions in the order of their slots.

    Source: Li and Hoefler 2021 (arXiv 2107.06925) §3.1 and §3.5.

    Raises:
        ValueError: the stages are odd, or do not divide the micro-batches.
    """
    check_sizes("chimera", n_stages, n_micro_batches, least_stages=2)
    if n_stages % 2:
        raise ValueError(f"chimera needs an even number of stages, not {n_stages}")
    if n_micro_batches % n_stages:
        raise ValueError(f"chimera needs micro-batches that {n_stages} stages divide, not {n_micro_batches}")
    placement = tuple(range(n_stages)), tuple(reversed(range(n_stages)))
    half = n_micro_batches // 2
    table: list[list[tuple[int, Action]]] = [[] for _ in range(n_stages)]
    for batch in range(n_micro_batches):
        direction, number = divmod(batch, half)
        unit, within = divmod(number, n_stages // 2)
        begin = 2 * n_stages * unit + 2 * within
        for stage, rank in enumerate(placement[direction]):
            table[rank].append((begin + stage, forward(stage, batch)))
            table[rank].append((begin + 2 * n_stages - 1 - stage, backward(stage, batch)))
    actions = tuple(tuple(action for _, action in sorted(slots, key=lambda slot: slot[0])) for slots in table)
    return Schedule("chimera", n_micro_batches, placement, actions)
