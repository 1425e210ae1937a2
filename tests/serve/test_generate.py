"""Tests of the continuation of one prompt: the text is that of the model's own forward pass."""

from dataclasses import replace

import pytest
import torch

from octile.checkpoint.hugging_face import load, save
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.engine.request import Sampling
from octile.serve.generate import generate_from, generate_text
from tests.serve.models import CONFIG

SIZES = replace(CONFIG, vocab_size=320)


def new_model():
    torch.manual_seed(0)
    return DeepseekV3(SIZES).eval()


def greedy_text(model, tokenizer, prompt, n):
    """The model's greedy continuation, without a cache."""
    tokens = [tokenizer.begin, *tokenizer.encode(prompt)]
    length = len(tokens)
    with torch.no_grad():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] == tokenizer.end:
                tokens.pop()
                break
    return tokenizer.decode(tokens[length:])


@pytest.mark.slow
def test_the_greedy_text_is_that_of_the_forward_pass(tokenizer):
    text = "".join(generate_text(new_model(), tokenizer, "def add(", Sampling(80, ignore_eos=True)))
    assert text == greedy_text(new_model(), tokenizer, "def add(", 80)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_the_text_of_a_folder_is_that_of_the_loaded_model(tokenizer, tmp_path, weights):
    save(new_model(), tmp_path, weights)
    tokenizer.save(tmp_path)
    text = "".join(generate_from(tmp_path, "def add(", Sampling(40), "cpu"))
    assert text == "".join(generate_text(load(tmp_path), tokenizer, "def add(", Sampling(40)))


def test_the_same_seed_gives_the_same_text(tokenizer):
    texts = ["".join(generate_text(new_model(), tokenizer, "a", Sampling(20, 1.0, seed=s))) for s in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_longer_than_the_context_is_refused_before_the_cache_is_made(tokenizer):
    with pytest.raises(ValueError, match=r"max_new_tokens is 1000000000.* context of 512"):
        next(generate_text(new_model(), tokenizer, "a", Sampling(10**9)))


def test_nan_logits_are_refused(tokenizer):
    model = new_model()
    model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(FloatingPointError, match="the model's logits are not finite: NaN"):
        next(generate_text(model, tokenizer, "a", Sampling(4)))
