"""Tests of kept activations: they change no bit of a step, and are kept where memory allows, and on resume."""

from dataclasses import replace

import pytest
import torch

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.nn.fused import block_input
from octile.plan.pass_memory import recomputable_bytes
from octile.recipe import Recipe
from octile.train.config import medium, small
from octile.train.data.token_store import TokenStore
from octile.train.memory.saved_activations import MAX_SHARE, can_save, saving_activations
from octile.train.trainer import Trainer
from tests.train.conftest import micro

RECIPE = Recipe.deepseek_v3()
H200, H100 = 140e9, 80e9  # bytes


def gradients(config: ModelConfig, recipe: Recipe) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = apply_recipe(DeepseekV3(config), recipe)
    tokens_BS = torch.randint(config.vocab_size, (2, 33))
    model(tokens_BS, tokens_BS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.one_case
@pytest.mark.parametrize("setting", ["norms", "latent_attention_inputs"])
@pytest.mark.parametrize("q_lora_rank", [None, 128])
def test_a_kept_activation_changes_no_bit_of_a_gradient(setting: str, q_lora_rank: int | None):
    config = replace(ModelConfig.tiny(), q_lora_rank=q_lora_rank, num_nextn_predict_layers=1)
    found, expected = gradients(config, replace(RECIPE, **{setting: "kept"})), gradients(config, RECIPE)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_no_kept_norm_is_recomputed(monkeypatch: pytest.MonkeyPatch):
    """Neither for a layer that reads it quantized nor for a gate."""
    monkeypatch.setattr(block_input, "rms_norm_quantize", None)
    assert gradients(ModelConfig.tiny(), replace(RECIPE, norms="kept"))


@pytest.mark.parametrize(("config", "memory"), [(small(), H100), (small(), H200), (medium(), H200)])
def test_activations_that_take_little_memory_are_kept(config, memory):
    assert can_save(config, memory)
    kept = saving_activations(RECIPE)
    assert (kept.norms, kept.latent_attention_inputs) == ("kept", "kept")


def test_activations_that_take_much_memory_are_recomputed():
    assert not can_save(medium(), H100)


def test_a_micro_batch_counts_not_the_batch():
    config = small()
    memory = config.batch_size * config.sequence_length * recomputable_bytes(config.model) / MAX_SHARE / 2
    assert not can_save(config, memory)
    assert can_save(replace(config, micro_batches=2), memory)


def test_activations_of_several_micro_batches_count():
    config = small()
    memory = 1.5 * config.batch_size * config.sequence_length * recomputable_bytes(config.model) / MAX_SHARE
    assert can_save(config, memory)
    assert not can_save(config, memory, held=2.0)


def test_a_deterministic_run_does_not_depend_on_the_memory():
    assert not can_save(replace(small(), deterministic=True), H200)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["deepseek_v3", "per_tensor", "bf16"])
def test_a_resumed_run_keeps_what_its_checkpoint_says(store: TokenStore, recipe: str):
    def resumed(kept: bool | None) -> Trainer:
        trainer = Trainer(micro(recipe=recipe), store, torch.device("cpu"))
        tensors, state = begun.state()
        trainer.load(tensors, {**state, "keeps_activations": kept})
        return trainer

    begun = Trainer(micro(recipe=recipe), store, torch.device("cpu"))
    begun.step()
    expected, found = resumed(None), resumed(True)
    assert found.strategy.recipe == saving_activations(expected.strategy.recipe)
    assert found.state()[1]["keeps_activations"] is True
    recipes = {m.recipe for m in found.model.modules() if getattr(m, "recipe", None) is not None}
    assert recipes == {found.strategy.recipe}
    assert [m["loss"] for m in (found.step(), found.step())] == [m["loss"] for m in (expected.step(), expected.step())]
