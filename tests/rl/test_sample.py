"""Sampling: a completion has the log-probability of each of its tokens, that of an end-of-text token included."""

import math

import pytest
import torch

from octile.checkpoint.hugging_face import load
from octile.rl.prompts import Prompt
from octile.rl.sample import Completion, sample_groups, sampling_seeds
from octile.serve.engine import sampler
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.runner.model_runner import ModelRunner
from octile.train.memory.device import is_out_of_memory

PROMPTS = [Prompt("1 2 + 3 4 =", "4 6"), Prompt("5 6 +", "")]


@pytest.fixture(scope="module")
def model(exact_folder):
    return load(exact_folder)


def sample(
    model, tokenizer, end_tokens, seeds, prompts=PROMPTS, group_size=3, n_new=12, max_ahead=0
) -> list[Completion]:
    runner = ModelRunner(model, 32, batch_invariant=True)
    runner.max_ahead = max_ahead
    engine = Engine(runner, tokenizer, EngineConfig(4), end_tokens=end_tokens)
    found = sample_groups(engine, tokenizer, prompts, group_size, n_new, seeds)
    assert (engine.stats().steps_ahead > 0) == (max_ahead > 0)
    assert not engine.has_work
    return found


@pytest.mark.slow
def test_completions_are_in_the_order_of_their_groups_and_have_the_models_log_probabilities(model, tokenizer):
    completions = sample(model, tokenizer, {tokenizer.end}, sampling_seeds(0, 0, 6))
    assert [c.prompt for c in completions] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    for c in completions:
        tokens = torch.tensor([c.prompt_tokens + c.tokens])
        with torch.no_grad():
            expected = model.log_probs(tokens)[0, len(c.prompt_tokens) - 1 :]
        assert c.log_probs == expected.tolist()
        assert c.text == tokenizer.decode(c.tokens)
        assert (len(c.tokens), c.is_ended) == (12, False)


def test_a_conversation_is_continued_after_its_tokens(model, tokenizer):
    tokens = (tokenizer.begin, *tokenizer.encode("1 +"))
    (completion,) = sample(model, tokenizer, set(), [0], [Prompt("<|begin|>1 +", "", tokens)], group_size=1, n_new=2)
    assert completion.prompt_tokens == [*tokens]


@pytest.mark.slow
def test_an_end_of_text_token_ends_a_completion_and_is_one_of_its_tokens(model, tokenizer):
    seeds = sampling_seeds(0, 0, 6)
    whole = sample(model, tokenizer, {tokenizer.end}, seeds)
    end = whole[1].tokens[4]  # taken for an end-of-text token
    cut = sample(model, tokenizer, {end}, seeds)
    assert cut == sample(model, tokenizer, {end}, seeds, max_ahead=4)  # as on a GPU
    for before, after in zip(whole, cut, strict=True):
        length = before.tokens.index(end) + 1 if end in before.tokens else len(before.tokens)
        assert after.tokens == before.tokens[:length]
        assert after.log_probs == before.log_probs[:length]
        assert after.is_ended == (end in before.tokens)
        assert after.text == tokenizer.decode(after.tokens[: length - after.is_ended])


def test_a_completion_depends_on_its_seed_and_not_on_what_else_is_sampled(model, tokenizer):
    seeds = sampling_seeds(0, 0, 6)
    alone = sample(model, tokenizer, {tokenizer.end}, seeds[3:], PROMPTS[1:])
    assert alone == sample(model, tokenizer, {tokenizer.end}, seeds)[3:]


def test_a_lack_of_memory_in_the_choice_of_tokens_is_told_from_logits_that_are_not_finite(
    model, tokenizer, monkeypatch
):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(sampler, "choose", run_out)
    with pytest.raises(RuntimeError, match="CUDA out of memory") as caught:
        sample(model, tokenizer, (), [1], PROMPTS[1:], 1, 1)
    assert is_out_of_memory(caught.value)


def test_logits_that_are_not_finite_are_a_floating_point_error(model, tokenizer, monkeypatch):
    choose = sampler.choose
    monkeypatch.setattr(sampler, "choose", lambda logits, rows: choose(logits * math.nan, rows))
    with pytest.raises(FloatingPointError, match="the model's logits are not finite"):
        sample(model, tokenizer, (), [1], PROMPTS[1:], 1, 1)


def test_seeds_differ_between_steps_runs_and_completions():
    seeds = [seed for run in (0, 1, 2**63 - 1) for step in range(3) for seed in sampling_seeds(run, step, 5)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seeds(1, 2, 5) == sampling_seeds(1, 2, 5)
