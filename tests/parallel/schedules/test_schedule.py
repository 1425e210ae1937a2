"""Properties that every schedule has: what runs, where, and in which order."""

from collections import Counter

import pytest
from hypothesis import given
from torch.distributed.pipelining import schedules as torch_schedules

from octile.parallel.schedules import SCHEDULES, Action, ActionType, Schedule, add_communication, make_schedule
from octile.parallel.schedules.actions import backward, describe, forward, parts
from tests.parallel.schedules.sizes import schedules


def computed(schedule: Schedule) -> list[tuple[int, Action]]:
    """(rank, action) of all computations, with overlapped pairs taken apart."""
    return [(rank, part) for rank, row in enumerate(schedule.actions) for action in row for part in parts(action)]


def every_stage_and_batch(schedule: Schedule) -> Counter[tuple[int, int]]:
    return Counter((s, m) for s in range(schedule.n_stages) for m in range(schedule.n_micro_batches))


def counted(schedule: Schedule, *kinds: ActionType) -> Counter[tuple[int, int | None]]:
    parts = (part for _, part in computed(schedule))
    return Counter((part.stage_index, part.microbatch_index) for part in parts if part.computation_type in kinds)


@given(schedules())
def test_every_micro_batch_passes_every_stage_forward_once(schedule):
    assert counted(schedule, ActionType.FORWARD) == every_stage_and_batch(schedule)


@given(schedules())
def test_every_input_gradient_is_computed_once(schedule):
    kinds = ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD
    assert counted(schedule, *kinds) == every_stage_and_batch(schedule)


@given(schedules())
def test_every_weight_gradient_is_computed_once(schedule):
    kinds = ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD
    assert counted(schedule, *kinds) == every_stage_and_batch(schedule)


@given(schedules())
def test_a_weight_gradient_follows_its_input_gradient(schedule):
    seen = set()
    for rank, part in computed(schedule):
        seen.add((rank, part))
        if part.computation_type == ActionType.BACKWARD_WEIGHT:
            assert (rank, part._replace(computation_type=ActionType.BACKWARD_INPUT)) in seen


@given(schedules())
def test_an_action_stands_on_the_rank_that_has_its_stage(schedule):
    for rank, part in computed(schedule):
        assert rank == schedule.rank(part.stage_index, part.microbatch_index)
        assert part.stage_index in schedule.stages(rank)


@given(schedules())
def test_a_pair_overlaps_a_forward_and_a_full_backward_pass_of_different_micro_batches_and_stages(schedule):
    for action in (action for row in schedule.actions for action in row if action.sub_actions):
        first, second = action.sub_actions
        assert (first.computation_type, second.computation_type) == (ActionType.FORWARD, ActionType.FULL_BACKWARD)
        assert first.microbatch_index != second.microbatch_index or len(schedule.placement) == 1
        assert (first.stage_index, first.microbatch_index) != (second.stage_index, second.microbatch_index)


@given(schedules())
def test_every_rank_holds_as_many_stages_as_its_kind_says(schedule):
    assert {len(schedule.stages(rank)) for rank in range(schedule.n_ranks)} == {SCHEDULES[schedule.name].copies}


@pytest.mark.slow
@given(schedules().filter(lambda schedule: len(schedule.placement) == 1))
def test_the_executor_of_torch_takes_the_table_of_one_direction(schedule):
    executor = torch_schedules._PipelineScheduleRuntime.__new__(torch_schedules._PipelineScheduleRuntime)
    executor._stages, executor._num_stages, executor._n_microbatches = [], schedule.n_stages, schedule.n_micro_batches
    executor.pp_group_size, executor._defer_pp_recv = schedule.n_ranks, False
    executor._prepare_schedule_with_comms(schedule.for_torch())
    assert executor.stage_index_to_group_rank == dict(enumerate(schedule.placement[0]))
    for rank, actions in executor.pipeline_order_with_comms.items():
        assert tuple(action for action in actions if action.is_compute_op) == schedule.actions[rank]


@pytest.mark.parametrize("kind", ActionType)
def test_an_action_equals_torchs(kind):
    sub_actions = (forward(1, 2), backward(0, 1)) if kind == ActionType.OVERLAP_F_B else None
    ours = Action(-1, kind, None, sub_actions) if sub_actions else Action(1, kind, 2)
    theirs = torch_schedules._Action.from_str(repr(ours))
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_a_bidirectional_schedule_is_refused_for_torch(name):
    with pytest.raises(ValueError, match=r"has each stage on one rank, and .* has each on two"):
        make_schedule(name, 2, 4).for_torch()


def test_torch_still_has_each_stage_on_one_rank():
    schedule = make_schedule("dualpipe", 2, 4)
    rows = [[torch_schedules._Action.from_str(repr(action)) for action in row] for row in schedule.actions]
    with pytest.raises(AssertionError, match="is assigned to both rank 1 and rank 0"):
        torch_schedules._validate_schedule(dict(enumerate(rows)), 2, 2, 4)


def test_actions_have_names_in_words():
    (first, *_), (*_, last) = (actions for actions in add_communication(make_schedule("zb1p", 2, 2)))
    pair = next(a for row in make_schedule("dualpipe", 2, 4).actions for a in row if len(parts(a)) == 2)
    assert [describe(action) for action in (first, last, pair)] == [
        "forward pass of stage 0 for micro-batch 0",
        "weight gradient of stage 1 for micro-batch 1",
        "forward pass of stage 1 for micro-batch 3 and backward pass of stage 0 for micro-batch 0",
    ]


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "message"),
    [
        ("gpipe", 0, 4, "gpipe needs at least 1 stage, not 0"),
        ("1f1b", 4, 0, "1f1b needs at least 1 micro-batch, not 0"),
        ("zb1p", 4, 3, "zb1p needs at least 4 micro-batches, not 3"),
        ("dualpipe", 7, 20, "dualpipe needs an even number of stages, not 7"),
        ("dualpipe", 0, 20, "dualpipe needs at least 2 stages, not 0"),
        ("dualpipe", 8, 14, "dualpipe needs at least 16 micro-batches, not 14"),
        ("dualpipe", 8, 19, "dualpipe needs an even number of micro-batches, not 19"),
        ("dualpipev", 5, 20, "dualpipev needs an even number of stages, not 5"),
        ("dualpipev", 8, 7, "dualpipev needs at least 8 micro-batches, not 7"),
        ("chimera", 3, 6, "chimera needs an even number of stages, not 3"),
        ("chimera", 8, 20, "chimera needs micro-batches that 8 stages divide, not 20"),
        ("chimera", 8, 0, "chimera needs at least 1 micro-batch, not 0"),
        ("zero", 8, 20, "unknown schedule 'zero'; there are gpipe, 1f1b, zb1p, dualpipe, dualpipev, chimera"),
    ],
)
def test_other_sizes_are_refused(name, stages, micro_batches, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_schedule(name, stages, micro_batches)
