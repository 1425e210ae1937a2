"""Tests of text generation: which tokens are sampled, which are shown, what is refused."""

import pytest
import torch

from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.generate import generate, generate_text, sample_token
from octile.serve.request import Sampling
from tests.train.conftest import MICRO

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])  # probabilities 0.087, 0.644, 0.237, 0.032


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return DeepseekV3(MICRO).eval()


def draws(sampling, n=200):
    random = torch.Generator().manual_seed(sampling.seed)
    return [sample_token(LOGITS, sampling, random) for _ in range(n)]


def test_temperature_zero_takes_the_most_likely_token():
    assert set(draws(Sampling(temperature=0.0))) == {1}


def test_temperature_one_samples_every_token_sometimes():
    assert set(draws(Sampling(temperature=1.0))) == {0, 1, 2, 3}


def test_top_p_samples_from_the_fewest_tokens_that_reach_it():
    assert set(draws(Sampling(temperature=1.0, top_p=0.7))) == {1, 2}


def test_top_p_never_excludes_the_most_likely_token():
    assert set(draws(Sampling(temperature=1.0, top_p=0.01))) == {1}


def test_the_same_seed_samples_the_same_tokens():
    assert draws(Sampling(temperature=1.0, seed=3)) == draws(Sampling(temperature=1.0, seed=3))


def test_the_kv_cache_changes_no_token(model):
    prompt = [5, 9, 2, 7]
    tokens = list(generate(model, prompt, Sampling(max_new_tokens=8), end=-1))
    for _ in range(8):
        prompt.append(int(model(torch.tensor([prompt]))[0, -1].argmax()))
    assert tokens == prompt[4:]


def test_the_end_token_ends_the_text_and_is_not_shown(model):
    first = next(generate(model, [5], Sampling(max_new_tokens=1), end=-1))
    assert list(generate(model, [5], Sampling(max_new_tokens=8), end=first)) == []


def test_a_prompt_longer_than_the_context_is_refused(model):
    with pytest.raises(ValueError, match=r"prompt has 120 tokens and max_new_tokens is 9.* context of 128"):
        next(generate(model, [1] * 120, Sampling(max_new_tokens=9), end=-1))


@pytest.mark.parametrize("temperature", [1.2e-38, 3.4e38])
def test_the_extreme_temperatures_sample_tokens(temperature):
    assert set(draws(Sampling(temperature=temperature))) <= {0, 1, 2, 3}


@pytest.mark.parametrize("token", [-1, MICRO.vocab_size])
def test_a_token_outside_the_vocabulary_is_refused(model, token):
    with pytest.raises(ValueError, match=f"prompt has the token {token}, but the model's vocabulary has 320"):
        next(generate(model, [1, token], Sampling(max_new_tokens=1), end=-1))


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(model, [], Sampling(), end=-1))


def test_the_generated_strings_concatenate_to_the_decoded_tokens(model, tokenizer):
    sampling = Sampling(max_new_tokens=40, temperature=1.0, seed=1)
    tokens = list(generate(model, [tokenizer.begin, *tokenizer.encode("def ")], sampling, tokenizer.end))
    assert "".join(generate_text(model, tokenizer, "def ", sampling)) == tokenizer.decode(tokens)


def test_a_model_can_be_trained_after_generating():
    from octile.nn.conversion import convert

    model = convert(DeepseekV3(MICRO))
    next(generate(model, [1, 2], Sampling(max_new_tokens=1), end=-1))
    model.train()
    tokens = torch.randint(MICRO.vocab_size, (2, 16))
    model(tokens, tokens).backward()
    assert model.lm_head.weight.grad.isfinite().all()


def test_nan_logits_are_refused():
    with pytest.raises(FloatingPointError, match="the model's logits are NaN"):
        sample_token(torch.tensor([0.0, float("nan")]), Sampling(), torch.Generator())
