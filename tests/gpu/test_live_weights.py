"""An engine over a model in training on a GPU: captured graphs compute with the new weights, with training's bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.lab.rollout import compare, prefill, roll_out
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.runner.batch import Decoded, DecodeRequest
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import tensors_of
from octile.serve.weights.live import LiveWeights
from octile.train.trainer import Trainer
from tests.serve.models import Texts, text
from tests.train.conftest import MICRO, micro

MODELS = {
    "tiny": replace(ModelConfig.tiny(), num_nextn_predict_layers=1),
    "small": replace(ModelConfig.small(), num_hidden_layers=3),
}
SIZES = [(100, 90, 80, 63), (1, 1, 1, 1), (1, 1, 0, 0), (4, 4, 4, 4), (120, 0, 0, 1)]  # decode steps as large as graphs


def read_all(runner: ModelRunner) -> Tensor:
    """The logits of texts by steps with prompts and by decode steps, and those of the drafts after each token."""
    texts = Texts(runner, [text(300, i, runner.vocab_size) for i in range(4)])
    drafts = [texts.draft(*sizes).cpu() for sizes in SIZES]
    return torch.cat((*texts.logits, *drafts))


def decode_all(runner: ModelRunner) -> list[Decoded]:
    """What steps that are launched ahead choose and draft after two texts."""
    texts = Texts(runner, [text(200, i, runner.vocab_size) for i in range(2)]).run(100, 90)
    positions, found = [100, 90], list[Decoded]()
    for n in range(6):
        requests = [
            DecodeRequest(
                i if n else -1, position, 180, i, 0, int(n > 0), 1.0, 1.0, 0.0, [] if n else [tokens[position]], pages
            )
            for i, (position, tokens, pages) in enumerate(zip(positions, texts.texts, texts.pages, strict=True))
        ]
        if n:
            positions = [p + 1 + each.accepted for p, each in zip(positions, found[-2:], strict=True)]
        found += runner.decode(requests, 1).wait()
    return found


@torch.no_grad()
def step(model: DeepseekV3) -> None:
    for parameter in model.parameters():
        parameter += 0.1 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["exact", "deepseek_v3", "bf16"])
def test_captured_graphs_compute_with_the_new_weights(name: str, recipe: str):
    torch.manual_seed(0)
    model = DeepseekV3(MODELS[name]).cuda().eval()
    apply_recipe(model, Recipe.named(recipe))
    of_runner = {"batch_invariant": recipe == "exact", "max_batch": 8, "n_drafts": 1, "max_step_tokens": 512}
    live = LiveWeights(model)
    assert live.weights.dtype == torch.bfloat16  # the parameters are in FP32
    runner = ModelRunner(live, 60, **of_runner)
    assert runner.graphs is not None
    assert runner.loop is not None
    before, decoded, addresses = (
        read_all(runner),
        decode_all(runner),
        [t.data_ptr() for t in tensors_of(live.weights.parts)],
    )
    step(model)
    assert torch.equal(read_all(runner), before)
    runner.check_weights()
    runner.update_weights()
    after = read_all(runner)
    assert [t.data_ptr() for t in tensors_of(live.weights.parts)] == addresses
    fresh = ModelRunner(LiveWeights(model), 60, **of_runner)
    assert torch.equal(after, read_all(fresh))
    assert not torch.equal(after, before)
    assert decoded != decode_all(runner) == decode_all(fresh)


def test_an_update_needs_memory_for_a_block_and_not_for_the_model():
    model = apply_recipe(DeepseekV3(replace(ModelConfig.small(), num_nextn_predict_layers=0)).cuda(), Recipe.exact())
    live = LiveWeights(model)
    served = sum(t.nbytes for t in tensors_of(live.weights.parts))
    live.check()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    live.update()
    assert torch.cuda.max_memory_allocated() - before < served / 3
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("n_drafts", [0, 1])
def test_log_probabilities_in_graphs_are_those_of_training_after_captured_steps(store, n_drafts: int):
    config = replace(MICRO, moe_intermediate_size=128, num_nextn_predict_layers=1)
    trainer = Trainer(micro(recipe="exact", model=config, steps=20), store, torch.device("cuda"))
    runner = ModelRunner(LiveWeights(trainer.model), 64, batch_invariant=True, max_batch=8, n_drafts=n_drafts)
    engine = Engine(runner, store.tokenizer, EngineConfig(max_batch=8, n_drafts=n_drafts))
    prompts = [text(n, n, 300) for n in (1, 5, 40, 64, 70)]
    for _ in range(3):
        texts = roll_out(engine, prompts, new_tokens=12, seed=0)
        prefill(runner, texts)
        found = compare(trainer.model.eval(), texts)
        trainer.model.train()
        assert [each.equal for each in found] == [each.tokens for each in found]
        for _ in range(4):  # the last ones are replays of a captured step
            trainer.step()
        engine.update_weights()
    assert engine.stats().weights_version == 3
