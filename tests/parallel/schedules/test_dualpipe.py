"""The orders of DualPipe and DualPipeV, compared with the published figure and with torch."""

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from octile.parallel.schedules import Action, ActionType, make_schedule, simulate

# Figure 5 of DeepSeek-V3 (arXiv 2412.19437): 8 ranks, 20 micro-batches. It leaves out the numbers of the micro-batches
# of the reverse direction, here ".". A pair is F|B; I is an input gradient, W a weight gradient, B both.
FIGURE = {
    0: "F0 F1 F2 F3 F4 F5 F6 F. I. W. F. I. W. F. I. W. F. 7|. .|0 8|. .|1 9|. .|2 B. .|3 B. .|4 B. .|5 "
    "B. I6 W6 I7 W7 I8 W8 I9 W9",
    1: "F0 F1 F2 F3 F4 F. F5 F. I. W. F. I. W. F. 6|. .|0 7|. .|1 8|. .|2 9|. .|3 B. .|4 B. .|5 "
    "B. B6 I. I7 W. I8 W7 I9 W8 W9",
    2: "F0 F1 F2 F. F3 F. F4 F. I. W. F. 5|. .|0 6|. .|1 7|. .|2 8|. .|3 9|. .|4 B. .|5 "
    "B. B6 B. I7 I. I8 W7 I9 W. W8 W9",
    3: "F0 F. F1 F. F2 F. F3 F. F4 B. .|0 5|. .|1 6|. .|2 7|. .|3 8|. .|4 9|. .|5 B. B6 B. B7 I. I8 I. I9 W. W8 W. W9",
}


def as_in_figure(action: Action) -> str:
    if action.sub_actions:
        return "|".join(as_in_figure(part)[1:] for part in action.sub_actions)
    number = action.microbatch_index or 0
    return f"{action.computation_type.value}{number if number < 10 else '.'}"


@pytest.mark.parametrize("rank", FIGURE)
def test_the_order_is_that_of_the_published_figure(rank):
    actions = make_schedule("dualpipe", 8, 20).actions[rank]
    assert " ".join(map(as_in_figure, actions)) == FIGURE[rank]


def test_the_figure_ends_after_66_slots():
    assert simulate(make_schedule("dualpipe", 8, 20)).makespan == 66


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 10), (8, 20)])
def test_the_reverse_direction_mirrors_the_other(stages, micro_batches):
    schedule = make_schedule("dualpipe", stages, micro_batches)

    def mirrored(action: Action) -> Action:
        if action.sub_actions:
            return action._replace(sub_actions=tuple(map(mirrored, action.sub_actions)))
        return action._replace(microbatch_index=(action.microbatch_index + micro_batches // 2) % micro_batches)

    assert tuple(tuple(map(mirrored, row)) for row in reversed(schedule.actions)) == schedule.actions


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 7), (8, 10), (12, 12), (16, 35)])
def test_dualpipev_is_that_of_torch(stages, micro_batches):
    theirs = ScheduleDualPipeV.__new__(ScheduleDualPipeV)  # without its process group
    theirs.pp_group_size, theirs._n_microbatches = stages // 2, micro_batches
    ours = make_schedule("dualpipev", stages, micro_batches)
    for rank, actions in ours.for_torch().items():
        assert actions == theirs._calculate_single_rank_operations(rank)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (8, 20)])
def test_dualpipev_is_dualpipe_cut_in_half(stages, micro_batches):
    whole = make_schedule("dualpipe", stages, micro_batches).actions
    half = make_schedule("dualpipev", stages, micro_batches // 2).actions

    def kinds(row: tuple[Action, ...]) -> list[tuple[ActionType, int]]:
        return [(action.computation_type, action.stage_index) for action in row]

    assert [kinds(row) for row in whole[: stages // 2]] == [kinds(row) for row in half]
