"""The actions of a pipeline schedule, and functions that make them.

An action names a stage and a micro-batch: `1I3` is the input gradient of stage 1 for micro-batch 3. Names and letters
are those of `torch.distributed.pipelining`, whose own begin with an underscore and take seconds to import; the actions
equal torch's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "GRADIENTS",
    "Action",
    "ActionType",
    "backward",
    "describe",
    "forward",
    "input_gradient",
    "overlapped",
    "parts",
    "receive",
    "send",
    "weight_gradient",
]


class ActionType(StrEnum):
    """What an action computes or moves."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"  # gradient of the input
    BACKWARD_WEIGHT = "W"  # gradients of the weights
    FULL_BACKWARD = "B"  # both at once
    OVERLAP_F_B = "OVERLAP_F_B"  # a forward and a full backward pass at the same time
    SEND_F = "SEND_F"  # activations
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # gradients
    RECV_B = "RECV_B"


class Action(NamedTuple):
    """What a rank does at one place of its schedule.

    Attributes:
        stage_index: the stage; -1 for an overlapped pair.
        computation_type: what is done.
        microbatch_index: the micro-batch; None for an overlapped pair.
        sub_actions: the forward and the backward pass of an overlapped pair.
    """

    stage_index: int
    computation_type: ActionType
    microbatch_index: int | None = None
    sub_actions: tuple[Action, ...] | None = None

    def __repr__(self) -> str:
        if self.sub_actions:
            return f"({';'.join(map(repr, self.sub_actions))}){self.computation_type.value}"
        return f"{self.stage_index}{self.computation_type.value}{self.microbatch_index}"


GRADIENTS = (ActionType.FULL_BACKWARD, ActionType.BACKWARD_INPUT)  # actions whose result goes to the stage before
_NAMES = {
    ActionType.FORWARD: "forward pass",
    ActionType.FULL_BACKWARD: "backward pass",
    ActionType.BACKWARD_INPUT: "input gradient",
    ActionType.BACKWARD_WEIGHT: "weight gradient",
    ActionType.SEND_F: "send of the outputs",
    ActionType.RECV_F: "receive of the inputs",
    ActionType.SEND_B: "send of the input gradients",
    ActionType.RECV_B: "receive of the output gradients",
}


def forward(stage: int, micro_batch: int) -> Action:
    """Forward pass of a stage."""
    return Action(stage, ActionType.FORWARD, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """Full backward pass of a stage: the gradients of its input and of its weights."""
    return Action(stage, ActionType.FULL_BACKWARD, micro_batch)


def input_gradient(stage: int, micro_batch: int) -> Action:
    """Backward pass of a stage without the gradients of its weights, which `weight_gradient` computes later."""
    return Action(stage, ActionType.BACKWARD_INPUT, micro_batch)


def weight_gradient(stage: int, micro_batch: int) -> Action:
    """Gradients of a stage's weights, after its `input_gradient`."""
    return Action(stage, ActionType.BACKWARD_WEIGHT, micro_batch)


def overlapped(forward: Action, backward: Action) -> Action:
    """A forward pass and a full backward pass of another micro-batch that run at the same time on one rank."""
    return Action(-1, ActionType.OVERLAP_F_B, None, (forward, backward))


def parts(action: Action) -> tuple[Action, ...]:
    """The forward and the backward pass of an overlapped pair; any other action alone."""
    return action.sub_actions or (action,)


def send(action: Action) -> Action:
    """The action that sends the result of a forward pass, or of an input gradient or full backward pass."""
    is_forward = action.computation_type == ActionType.FORWARD
    return action._replace(computation_type=ActionType.SEND_F if is_forward else ActionType.SEND_B)


def receive(action: Action) -> Action:
    """The action by which the next stage (forward) or the stage before (backward) receives the result of `action`."""
    is_forward = action.computation_type == ActionType.FORWARD
    kind = ActionType.RECV_F if is_forward else ActionType.RECV_B
    return action._replace(stage_index=action.stage_index + (1 if is_forward else -1), computation_type=kind)


def describe(action: Action) -> str:
    """Name an action in words: "forward pass of stage 1 for micro-batch 3"; both of an overlapped pair."""
    names = [(_NAMES[part.computation_type], part.stage_index, part.microbatch_index) for part in parts(action)]
    return " and ".join(f"{name} of stage {stage} for micro-batch {number}" for name, stage, number in names)
