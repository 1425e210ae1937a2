"""Sends and receives: they match, come in time, and cannot deadlock."""

from collections import Counter

from hypothesis import given, settings
from torch.distributed.pipelining import schedules as torch_schedules

from octile.parallel.schedules import Action, ActionType, Schedule, add_communication, make_schedule
from octile.parallel.schedules.actions import parts
from tests.parallel.schedules.sizes import schedules

SENDS = {ActionType.SEND_F: 1, ActionType.SEND_B: -1}  # where the receiving stage is
RECEIVES = {ActionType.RECV_F: -1, ActionType.RECV_B: 1}  # where the sending stage is
Message = tuple[int, int, int, int, bool]  # from rank, to rank, from stage, micro-batch, is an activation


def message(schedule: Schedule, action: Action) -> Message | None:
    """What an action sends or receives; None if it computes."""
    kind, stage, batch = action.computation_type, action.stage_index, action.microbatch_index
    step = SENDS.get(kind) or -RECEIVES.get(kind, 0)
    if not step:
        return None
    source = stage if kind in SENDS else stage - step
    ranks = schedule.rank(source, batch), schedule.rank(source + step, batch)
    return *ranks, source, batch, step == 1


@given(schedules())
def test_the_computations_stay_in_their_order(schedule):
    table = add_communication(schedule)
    assert tuple(tuple(a for a in row if message(schedule, a) is None) for row in table) == schedule.actions


@given(schedules())
def test_what_a_stage_on_another_rank_needs_is_sent_and_received_once(schedule):
    needed = Counter()
    for stage in range(schedule.n_stages - 1):
        for batch in range(schedule.n_micro_batches):
            ranks = schedule.rank(stage, batch), schedule.rank(stage + 1, batch)
            if ranks[0] != ranks[1]:
                needed[(*ranks, stage, batch, True)] += 1
                needed[(*reversed(ranks), stage + 1, batch, False)] += 1
    sent, received = Counter(), Counter()
    for rank, row in enumerate(add_communication(schedule)):
        for action in row:
            if what := message(schedule, action):
                is_sent = action.computation_type in SENDS
                assert rank == what[0 if is_sent else 1]
                (sent if is_sent else received)[what] += 1
    assert sent == received == needed


@given(schedules())
def test_a_receive_stands_before_the_computation_that_needs_it(schedule):
    for row in add_communication(schedule):
        seen = set()
        for action in row:
            seen.add(action)
            for part in parts(action):
                stage, batch = part.stage_index, part.microbatch_index
                if part.computation_type == ActionType.FORWARD and stage > 0:
                    kind, other = ActionType.RECV_F, stage - 1
                elif part.computation_type in (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD):
                    kind, other = ActionType.RECV_B, stage + 1
                else:
                    continue
                if other < schedule.n_stages and schedule.rank(other, batch) != schedule.rank(stage, batch):
                    assert Action(stage, kind, batch) in seen


@given(schedules())
def test_two_ranks_list_what_they_exchange_in_the_same_order(schedule):
    exchanged: dict[frozenset[int], dict[int, list[Message]]] = {}
    for rank, row in enumerate(add_communication(schedule)):
        for what in (message(schedule, action) for action in row):
            if what:
                exchanged.setdefault(frozenset(what[:2]), {}).setdefault(rank, []).append(what)
    for first, second in (lists.values() for lists in exchanged.values()):
        assert first == second


@given(schedules())
def test_lists_complete_even_if_every_send_and_receive_blocks_until_its_partner_reaches_it(schedule):
    todo = [list(reversed(row)) for row in add_communication(schedule)]
    progress = True
    while progress:
        progress = False
        for row in todo:
            while row and (what := message(schedule, row[-1])) is None:
                row.pop()
                progress = True
            if row and all(todo[rank] and message(schedule, todo[rank][-1]) == what for rank in what[:2]):
                for rank in what[:2]:
                    todo[rank].pop()
                progress = True
    assert not any(todo)


@given(schedules().filter(lambda schedule: schedule.name in ("gpipe", "1f1b", "zb1p")))
@settings(max_examples=20)
def test_torch_simulates_the_lists_to_their_end(schedule):
    lists = {rank: list(row) for rank, row in enumerate(add_communication(schedule))}
    ran = torch_schedules._simulate_comms_compute(lists, schedule.placement[0].__getitem__, schedule.n_stages)
    assert {rank: [a for a in row if a] for rank, row in ran.items()} == lists


def test_torch_derives_the_same_sends_and_receives_for_dualpipev():
    schedule = make_schedule("dualpipev", 8, 10)
    theirs = torch_schedules._add_send_recv(schedule.for_torch(), schedule.placement[0].__getitem__, 8)
    for rank, row in enumerate(add_communication(schedule)):
        assert Counter(row) == Counter(theirs[rank])


def test_a_receive_is_posted_ahead_where_the_schedule_leaves_time():
    last = " ".join(map(str, add_communication(make_schedule("1f1b", 3, 2))[2]))
    assert last == "2RECV_F0 2F0 2RECV_F1 2B0 2SEND_B0 2F1 2B1 2SEND_B1"
