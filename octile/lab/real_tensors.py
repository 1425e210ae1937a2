"""Real activations and gradients: what the linear layers of a model saw in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from octile.lab.layers import layer_weights
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.recipe import Recipe

SEQUENCES, LENGTH = 4, 256


@dataclass(frozen=True)
class RealTensors:
    """What was seen of each layer: x [T, K] and dy [T, N], in the dtype in which they came.

    `where_from` says it in words.
    """

    where_from: str
    x: Mapping[str, Tensor]
    dy: Mapping[str, Tensor]


def real_tensors(run: Path | None) -> RealTensors:
    """The inputs and output gradients of a run's layers on its held-out text, in BF16 products.

    Without a run: those of the tiny preset as it is initialised, on tokens drawn at random.

    Raises:
        FileNotFoundError, ValueError: run is no finished run folder, or is damaged.
    """
    if run is None:
        torch.manual_seed(0)
        model = DeepseekV3(ModelConfig.tiny())
        tokens_BS = torch.randint(model.config.vocab_size, (SEQUENCES, LENGTH))
        return _look(model, tokens_BS, "an untrained model of the preset tiny, on random tokens")
    from octile.checkpoint.hugging_face import load
    from octile.train.batches import validation_windows
    from octile.train.run_folder import RunFolder
    from octile.train.token_store import TokenStore

    folder = RunFolder.open(run)
    length = folder.read_config().sequence_length - 1
    tokens_BS = validation_windows(TokenStore.open(folder.data).val, length, SEQUENCES)
    return _look(load(run), tokens_BS, f"the run {run.name}, on text that it was not trained on")


def _look(model: DeepseekV3, tokens_BS: Tensor, where_from: str) -> RealTensors:
    apply_recipe(model, Recipe.bf16())
    x, dy = see_operands(model, tokens_BS)
    return RealTensors(where_from, x, dy)


def see_operands(model: nn.Module, tokens_BS: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """x and dy of every layer of a converted model in one forward and backward pass on its own loss."""
    names = layer_weights(model)
    x: dict[str, Tensor] = {}
    dy: dict[str, Tensor] = {}

    def watch(weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = names.name_of(weight)
        if name is None:
            return None
        x[name] = fprop.before.detach()

        def backward(product: ObservedGemm) -> None:
            if product.name == "dgrad":
                dy[name] = product.before.detach()

        return backward

    with observe_gemms(watch):
        model(tokens_BS, tokens_BS).backward()
    return x, dy
