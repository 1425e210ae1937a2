"""The stages of a DeepSeek-V3 or V2 model for pipeline parallelism.

    first     tokens → embedding → its layers
    others    the activations of the stage before → its layers
    last      the same, then the norm; its loss reads the head and multi-token prediction

A stage also adds the balance losses of its experts to those of the stages before, in the order of the layers. So the
loss of the last stage has the bits of the whole model's, and its gradient reaches every stage.

A stage's parameters are those of the model, under the same names. Multi-token prediction reads the embedding, so the
last stage has it, too.  Shapes: B batch, S sequence, D model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from octile.models.deepseek_v3 import DeepseekV3, Trunk
from octile.nn.linear import with_class
from octile.nn.rope import CosSin

M = TypeVar("M", bound=DeepseekV3)

EMBEDDING = "model.embed_tokens.weight"


class ModelStage(DeepseekV3):
    """Consecutive layers of a model, which `split_stages` makes.

    Attributes:
        layers: the numbers of its layers, without multi-token prediction.
        is_first, is_last: whether it has the embedding, and whether it has the norm and the head.
    """

    layers: range
    is_first: bool
    is_last: bool

    @property
    def tied(self) -> tuple[str, ...]:
        """The names of the parameters that the first and the last stage share."""
        return (EMBEDDING,) if self.config.num_nextn_predict_layers else ()

    def forward(self, x: Tensor, balance: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Run the stage's layers.

        Args:
            x: int64 tokens [B, S] for the first stage, else the activations [B, S, D] of the stage before.
            balance: the balance loss of the stages before, a scalar.

        Returns:
            activations [B, S, D], of the last stage normalized; the balance loss, float32.

        Raises:
            ValueError: the tokens have a wrong shape, or are more than the model can hold.
        """
        if self.is_first:
            self._check(x, None)
            x = self._embedded(x)
        x = self._through([self.model.layers[i] for i in self.layers], x, self._cos_sin(x))
        total = self._pop_balance_loss(torch.zeros((), device=x.device) if balance is None else balance)
        assert isinstance(total, Tensor)  # the sum begins with one
        return self.model.norm(x) if self.is_last else x, total

    def loss(self, h_BSD: Tensor, balance: Tensor, tokens_BS: Tensor) -> Tensor:
        """The loss of the whole model, of which this is the last stage: `DeepseekV3.forward` with tokens as labels.

        Args:
            h_BSD, balance: what the last stage returns.
            tokens_BS: int64 [B, S], the input of the first stage.

        Raises:
            ValueError: the tokens have a wrong shape, or are too few for a loss.
        """
        self._check(tokens_BS, tokens_BS)
        return self._loss(tokens_BS, tokens_BS, h_BSD, self._cos_sin(h_BSD), balance)

    def _cos_sin(self, x_BSD: Tensor) -> CosSin:
        return self.rope.table(x_BSD.shape[1], x_BSD.device)


def split_stages(model: DeepseekV3, stages: int | Sequence[range]) -> list[ModelStage]:
    """Split a model into stages, which share its parameters and buffers.

    Args:
        model: the model.
        stages: how many, among which the layers are divided evenly; if some stages have one more, they are not the
            first and the last, which have the embedding and the head, as far as possible. Or the layers of each stage
            in order, such as `octile.plan.stages.stage_layers`; the last may have none. Multi-token prediction belongs
            to the last.

    Raises:
        ValueError: there are more stages than layers, or none; or the stages do not have all layers in order. Or there
            are several stages of a model with indexers.
    """
    every = _layers_of(model, stages)
    return [_stage(model, layers, number == 0, number == len(every) - 1) for number, layers in enumerate(every)]


def _layers_of(model: DeepseekV3, stages: int | Sequence[range]) -> Sequence[range]:
    n_layers, n_stages = model.config.num_hidden_layers, stages if isinstance(stages, int) else len(stages)
    if model.config.has_indexer and n_stages > 1:
        raise ValueError(
            f"stages must be 1 for a model with indexers, not {n_stages}: a stage passes on neither the indexers' "
            "losses nor the top-k keys that layers share"
        )
    if isinstance(stages, int):
        return even_layers(n_layers, stages)
    if [layer for layers in stages for layer in layers] != [*range(n_layers)] or not all(stages[:-1]):
        given = ", ".join(f"{own.start} to {own.stop - 1}" if own else "none" for own in stages) or "no stage"
        raise ValueError(
            f"stages must have the model's {n_layers} layers in order, all but the last at least one, not {given}"
        )
    return stages


def even_layers(n_layers: int, n_stages: int) -> list[range]:
    """Divide so many layers evenly among stages; see `split_stages`.

    Raises:
        ValueError: there are more stages than layers, or none.
    """
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"n_stages must be from 1 to the model's {n_layers} layers, not {n_stages}")
    inner_first = [*range(1, n_stages - 1), 0, n_stages - 1]
    counts = [n_layers // n_stages] * n_stages
    for stage in inner_first[: n_layers % n_stages]:
        counts[stage] += 1
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def with_stages(model: DeepseekV3, stages: int | Sequence[range], own: Collection[int]) -> DeepseekV3:
    """Return a model with the parameters of its `own` ones of some stages, under their names, and no others.

    `split_stages` splits it into the stages; the others of its list are not to be called.

    Raises:
        ValueError: see `split_stages`.
    """
    layers = _layers_of(model, stages)
    return _with_layers(
        DeepseekV3, model, {layer for stage in own for layer in layers[stage]}, 0 in own, len(layers) - 1 in own
    )


def _stage(model: DeepseekV3, layers: range, is_first: bool, is_last: bool) -> ModelStage:
    stage = _with_layers(ModelStage, model, set(layers), is_first, is_last)
    stage.layers, stage.is_first, stage.is_last = layers, is_first, is_last
    return stage


def _with_layers(cls: type[M], model: DeepseekV3, layers: set[int], is_first: bool, is_last: bool) -> M:
    """Make a model of a class that shares some layers of another one, and what else its first or last stage has."""
    made, trunk = with_class(cls, model), with_class(Trunk, model.model)
    n_layers, has_mtp = model.config.num_hidden_layers, bool(model.config.num_nextn_predict_layers)
    own = layers | {*(range(n_layers, len(model.model.layers)) if is_last else ())}
    trunk._modules["layers"] = nn.ModuleList(
        [layer if i in own else None for i, layer in enumerate(model.model.layers)]  # type: ignore[misc]
    )
    if not (is_first or (is_last and has_mtp)):
        trunk._modules["embed_tokens"] = None
    if not is_last:
        trunk._modules["norm"] = made._modules["lm_head"] = None
    made._modules["model"] = trunk
    return made
