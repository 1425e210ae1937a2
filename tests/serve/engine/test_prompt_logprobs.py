"""Tests of log-probabilities of prompts: those of the logits at each position, however the prompt was computed."""

import random

import pytest
import torch

from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import FinishReason, Request, Sampling, TokenLogprobs
from tests.serve.fake_runner import FakeRunner


def expected(runner: FakeRunner, prompt: list[int], count: int) -> list[TokenLogprobs]:
    """The log-probabilities by the definition."""
    entries = []
    for position, token in enumerate(prompt[1:], 1):
        logprobs = runner.logits_after(prompt[:position]).log_softmax(-1)
        top = tuple((i.item(), logprobs[i].item()) for i in logprobs.topk(count).indices)
        entries.append(TokenLogprobs(token, logprobs[token].item(), top, int((logprobs >= logprobs[token]).sum())))
    return entries


def run(engine: Engine) -> dict[int, list]:
    """Step until all requests have ended, and return the outputs of each."""
    outputs: dict[int, list] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def assert_scored(runner: FakeRunner, request: Request, outputs: list) -> None:
    first, *others = outputs
    assert first.prompt_logprobs == tuple(expected(runner, [*request.prompt], request.sampling.prompt_logprobs or 0))
    assert not any(output.prompt_logprobs for output in others)


@pytest.mark.parametrize(("n_drafts", "max_ahead", "max_step_tokens"), [(0, 0, 8), (2, 4, 13), (1, 0, 100)])
def test_they_are_those_of_the_logits_in_any_batch(tokenizer, n_drafts, max_ahead, max_step_tokens):
    draw = random.Random(n_drafts)
    runner = FakeRunner(n_pages=14, max_ahead=max_ahead, n_drafts=n_drafts)
    config = EngineConfig(max_batch=4, max_step_tokens=max_step_tokens, n_drafts=n_drafts)
    engine = Engine(runner, tokenizer, config)
    requests = []
    for i in range(12):
        prompt = [7] * draw.randint(0, 9) + [draw.randint(0, 3) for _ in range(draw.randint(1, 30))]
        sampling = Sampling(draw.randint(4, 20), ignore_eos=True, prompt_logprobs=(0, 3, None)[i % 3])
        requests.append(engine.add(prompt, sampling))
    outputs = run(engine)
    assert engine.stats().preemptions
    for request in requests:
        if request.sampling.prompt_logprobs is None:
            assert not any(output.prompt_logprobs for output in outputs[request.id])
        else:
            assert_scored(runner, request, outputs[request.id])
        assert request.tokens[len(request.prompt) :].tolist() == runner.text_of(request.prompt, request.sampling)


def test_a_cached_prefix_is_computed_anew_for_them_and_shared_by_others(tokenizer):
    runner = FakeRunner()
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
    prompt = [5] * 13
    engine.add(prompt, Sampling(2))
    run(engine)
    request = engine.add(prompt, Sampling(2, prompt_logprobs=0))
    outputs = run(engine)
    assert engine.stats().shared_tokens == 0
    assert_scored(runner, request, outputs[request.id])
    engine.add(prompt, Sampling(2))
    run(engine)
    assert engine.stats().shared_tokens == 12


def test_two_choices_of_one_prompt_are_both_scored(tokenizer):
    runner = FakeRunner()
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=8))
    requests = [engine.add([1] * 20, Sampling(3, prompt_logprobs=0)) for _ in range(2)]
    outputs = run(engine)
    for request in requests:
        assert_scored(runner, request, outputs[request.id])


def test_a_prompt_of_one_token_has_none_and_later_steps_are_launched_ahead(tokenizer):
    runner = FakeRunner(max_ahead=4)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=8))
    request = engine.add([1], Sampling(9, ignore_eos=True, prompt_logprobs=2))
    outputs = run(engine)
    assert not any(output.prompt_logprobs for output in outputs[request.id])
    assert engine.stats().steps_ahead


@pytest.mark.parametrize("in_flight", ["recompute", "continue"])
def test_after_an_update_within_a_prompt_all_are_those_of_the_new_weights(tokenizer, in_flight):
    runner = FakeRunner()
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=8))
    scored = engine.add(list(range(20)), Sampling(3, ignore_eos=True, prompt_logprobs=1))
    engine.step()
    assert len(scored.prompt_logprobs) == 8
    engine.update_weights(in_flight)
    first, *_ = run(engine)[scored.id]
    assert (first.weights_version, first.has_old_latents) == (1, False)
    assert first.prompt_logprobs == tuple(expected(runner, [*range(20)], 1))


def test_a_prompt_whose_logits_are_nan_ends_with_an_error_and_no_other_does(tokenizer):
    class Broken(FakeRunner):
        def logits_after(self, tokens):
            logits = super().logits_after(tokens)
            return torch.full_like(logits, torch.nan) if list(tokens) == [3, 3] else logits

    engine = Engine(Broken(), tokenizer, EngineConfig(max_batch=4, max_step_tokens=16))
    wrong = engine.add([3] * 6, Sampling(3, ignore_eos=True, prompt_logprobs=0))
    right = engine.add([4] * 6, Sampling(3, ignore_eos=True, prompt_logprobs=0))
    outputs = run(engine)
    (output,) = outputs[wrong.id]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "the model's logits are not finite, for the token at position 2 of the prompt"
    assert right.n_generated == 3
    assert engine.stats().used_pages == 0


@pytest.mark.parametrize("number", [-1, 21])
def test_other_numbers_are_refused(number):
    with pytest.raises(ValueError, match=f"^prompt_logprobs must be from 0 to 20, not {number}$"):
        Sampling(prompt_logprobs=number)
