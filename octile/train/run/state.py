"""What a checkpoint's state.json holds of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from octile.validation import Range, check_fields, from_json

Number = Annotated[int, Range(at_least=0, at_most=2**53)]  # exact as a float, too


@dataclass(frozen=True)
class LossScaleState:
    """What state.json holds of a dynamic loss scale."""

    value: Annotated[float, Range(above=0)]
    good_steps: Number


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint's state.json holds. Fields with defaults are absent in checkpoints of earlier versions."""

    steps_done: Number
    tokens: Number
    seconds: Annotated[float, Range(at_least=0)]
    data: str | None = None
    loss_scale: LossScaleState | None = None
    skipped: Number = 0
    skipped_in_a_row: Number = 0
    keeps_activations: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, "state.")

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> TrainerState:
        """Read the content of a state.json, without what a run adds to it.

        Raises:
            ValueError: a value is missing, of another type, or out of range.
        """
        return from_json(cls, {name: value for name, value in state.items() if name not in OTHER_STATE}, "state")


# What training and comparisons add to the state in a checkpoint, and check themselves.
OTHER_STATE = frozenset(("config", "computed_on", "measured", "best"))
