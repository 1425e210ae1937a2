"""The model with the lowest held-out loss of a run, which becomes its `model/`.

Weights and amax histories are copied to CPU memory when a validation finds the lowest loss so far. A checkpoint
contains them, unless they are the checkpoint's own, so that a resumed run ends with the same `model/` and sample.

A run that begins with the weights of a folder knows their held-out loss, too. They are no candidate: the folder has
them already, while the best trained model would be lost. But patience counts from them, and a run that has not gone
below their loss says so.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from octile.nn.delayed_scaling import amax_histories
from octile.train.strategy.state_layout import BEST_PREFIX
from octile.validation import Range, check_fields, from_json


@dataclass(frozen=True)
class Best:
    """The validation with the lowest held-out loss.

    Attributes:
        step: after which it took place.
        val_loss: its held-out loss in nats per token.
        validations: the last validations in a row that were not below all held-out losses before, that of the initial
            weights included.
    """

    step: Annotated[int, Range(at_least=0)]
    val_loss: float
    validations: Annotated[int, Range(at_least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self, "state.best.")


@dataclass(frozen=True)
class Initial:
    """What state.json holds of the validation before the first step: its held-out loss in nats per token."""

    val_loss: float

    def __post_init__(self) -> None:
        check_fields(self, "state.initial.")


class BestModel:
    """Keeps a copy of a model's weights and amax histories at its lowest held-out loss.

    Args:
        model: the model that is trained.

    Attributes:
        best: the validation of the copy; None before the first finite held-out loss.
        initial_val_loss: the held-out loss before the first step in nats per token; None if it was not measured, or is
            not finite.
    """

    def __init__(self, model: nn.Module):
        self.best: Best | None = None
        self.initial_val_loss: float | None = None
        self._model = model
        self._copies: dict[str, Tensor] = {}

    @property
    def is_above_start(self) -> bool:
        """Whether no validation was below the held-out loss before the first step."""
        return (
            self.best is not None and self.initial_val_loss is not None and self.best.val_loss >= self.initial_val_loss
        )

    def begin(self, val_loss: float) -> None:
        """Take the held-out loss before the first step."""
        self.initial_val_loss = val_loss if math.isfinite(val_loss) else None

    def update(self, step: int, val_loss: float) -> None:
        """Copy the model's weights and amax histories if a held-out loss is lower than all after steps before."""
        count = 1 if self.best is None else self.best.validations + 1
        if math.isfinite(val_loss) and (self.best is None or val_loss < self.best.val_loss):
            self.best = Best(step, val_loss)
            if self.is_above_start:
                self.best = Best(step, val_loss, count)
            self._copy(self._own())
        elif self.best is not None:
            self.best = replace(self.best, validations=count)

    def has_run_out(self, patience: int) -> bool:
        """Whether `patience` validations in a row were no improvement; never for a patience of 0."""
        return self.best is not None and 0 < patience <= self.best.validations

    @torch.no_grad()
    def restore(self) -> None:
        """Overwrite the model's weights and amax histories with the copies, if there are any."""
        own = self._own()
        for name, tensor in self._copies.items():
            own[name].copy_(tensor)

    def state(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint of a step needs: tensors, and fields of state.json."""
        begun = {} if self.initial_val_loss is None else {"initial": asdict(Initial(self.initial_val_loss))}
        if self.best is None:
            return {}, begun
        own = self.best.step == step  # the checkpoint has these tensors already
        tensors = {} if own else {BEST_PREFIX + name: tensor for name, tensor in self._copies.items()}
        return tensors, {"best": asdict(self.best), **begun}

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any], step: int) -> None:
        """Restore what the checkpoint of a step has; the model is that of the checkpoint already.

        Raises:
            ValueError: a value is missing, of another type, or out of range; or the tensors are not those of the model.
        """
        if "initial" in state:
            self.initial_val_loss = from_json(Initial, state["initial"], "state.initial").val_loss
        if "best" not in state:  # of an earlier version, or before the first validation
            return
        self.best = from_json(Best, state["best"], "state.best")
        own = self._own()
        found = {name.removeprefix(BEST_PREFIX): t for name, t in tensors.items() if name.startswith(BEST_PREFIX)}
        if self.best.step == step:  # `state` left them out
            found = own
        elif found.keys() == self._model.state_dict().keys():  # an earlier version did not copy amax histories
            found = own | found
        if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in own.items()}:
            raise ValueError("the best model in the checkpoint has other tensors than the model")
        self._copy(found)

    def _own(self) -> dict[str, Tensor]:
        """The model's own tensors that are copied."""
        histories = {f"history.{name}": history.amax_OH for name, history in amax_histories(self._model).items()}
        return self._model.state_dict() | histories

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        for name, own in self._own().items():
            if name not in self._copies:  # pinned, so that a GPU copies at the speed of the bus
                self._copies[name] = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            self._copies[name].copy_(tensors[name])
