"""The simulation of schedules: dependencies, bubbles and activations."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.parallel.schedules import (
    SCHEDULES,
    ActionType,
    Costs,
    Schedule,
    StageCosts,
    held_activations,
    make_schedule,
    run_actions,
    simulate,
)
from octile.parallel.schedules.actions import backward, forward, parts
from tests.parallel.schedules.sizes import costs, schedules, sizes

FORWARD, WEIGHT = ActionType.FORWARD, ActionType.BACKWARD_WEIGHT


@given(schedules(), costs(max_communication=12))
def test_an_action_begins_after_its_inputs_have_arrived(schedule, costs):
    spans = [(rank, span) for rank, row in enumerate(simulate(schedule, costs).spans) for span in row]
    end = {
        (part.computation_type == FORWARD, part.stage_index, part.microbatch_index): (rank, span.end)
        for rank, span in spans
        for part in parts(span.action)
        if part.computation_type != WEIGHT
    }
    for rank, span in spans:
        for part in parts(span.action):
            stage, batch = part.stage_index, part.microbatch_index
            needed = {(True, stage - 1, batch)} if part.computation_type == FORWARD else {(True, stage, batch)}
            if part.computation_type == WEIGHT:
                needed = {(False, stage, batch)}
            elif part.computation_type != FORWARD:
                needed.add((False, stage + 1, batch))
            for source, when in (end[result] for result in needed if result in end):
                assert span.start >= when + (costs.communication if source != rank else 0)


@given(schedules(), costs())
def test_a_rank_runs_its_actions_one_after_the_other_for_their_times(schedule, costs):
    for row, actions in zip(simulate(schedule, costs).spans, schedule.actions, strict=True):
        assert tuple(span.action for span in row) == actions
        assert all(before.end <= after.start for before, after in pairwise(row))
        assert all(span.end - span.start == costs.of(span.action) for span in row)


@pytest.mark.one_case
@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
def test_the_bubble_is_that_of_the_formula(name, data):
    kind = SCHEDULES[name]
    stages, micro_batches = data.draw(sizes(name).filter(lambda size: name != "chimera" or size[0] == size[1]))
    given = data.draw(costs())
    if name.startswith("dualpipe"):  # its formula has a forward pass as long as an input gradient
        f, w = given.forward, min(given.forward, given.weight_gradient)
        given = Costs(f, f, w, data.draw(st.integers(f + w, f + f + w)))
    elif name == "zb1p":
        least = min(given.forward, given.input_gradient, given.weight_gradient)
        given = Costs(given.forward, given.input_gradient, least)
    assert kind.is_exact(stages, micro_batches, given)
    assert simulate(kind.make(stages, micro_batches), given).bubble == kind.bubble(stages, given)


@pytest.mark.one_case
@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
def test_the_activations_are_those_of_the_formula(name, data):
    size = data.draw(sizes(name))
    result = simulate(make_schedule(name, *size), data.draw(costs()))
    assert max(result.activations) == SCHEDULES[name].activations(*size)


@given(st.integers(1, 5).map(lambda half: 2 * half), st.integers(0, 20), costs())
def test_more_micro_batches_increase_neither_bubble_nor_activations_of_dualpipe(stages, more, costs):
    least, larger = (simulate(make_schedule("dualpipe", stages, 2 * (stages + n)), costs) for n in (0, more))
    assert larger.bubbles == least.bubbles
    assert larger.activations == least.activations


def test_more_micro_batches_increase_the_bubble_of_chimera():
    assert [simulate(make_schedule("chimera", 8, batches)).bubble for batches in (8, 16, 24)] == [12, 18, 24]


def test_every_rank_of_dualpipe_idles_as_long_and_holds_as_much():
    result = simulate(make_schedule("dualpipe", 8, 20))
    assert result.bubbles == (6,) * 8  # (8/2 − 1)(3 + 2 − 3)
    assert result.activations == (9,) * 8


def test_the_first_rank_of_1f1b_holds_the_most():
    assert simulate(make_schedule("1f1b", 4, 6)).activations == (4, 3, 2, 1)


def test_a_table_of_torchs_actions_is_simulated_like_one_of_octiles():
    ours = make_schedule("dualpipev", 2, 4)
    theirs = replace(ours, actions=tuple(ours.for_torch().values()))
    assert held_activations(theirs) == held_activations(ours)
    assert simulate(theirs).makespan == simulate(ours).makespan


def test_communication_delays_what_comes_from_another_rank():
    assert simulate(make_schedule("gpipe", 2, 1), Costs(communication=5)).makespan == 1 + 5 + 1 + 2 + 5 + 2


def test_a_deadlock_is_an_error_that_names_what_is_missing():
    crossed = ((backward(0, 0), forward(0, 0)), (forward(1, 0), backward(1, 0)))
    with pytest.raises(ValueError, match=r"deadlocks: rank . waits for the forward pass of stage 0 for micro-batch 0"):
        simulate(Schedule("crossed", 1, ((0, 1),), crossed))


@pytest.mark.parametrize("name", ["forward", "input_gradient", "weight_gradient", "pair"])
def test_a_time_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        Costs(**{name: 0})


def test_a_pair_takes_at_least_half_of_what_its_passes_take_one_after_the_other():
    Costs(forward=1, input_gradient=1.5, weight_gradient=0.5, pair=1.5)
    with pytest.raises(ValueError, match=r"^pair must be at least \(F \+ B\) / 2 = 1\.5, .*, not 1\.49$"):
        Costs(forward=1, input_gradient=1.5, weight_gradient=0.5, pair=1.49)


def test_communication_must_not_be_negative():
    with pytest.raises(ValueError, match="communication must be at least 0"):
        Costs(communication=-1)


@given(schedules(), costs(max_communication=12))
def test_stages_with_the_same_times_are_simulated_as_one_time_for_all(schedule, costs):
    n = schedule.n_stages
    pairs = {(f, b): costs.overlapped for f in range(n) for b in range(n)}
    of_stages = StageCosts((costs,) * n, pairs, costs.communication)
    assert simulate(schedule, of_stages).spans == simulate(schedule, costs).spans


def test_a_slow_stage_takes_its_own_time():
    slow = Costs(forward=3)
    result = simulate(make_schedule("1f1b", 2, 1), StageCosts((Costs(), slow), {}))
    assert [span.end for span in result.spans[1]] == [4.0, 6.0]


@given(schedules(), costs(max_communication=12))
def test_replicas_are_simulated_as_arrays_with_the_same_times(schedule, costs):
    rows = run_actions(
        schedule, lambda rank, action: np.full(2, float(costs.of(action))), costs.communication, np.zeros(2), np.maximum
    )
    for row, spans in zip(rows, simulate(schedule, costs).spans, strict=True):
        np.testing.assert_array_equal([span.end for span in row], [[span.end] * 2 for span in spans])
