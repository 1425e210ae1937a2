"""The actions of a pipeline schedule: torch's, with functions that make them.

An action names a stage and a micro-batch. torch's letters are F (forward), I (input gradient), W (weight gradient),
B (full backward: input and weight gradient at once), OVERLAP_F_B (a forward and a full backward that overlap), SEND_F
and RECV_F (activations), SEND_B and RECV_B (gradients). `1I3` is the input gradient of stage 1 for micro-batch 3.

These names of torch begin with an underscore; only this file imports them. They are the same in torch 2.11 and 2.13.
"""

from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType as ActionType

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
