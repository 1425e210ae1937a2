"""The state of a trainer, on which later steps depend: what a checkpoint holds of it, and how it is restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn

from octile import __version__
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.delayed_scaling import amax_histories
from octile.optim import EMA, AdamW, DynamicLossScale
from octile.train.run.source_digest import source_digest
from octile.train.step.progress import Progress
from octile.train.step.skips import Skips
from octile.train.strategy.single import Strategy
from octile.validation import Range, check_fields, from_json

OCTILE = f"{__version__} (source {source_digest()})"  # as it was imported: the files may change during a run
Number = Annotated[int, Range(at_least=0, at_most=2**53)]  # exact as a float, too


class Stateful(Protocol):
    """What has a state: a trainer."""

    strategy: Strategy
    model: DeepseekV3
    optimizer: AdamW
    loss_scale: DynamicLossScale | None
    ema: EMA | None
    progress: Progress
    skips: Skips
    data: str
    data_folder: Path


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


def computed_on(device: torch.device) -> dict[str, Any]:
    """What decides the bits of a run besides its configuration: the device, octile, torch, and on a CPU the threads.

    Sums on a CPU are split among its threads, so another number adds in another order.
    """
    threads = {"threads": torch.get_num_threads()} if device.type == "cpu" else {}
    return {"device": device.type, "octile": OCTILE, "torch": torch.__version__, **threads}


def state_of(trainer: Stateful) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a trainer's state, of which a rank has its rows, and the values for state.json."""
    progress, skips, strategy = trainer.progress, trainer.skips, trainer.strategy
    tensors = {f"model.{name}": t for name, t in trainer.model.state_dict().items()}
    for index, moments in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{strategy.layout.number(index)}.{name}": t for name, t in moments.items()}
    tensors |= {f"history.{name}": m.amax_OH for name, m in amax_histories(trainer.model).items()}
    if trainer.ema:
        tensors |= {f"ema.{name}": t for name, t in trainer.ema.state_dict().items()}
    state = {  # the fields of `TrainerState`
        "steps_done": progress.steps_done,
        "tokens": progress.tokens,
        "data": trainer.data,
        "seconds": progress.seconds,
        "loss_scale": trainer.loss_scale.state_dict() if trainer.loss_scale else None,
        "skipped": skips.total,
        "skipped_in_a_row": skips.in_a_row,
        "keeps_activations": strategy.saves_activations,
    }
    return tensors, state


def restore_state(trainer: Stateful, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore the result of `state_of`, or of `StateLayout.own_rows`.

    What a run adds to it, such as its best model, is not read.

    Raises:
        ValueError: it belongs to a model of another shape, was trained on other tokens, or a value of `state` is
            missing, of another type, or out of range.
    """
    progress, skips, strategy = trainer.progress, trainer.skips, trainer.strategy
    found = TrainerState.read(state)
    if trainer.loss_scale and found.loss_scale is None:
        raise ValueError(f"state.loss_scale is missing, which the recipe {strategy.recipe.name} needs")
    if found.data not in (None, trainer.data):
        raise ValueError(f"the tokens in {trainer.data_folder} are not those that the checkpoint was trained on")
    if found.keeps_activations is not None:
        strategy.save_activations(found.keeps_activations)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "history": {}, "ema": {}, "best": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    _load_exactly(trainer.model, parts["model"])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimizer"].items():
        index, _, key = name.partition(".")
        moments.setdefault(strategy.layout.own_number(int(index)), {})[key] = tensor
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    for name, history in amax_histories(trainer.model).items():
        history.amax_OH.copy_(parts["history"][name])
    if trainer.ema:
        trainer.ema.load_state_dict(parts["ema"])
    if trainer.loss_scale and found.loss_scale:
        trainer.loss_scale.load_state_dict(asdict(found.loss_scale))
    progress.steps_done, progress.tokens, progress.seconds = found.steps_done, found.tokens, found.seconds
    skips.total, skips.in_a_row = found.skipped, found.skipped_in_a_row
    skips.reset_device()


def _load_exactly(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = model.state_dict()
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ValueError(f"the checkpoint {'lacks' if name in own else 'has in excess'} the tensor {name}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)} in the checkpoint but {tuple(own[name].shape)} here")
    model.load_state_dict(tensors)
