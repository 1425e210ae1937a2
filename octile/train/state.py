"""The state of a trainer, on which later steps depend: what a checkpoint holds of it, and how it is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from octile.nn.delayed_scaling import amax_histories
from octile.optim import EMA, AdamW, DynamicLossScale
from octile.train.data.token_store import TokenStore
from octile.train.step.progress import Progress
from octile.train.step.skips import Skips
from octile.train.strategy.single import Strategy
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
OTHER_STATE = frozenset(("config", "computed_on", "measured", "best", "initial"))


class TrainingState:
    """The parts of a trainer on which later steps depend.

    Args:
        strategy: the strategy, with this rank's model.
        optimizer: the optimizer of the parameters that this rank updates.
        ema: the moving average of these parameters; None if there is none.
        loss_scale: the scale of the loss; None for recipes without one.
        progress: the run's progress.
        skips: the steps that were skipped.
        store: the tokens of the run.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: AdamW,
        ema: EMA | None,
        loss_scale: DynamicLossScale | None,
        progress: Progress,
        skips: Skips,
        store: TokenStore,
    ):
        self._strategy, self._optimizer, self._ema, self._loss_scale = strategy, optimizer, ema, loss_scale
        self._progress, self._skips = progress, skips
        self._data, self._data_folder = store.digest, store.folder

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors, of which a rank has its rows, and the values for state.json."""
        model, layout = self._strategy.model, self._strategy.layout
        tensors = state_tensors(model, self._optimizer, layout.number)
        tensors |= {f"history.{name}": m.amax_OH for name, m in amax_histories(model).items()}
        if self._ema:
            tensors |= {f"ema.{name}": t for name, t in self._ema.state_dict().items()}
        state = {  # the fields of `TrainerState`
            "steps_done": self._progress.steps_done,
            "tokens": self._progress.tokens,
            "data": self._data,
            "seconds": self._progress.seconds,
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale else None,
            "skipped": self._skips.total,
            "skipped_in_a_row": self._skips.in_a_row,
            "keeps_activations": self._strategy.saves_activations,
        }
        return tensors, state

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the result of `save`, or of `StateLayout.own_rows`.

        What a run adds to it, such as its best model, is not read.

        Raises:
            ValueError: it belongs to a model of another shape, was trained on other tokens, or a value of `state` is
                missing, of another type, or out of range.
        """
        strategy, progress, skips = self._strategy, self._progress, self._skips
        found = TrainerState.read(state)
        if self._loss_scale and found.loss_scale is None:
            raise ValueError(f"state.loss_scale is missing, which the recipe {strategy.recipe.name} needs")
        if found.data not in (None, self._data):
            raise ValueError(f"the tokens in {self._data_folder} are not those that the checkpoint was trained on")
        if found.keeps_activations is not None:
            strategy.save_activations(found.keeps_activations)
        parts = parts_of(tensors, "model", "optimizer", "history", "ema", "best")
        _load_exactly(strategy.model, parts["model"])
        load_moments(self._optimizer, parts["optimizer"], strategy.layout.own_number)
        for name, history in amax_histories(strategy.model).items():
            history.amax_OH.copy_(parts["history"][name])
        if self._ema:
            self._ema.load_state_dict(parts["ema"])
        if self._loss_scale and found.loss_scale:
            self._loss_scale.load_state_dict(asdict(found.loss_scale))
        progress.steps_done, progress.tokens, progress.seconds = found.steps_done, found.tokens, found.seconds
        skips.total, skips.in_a_row = found.skipped, found.skipped_in_a_row
        skips.reset_device()


def state_tensors(model: nn.Module, optimizer: AdamW, number: Callable[[int], int] = int) -> dict[str, Tensor]:
    """Return a model's tensors as "model.NAME" and the state of its optimizer as "optimizer.NUMBER.NAME".

    Args:
        model, optimizer: both.
        number: returns what a checkpoint calls a parameter of the optimizer, which has its own number for it.
    """
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number(index)}.{name}": t for name, t in moments.items()}
    return tensors


def parts_of(tensors: Mapping[str, Tensor], *parts: str) -> dict[str, dict[str, Tensor]]:
    """Divide the tensors of a checkpoint, "PART.NAME", into parts: part → NAME → tensor.

    Raises:
        ValueError: one belongs to another part.
    """
    found: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part not in found:
            raise ValueError(f"a tensor of the checkpoint must belong to one of {', '.join(parts)}, not be {name}")
        found[part][rest] = tensor
    return found


def load_moments(optimizer: AdamW, tensors: Mapping[str, Tensor], own_number: Callable[[int], int] = int) -> None:
    """Restore the state of an optimizer from the tensors "NUMBER.NAME" of a checkpoint.

    Args:
        optimizer: the optimizer.
        tensors: its state.
        own_number: returns the optimizer's number of a parameter, which the checkpoint may call otherwise.

    Raises:
        ValueError: they do not fit the optimizer.
    """
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        moments.setdefault(own_number(int(index)), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


def _load_exactly(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = model.state_dict()
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ValueError(f"the checkpoint {'lacks' if name in own else 'has in excess'} the tensor {name}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)} in the checkpoint but {tuple(own[name].shape)} here")
    model.load_state_dict(tensors)
