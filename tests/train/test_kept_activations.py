"""Tests of kept activations: they change no bit of a step, and are kept where they take little memory."""

from dataclasses import replace

import pytest
import torch

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.train.config import medium, small
from octile.train.kept_activations import MAX_SHARE, keep_activations, kept_bytes

RECIPE = Recipe.deepseek_v3()
H200, H100 = 140e9, 80e9  # bytes


def gradients(config: ModelConfig, recipe: Recipe) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = apply_recipe(DeepseekV3(config), recipe)
    tokens_BS = torch.randint(config.vocab_size, (2, 33))
    model(tokens_BS, tokens_BS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("setting", ["norms", "latent_attention_inputs"])
@pytest.mark.parametrize("q_lora_rank", [None, 128])
def test_a_kept_activation_changes_no_bit_of_a_gradient(setting: str, q_lora_rank: int | None):
    config = replace(ModelConfig.tiny(), q_lora_rank=q_lora_rank, num_nextn_predict_layers=1)
    found, expected = gradients(config, replace(RECIPE, **{setting: "kept"})), gradients(config, RECIPE)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("config", "memory"), [(small(), H100), (small(), H200), (medium(), H200)])
def test_activations_that_take_little_memory_are_kept(config, memory):
    kept = keep_activations(RECIPE, config, memory)
    assert (kept.norms, kept.latent_attention_inputs) == ("kept", "kept")


def test_activations_that_take_much_memory_are_recomputed():
    assert keep_activations(RECIPE, medium(), H100) == RECIPE


def test_a_micro_batch_counts_not_the_batch():
    config = small()
    memory = config.batch_size * config.sequence_length * kept_bytes(config.model) / MAX_SHARE / 2
    assert keep_activations(RECIPE, config, memory) == RECIPE
    assert keep_activations(RECIPE, replace(config, micro_batches=2), memory).norms == "kept"
