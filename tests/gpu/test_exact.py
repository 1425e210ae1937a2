"""Serving and training compute the same log-probabilities on a GPU, bit for bit, under the recipe `exact`."""

from dataclasses import replace

import pytest
import torch

from octile.lab.rollout import compare, find_difference, prefill, roll_out
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.runner.kv_cache import CacheFormat
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import Tokenizer
from tests.serve.models import text

SHAPES = {  # of few layers: latents that Triton's kernels read, and those of Hopper's; a dense layer that is not fused
    "small": replace(ModelConfig.small(), num_hidden_layers=3, max_position_embeddings=4096),
    "V2-Lite": replace(ModelConfig.v2_lite_16b(), num_hidden_layers=2, max_position_embeddings=4096),
}
PROMPTS = [text(n, n, 4000) for n in (2100, 1, 3, 17, 64, 90, 200, 300)]  # of attention's two parts, and of one


def new_model(shape: str, recipe: Recipe) -> DeepseekV3:
    torch.manual_seed(0)
    return apply_recipe(DeepseekV3(SHAPES[shape]).cuda().bfloat16().eval(), recipe)  # type: ignore[return-value]


@pytest.mark.parametrize("latents", ["activations", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_those_of_training(shape: str, latents):
    model = new_model(shape, replace(Recipe.exact(), latents=latents))
    stored: CacheFormat = "fp8" if latents == "fp8" else "bf16"
    runner = ModelRunner(model, 64, stored, 8, batch_invariant=True)
    config = EngineConfig(max_batch=8, max_step_tokens=150, batch_invariant=True)
    tokenizer = Tokenizer.train(["one two three"], 258)
    engine = Engine(runner, tokenizer, config)
    texts = roll_out(engine, PROMPTS, 20, seed=0)
    assert engine.stats().steps_ahead > 10
    (alone,) = roll_out(Engine(runner, tokenizer, config), PROMPTS[:1], 20, seed=0)  # in steps of one row
    assert (alone.tokens, alone.decoded) == (texts[0].tokens, texts[0].decoded)
    prefill(runner, texts)
    found = compare(model, texts)
    assert [each.equal for each in found] == [each.tokens for each in found]
    without_graphs = ModelRunner(model, 8, stored, 0, batch_invariant=True, max_step_tokens=0)
    assert find_difference(model, without_graphs, texts[-2:]) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_in_training_has_the_bits_of_each_text(shape: str):
    model, tokens_BS = new_model(shape, Recipe.exact()), torch.tensor([text(600, n, 4000) for n in range(3)]).cuda()
    with torch.no_grad():
        together = model.log_probs(tokens_BS)
        for row, expected in zip(tokens_BS, together, strict=True):
            assert torch.equal(model.log_probs(row[None])[0], expected)
            assert torch.equal(model.log_probs(row[None, :70])[0], expected[:69])


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_close_to_those_of_the_usual_recipe(shape: str):
    tokens_BS = torch.tensor([text(200, n, 4000) for n in range(2)]).cuda()
    gradients = []
    for recipe in (Recipe.exact(), Recipe.deepseek_v3()):
        model = new_model(shape, recipe).train()
        model(tokens_BS, tokens_BS).backward()
        gradients.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 0.5 * theirs.norm() + 1e-6
