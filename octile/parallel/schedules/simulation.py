"""Discrete-event simulation of a schedule: when every action begins and ends, the bubble, the activations held.

An action begins when its rank has finished the action before it and its inputs are there. A forward pass needs the
forward pass of the stage before; an input gradient or full backward pass needs that of the stage behind and its own
forward pass; a weight gradient needs its input gradient. What comes from another rank arrives a communication time
after it was computed; sending and receiving take no time of a rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from octile.parallel.schedules.actions import GRADIENTS, Action, ActionType, parts
from octile.parallel.schedules.schedule import Schedule
from octile.validation import Range, check_fields

MAX_TIME = 1e100  # so that sums of times are finite
Time = Annotated[float, Range(above=0, at_most=MAX_TIME)]


@dataclass(frozen=True)
class Costs:
    """The times of a stage's actions for one micro-batch, all in one unit.

    Attributes:
        forward: F.
        input_gradient: the backward pass without the gradients of weights, B − W.
        weight_gradient: W.
        pair: F&B, an overlapped forward and full backward pass, at least (F + B) / 2; F + B if not given, which is no
            gain.
        communication: from the end of an action until another rank has its result.

    Raises:
        ValueError: a time is not positive, the communication is negative, or one is above 1e100; or a pair is shorter
            than two passes at a time can be.
    """

    forward: Time = 1
    input_gradient: Time = 1
    weight_gradient: Time = 1
    pair: Time | None = None
    communication: Annotated[float, Range(at_least=0, at_most=MAX_TIME)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        # F or B alone is a bound only if neither contains exchanges, which a pair hides behind both computations
        if self.pair is not None and self.pair < (least := (self.forward + self.backward) / 2):
            raise ValueError(
                f"pair must be at least (F + B) / 2 = {least:g}, half of what both passes take one after the other, "
                f"not {self.pair:g}"
            )

    @property
    def backward(self) -> float:
        """B, a full backward pass: input and weight gradient."""
        return self.input_gradient + self.weight_gradient

    @property
    def overlapped(self) -> float:
        """F&B, an overlapped pair."""
        return self.forward + self.backward if self.pair is None else self.pair

    def of(self, action: Action) -> float:
        """The time of an action."""
        return self._times[action.computation_type]

    @cached_property
    def _times(self) -> dict[ActionType, float]:
        return {
            ActionType.FORWARD: self.forward,
            ActionType.BACKWARD_INPUT: self.input_gradient,
            ActionType.BACKWARD_WEIGHT: self.weight_gradient,
            ActionType.FULL_BACKWARD: self.backward,
            ActionType.OVERLAP_F_B: self.overlapped,
        }


@dataclass(frozen=True)
class StageCosts:
    """The times of actions that differ between stages.

    Attributes:
        stages: those of each stage; their pairs and communication are not read.
        pairs: (stage of the forward pass, stage of the backward pass) → an overlapped pair of both.
        communication: from the end of an action until another rank has its result.
    """

    stages: tuple[Costs, ...]
    pairs: Mapping[tuple[int, int], float]
    communication: float = 0

    def of(self, action: Action) -> float:
        """The time of an action."""
        if action.sub_actions is None:
            return self.stages[action.stage_index].of(action)
        forward, backward = action.sub_actions
        return self.pairs[forward.stage_index, backward.stage_index]


class Span(NamedTuple):
    """An action with the times at which it begins and ends; arrays if many replicas are simulated."""

    action: Action
    start: Any
    end: Any


@dataclass(frozen=True)
class Simulation:
    """When a schedule's actions run.

    Attributes:
        schedule: the schedule.
        costs: the times of its actions.
        spans: `spans[rank]` are the rank's actions in order.
    """

    schedule: Schedule
    costs: Costs | StageCosts
    spans: tuple[tuple[Span, ...], ...] = field(repr=False)

    @cached_property
    def makespan(self) -> float:
        """The time from the first action to the end of the last, on all ranks."""
        return max(spans[-1].end for spans in self.spans)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The time in which each rank idles, from the first action of any rank to the last."""
        return tuple(self.makespan - sum(self.costs.of(span.action) for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The idle time of the rank that idles longest."""
        return max(self.bubbles)

    @property
    def activations(self) -> tuple[int, ...]:
        """`Schedule.activations`."""
        return self.schedule.activations


def simulate(schedule: Schedule, costs: Costs | StageCosts | None = None) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: the schedule.
        costs: the times of its actions; every forward pass, input gradient and weight gradient takes 1 if not given.

    Raises:
        ValueError: the schedule deadlocks.
    """
    costs = costs or Costs()
    spans = run_actions(schedule, lambda rank, action: costs.of(action), costs.communication, 0.0, max)
    return Simulation(schedule, costs, tuple(map(tuple, spans)))


def run_actions(
    schedule: Schedule,
    duration: Callable[[int, Action], Any],
    communication: Any,
    beginning: Any,
    later: Callable[[Any, Any], Any],
) -> list[list[Span]]:
    """Run the actions of a schedule, by numbers or by arrays of them with an element for each of many replicas.

    Args:
        schedule: the schedule.
        duration: (rank, action) → how long it takes.
        communication: from the end of an action until another rank has its result.
        beginning: the time at which every rank begins.
        later: the later of two times, for arrays in each element.

    Returns:
        For each rank its actions in order, with their times.

    Raises:
        ValueError: the schedule deadlocks.
    """
    finished: dict[tuple[bool, int, int], tuple[Any, int]] = {}  # result → when, and on which rank
    waiting: dict[tuple[bool, int, int], list[int]] = {}  # result → ranks whose next action needs it
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    runnable = list(range(schedule.n_ranks))
    while runnable:
        rank = runnable.pop()
        while len(spans[rank]) < len(schedule.actions[rank]):
            action = schedule.actions[rank][len(spans[rank])]
            inputs = [needed for part in parts(action) for needed in _inputs(part, schedule.n_stages)]
            missing = next((needed for needed in inputs if needed not in finished), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else beginning
            for when, source in (finished[needed] for needed in inputs):
                start = later(start, when + communication if source != rank else when)
            end = start + duration(rank, action)
            spans[rank].append(Span(action, start, end))
            for part in parts(action):
                if part.computation_type != ActionType.BACKWARD_WEIGHT:
                    finished[_result(part)] = end, rank
                    runnable += waiting.pop(_result(part), [])
    if waiting:
        (is_forward, stage, batch), ranks = next(iter(waiting.items()))
        raise ValueError(
            f"schedule {schedule.name} deadlocks: rank {ranks[0]} waits for the "
            f"{'forward' if is_forward else 'backward'} pass of stage {stage} for micro-batch {batch}, which never runs"
        )
    return spans


def _result(part: Action) -> tuple[bool, int, int]:
    """What an action computes: (is it an activation, stage, micro-batch); otherwise it is an input gradient."""
    return part.computation_type == ActionType.FORWARD, part.stage_index, part.microbatch_index or 0


def _inputs(part: Action, n_stages: int) -> Iterator[tuple[bool, int, int]]:
    """The results that an action needs, of the same form."""
    is_forward, stage, batch = _result(part)
    if is_forward and stage > 0:
        yield True, stage - 1, batch
    elif part.computation_type == ActionType.BACKWARD_WEIGHT:
        yield False, stage, batch
    elif part.computation_type in GRADIENTS:
        yield True, stage, batch
        if stage < n_stages - 1:
            yield False, stage + 1, batch
