"""Collect activations and gradients of a model's linear layers in one forward and backward pass."""

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
    """Inputs x [T, K] and output gradients dy [T, N] by layer, in their own dtypes.

    `source` describes the model and the text, for pages.
    """

    source: str
    x: Mapping[str, Tensor]
    dy: Mapping[str, Tensor]


def real_tensors(run: Path | None) -> RealTensors:
    """Collect the inputs and output gradients of a run's layers on its held-out text, with BF16 GEMMs.

    Without a run, an untrained model of the preset tiny reads random tokens.

    Raises:
        FileNotFoundError, ValueError: run is not the folder of a finished run, or is damaged.
    """
    if run is None:
        torch.manual_seed(0)
        model = DeepseekV3(ModelConfig.tiny())
        tokens_BS = torch.randint(model.config.vocab_size, (SEQUENCES, LENGTH))
        return _collect(model, tokens_BS, "an untrained model of the preset tiny, on random tokens")
    from octile.checkpoint.hugging_face import load
    from octile.train.data.batches import validation_windows
    from octile.train.data.packed_tokens import tokens_of
    from octile.train.data.token_store import TokenStore
    from octile.train.run.folder import RunFolder

    folder = RunFolder.open(run)
    length = folder.read_config().sequence_length - 1
    tokens_BS = tokens_of(validation_windows(TokenStore.open(folder.data).val, length, SEQUENCES))
    return _collect(load(run), tokens_BS, f"the run {run.name}, on its held-out text")


def _collect(model: DeepseekV3, tokens_BS: Tensor, source: str) -> RealTensors:
    apply_recipe(model, Recipe.bf16())
    x, dy = collect_operands(model, tokens_BS)
    return RealTensors(source, x, dy)


def collect_operands(model: nn.Module, tokens_BS: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return x and dy of every layer of a converted model in one forward and backward pass on its own loss."""
    layers = layer_weights(model)
    x: dict[str, Tensor] = {}
    dy: dict[str, Tensor] = {}

    def observe(weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = layers.name_of(weight)
        if name is None:
            return None
        x[name] = fprop.before.detach()

        def backward(gemm: ObservedGemm) -> None:
            if gemm.name == "dgrad":
                dy[name] = gemm.before.detach()

        return backward

    with observe_gemms(observe):
        model(tokens_BS, tokens_BS).backward()
    return x, dy
