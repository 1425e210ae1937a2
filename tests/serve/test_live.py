"""An engine over a model in training: the log-probabilities after an update are the model's, bit for bit."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from octile.lab.rollout import compare, prefill, roll_out
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.fused.cross_entropy import cross_entropies
from octile.nn.linear import Linear
from octile.nn.moe import Experts
from octile.optim import AdamW
from octile.recipe import Recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine, InFlight
from octile.serve.engine.request import Output, Sampling
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.live import LiveWeights
from octile.tokenizer import Tokenizer
from tests.serve.models import exact_model, text

SHARED = text(70, seed=100)  # more than a page
PROMPTS = [SHARED + text(20, 2), text(3, 1), SHARED + text(5, 4)]


def train(model: DeepseekV3, steps: int, optimizer: Any = torch.optim.SGD) -> None:
    """Take steps of a loop in torch that changes every log-probability."""
    stepper = optimizer(model.parameters(), lr=0.05)
    model.train()
    for i in range(steps):
        tokens = torch.tensor([text(30, seed=i)])
        (-model.log_probs(tokens).mean()).backward()
        stepper.step()
        stepper.zero_grad()


def live_engine(
    model: DeepseekV3, tokenizer: Tokenizer, n_drafts: int = 0, cache_format: Any = None
) -> tuple[ModelRunner, Engine]:
    runner = ModelRunner(LiveWeights(model), 64, cache_format, batch_invariant=True, n_drafts=n_drafts)
    return runner, Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=60, n_drafts=n_drafts))


def assert_equal_after_updates(model: DeepseekV3, tokenizer: Tokenizer, optimizer: Any, *engine_of: Any) -> None:
    runner, engine = live_engine(model, tokenizer, *engine_of)
    seen = []
    for version in range(3):
        texts = roll_out(engine, PROMPTS, new_tokens=4, seed=0)
        prefill(runner, texts)
        found = compare(model, texts)
        assert [each.equal for each in found] == [each.tokens for each in found]
        stats = engine.stats()
        assert (stats.weights_version, stats.shared_tokens) == (version, 64 * (version + 1))
        seen.append(texts[0].read)
        train(model, 1 + version % 2, optimizer)
        assert engine.update_weights() == []
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.slow
def test_log_probabilities_after_updates_are_those_of_training(tokenizer):
    assert_equal_after_updates(exact_model(), tokenizer, torch.optim.SGD)


@pytest.mark.slow
def test_with_drafts_latents_in_fp8_and_parameters_in_bf16_they_are_too(tokenizer):
    model = exact_model(torch.bfloat16, replace(Recipe.exact(), latents="fp8"))
    for layer in model.modules():
        if isinstance(layer, Linear | Experts):
            for weight in layer.parameters():
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    assert_equal_after_updates(model, tokenizer, AdamW, 2, "fp8")


def test_under_autocast_parameters_in_float32_are_served_in_bfloat16(tokenizer):
    model = exact_model()
    runner = ModelRunner(LiveWeights(model, torch.bfloat16), 64, batch_invariant=True)
    engine = Engine(runner, tokenizer)
    train(model, 2)
    engine.update_weights()
    (served,) = roll_out(engine, [text(20)], new_tokens=6, seed=0)
    tokens = torch.tensor([served.prompt + served.tokens])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = -cross_entropies(model(tokens)[:, :-1], tokens[:, 1:])[0, 19:]
    assert served.decoded == expected.tolist()


@pytest.mark.one_case
@pytest.mark.parametrize("in_flight", get_args(InFlight))
def test_each_token_in_flight_has_the_log_probability_of_the_weights_that_its_mark_names(tokenizer, in_flight):
    old, model = exact_model(), exact_model()
    _, engine = live_engine(model, tokenizer, n_drafts=1)
    sampling = Sampling(12, 1.0, seed=3, ignore_eos=True, logprobs=0)
    requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
    outputs: list[Output] = []
    while not requests[2].n_generated:
        outputs += engine.step()
    train(model, 2)
    outputs += engine.update_weights(in_flight)
    while engine.has_work:
        outputs += engine.step()
    for request in requests:
        own = [output for output in outputs if output.request_id == request.id]
        served = [(each.logprob, o.weights_version) for o in own for each in o.logprobs]
        with torch.no_grad():
            both = [m.log_probs(torch.tensor([request.tokens]))[0, -12:].tolist() for m in (old, model)]
        equal = [logprob == both[version][i] for i, (logprob, version) in enumerate(served)]
        versions = [version for _, version in served]
        n_old = versions.count(0)
        start = len(request.prompt)
        if in_flight == "finish":
            assert request.weights_versions == [(start, 0)]
        else:
            assert request.weights_versions == [(start, 0), (start + n_old, 1)]
        assert len(equal) == 12
        assert all(equal[:n_old])
        assert all(equal[n_old:]) == (in_flight != "continue")
