"""A pipeline schedule: which rank computes what, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octile.parallel.schedules.actions import Action, ActionType, parts

WITH_WEIGHT_GRADIENTS = ActionType.FULL_BACKWARD, ActionType.BACKWARD_WEIGHT  # after which activations are freed


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in order, and where the stages are.

    A bidirectional schedule has two copies of every stage, one for each direction: the micro-batches of direction 0
    enter at rank 0, those of direction 1 at the last rank. The first half of the micro-batches has direction 0.

    Attributes:
        name: the schedule's name in `SCHEDULES`.
        n_micro_batches: micro-batches of a step, numbered from 0.
        placement: `placement[direction][stage]` is the rank that has this copy of the stage.
        actions: `actions[rank]` are the computations of a rank in order. An action's stage and micro-batch say which
            copy of the stage it is. Sends and receives follow from them: see `add_communication`.
    """

    name: str
    n_micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def n_stages(self) -> int:
        """Number of stages that a micro-batch passes."""
        return len(self.placement[0])

    def direction(self, micro_batch: int) -> int:
        """The direction of a micro-batch: 0, or 1 if it enters at the last rank."""
        return micro_batch * len(self.placement) // self.n_micro_batches

    def rank(self, stage: int, micro_batch: int) -> int:
        """The rank that computes this stage for this micro-batch."""
        return self.placement[self.direction(micro_batch)][stage]

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters a rank holds, in ascending order."""
        return tuple(stage for stage in range(self.n_stages) if any(ranks[stage] == rank for ranks in self.placement))

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once, in units of one stage's for one micro-batch.

        They are held from the beginning of the forward pass to the end of the full backward pass or weight gradient.
        """
        return held_activations(self)

    def for_torch(self) -> dict[int, list[Any]]:
        """The table, of torch's actions, that its `_PipelineScheduleRuntime._prepare_schedule_with_comms` takes.

        Raises:
            ValueError: the schedule is bidirectional. torch's executor has each stage on one rank.
        """
        if len(self.placement) > 1:
            raise ValueError(
                f"schedule {self.name} cannot run on torch's executor: it has each stage on one rank, and {self.name} "
                f"has each on two"
            )
        from torch.distributed.pipelining.schedules import _Action  # its import takes seconds

        return {rank: [_Action.from_str(repr(action)) for action in row] for rank, row in enumerate(self.actions)}


def check_sizes(name: str, n_stages: int, n_micro_batches: int, least_stages: int = 1, least_batches: int = 1) -> None:
    """Refuse sizes below what a schedule needs.

    Raises:
        ValueError: there are too few stages or micro-batches.
    """
    for what, number, least in (("stage", n_stages, least_stages), ("micro-batch", n_micro_batches, least_batches)):
        if number < least:
            plural = "" if least == 1 else "es" if what.endswith("h") else "s"
            raise ValueError(f"{name} needs at least {least} {what}{plural}, not {number}")


def held_activations(schedule: Schedule, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """The most activations that each rank holds at once: they follow from the order of its actions.

    Args:
        schedule: the schedule.
        sizes: sizes of the activations of each stage for a micro-batch; 1 each if not given.
    """
    return tuple(_most_held(actions, sizes or [1] * schedule.n_stages) for actions in schedule.actions)


def _most_held(actions: tuple[Action, ...], sizes: Sequence[int]) -> int:
    """The largest size of the activations that a rank holds during one of its actions."""
    held = most = 0
    for action in actions:
        for part in parts(action):
            if part.computation_type == ActionType.FORWARD:
                held += sizes[part.stage_index]
                most = max(most, held)
        for part in parts(action):
            if part.computation_type in WITH_WEIGHT_GRADIENTS:
                held -= sizes[part.stage_index]
    return most
