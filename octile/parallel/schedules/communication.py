"""The sends and receives of a schedule."""

from octile.parallel.schedules.actions import GRADIENTS, Action, ActionType, parts, receive, send
from octile.parallel.schedules.schedule import Schedule
from octile.parallel.schedules.simulation import simulate

SENDS_IN_FLIGHT = 2  # of a stage in one direction; the one before has arrived, or is waited for


def add_communication(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Add to every rank's actions the sends and receives that follow from them.

    A forward pass sends its output to the rank of the next stage, an input gradient or full backward pass sends its
    result to the rank of the stage before; nothing is sent within a rank. The send stands right behind the action (of
    an overlapped pair, both do). The receive stands at the same moment of the simulation with unit times in the list of
    the other rank: behind the action that runs there then, ahead of the next.

    An executor goes through a rank's list: it starts a computation when the receives it needs have arrived, and posts a
    send or receive without waiting for it. Thus

    - a receive is posted as soon as its sender sends, and waits for nothing else of its own rank;
    - two ranks list what they exchange in the same order, in both directions together. No tag is needed, and NCCL,
      which runs the operations of a pair of ranks in the order in which they are posted, cannot deadlock;
    - all lists are parts of one order in time, so they complete even if every send and receive blocks until its
      partner reaches it.

    torch's executor derives them in the same way (`_add_send_recv`), but only where each stage is on one rank.

    Returns:
        The actions of each rank.
    """
    events = []  # (time, 0 for an end or 1 for a beginning, rank, action): at one time what ends comes first
    for rank, spans in enumerate(simulate(schedule).spans):
        for span in spans:
            events += [(span.start, 1, rank, span.action), (span.end, 0, rank, span.action)]
    table: list[list[Action]] = [[] for _ in schedule.actions]
    for _, begins, rank, action in sorted(events, key=lambda event: event[:3]):
        if begins:
            table[rank].append(action)
            continue
        for part in parts(action):
            receiver = _receiver(schedule, part)
            if receiver not in (None, rank):
                table[rank].append(send(part))
                table[receiver].append(receive(part))
    return tuple(map(tuple, table))


def _receiver(schedule: Schedule, part: Action) -> int | None:
    """The rank that needs the result of an action next; None if there is none."""
    if part.computation_type == ActionType.FORWARD:
        stage = part.stage_index + 1
    elif part.computation_type in GRADIENTS:
        stage = part.stage_index - 1
    else:
        return None
    return schedule.rank(stage, part.microbatch_index or 0) if 0 <= stage < schedule.n_stages else None
