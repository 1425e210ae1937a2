"""Random weights are stored as a published checkpoint stores them."""

from math import prod

import torch

from octile.bench.serve.random_weights import random_weights
from octile.scaled import ScaledTensor
from tests.bench.serve.test_engine import SMALL


def test_layers_are_in_fp8_and_embeddings_are_not():
    weights = random_weights(SMALL.config, torch.device("cpu"))
    assert isinstance(weights.blocks[0].attention.o, ScaledTensor)
    assert not isinstance(weights.head, ScaledTensor)


def test_bf16_weights_have_the_values_of_fp8_weights():
    fp8, bf16 = (random_weights(SMALL.config, torch.device("cpu"), fp8).blocks[1].mlp.down for fp8 in (True, False))
    assert not isinstance(bf16, ScaledTensor)
    assert torch.equal(fp8.dequantize(bf16.dtype), bf16)


def test_random_weights_have_no_nan(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda shape, **options: torch.linspace(-6, 6, prod(shape)).view(shape))
    weights = random_weights(SMALL.config, torch.device("cpu"))
    assert not weights.blocks[0].attention.o.dequantize().isnan().any()
