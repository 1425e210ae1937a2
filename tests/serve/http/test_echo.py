"""Completions that repeat their prompts, as clients ask for them that score texts."""

import json
import math

import httpx
import pytest
import torch

from tests.serve.http.conftest import Served
from tests.serve.models import text

PROMPT = text(30)


def post(served: Served, **fields) -> httpx.Response:
    body = {"model": "micro", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "echo": True, **fields}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


def choices(served: Served, **fields) -> list[dict]:
    response = post(served, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_the_text_begins_with_the_prompt(exact):
    (choice,) = choices(exact, prompt="import os", max_tokens=3, ignore_eos=True)
    (plain,) = choices(exact, prompt="import os", max_tokens=3, ignore_eos=True, echo=False)
    assert choice["text"] == "import os" + plain["text"]
    assert choice["logprobs"] is None


def test_each_choice_of_each_prompt_begins_with_its_own(exact):
    texts = [choice["text"] for choice in choices(exact, prompt=["ab", "c"], n=2)]
    assert all(text.startswith(begin) for text, begin in zip(texts, ["ab", "ab", "c", "c"], strict=True))


def test_log_probabilities_of_the_prompt_come_first(exact, model, tokenizer):
    with torch.no_grad():
        expected = model.log_probs(torch.tensor([PROMPT]))[0].tolist()
    (choice,) = choices(exact, logprobs=1, max_tokens=2, ignore_eos=True)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][: len(PROMPT)] == [None, *expected]
    assert logprobs["tokens"][: len(PROMPT)] == [tokenizer.decode([token]) for token in PROMPT]
    assert {len(values) for values in logprobs.values()} == {len(PROMPT) + 2}
    assert logprobs["top_logprobs"][0] is None
    own = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    assert all(top[token] == value for token, value, top in [*own][1:] if token != "\ufffd")  # a part of a character


def test_offsets_are_those_of_the_tokens_in_the_text(exact):
    (choice,) = choices(exact, prompt="import os", logprobs=0, max_tokens=0)
    offsets = choice["logprobs"]["text_offset"]
    parts = zip(offsets, [*offsets[1:], len(choice["text"])], strict=True)
    assert [choice["text"][begin:end] for begin, end in parts] == choice["logprobs"]["tokens"]


def test_a_begin_of_text_token_before_a_text_is_not_repeated(exact, tokenizer):
    (choice,) = choices(exact, prompt="import os", logprobs=0)
    n_tokens = len(tokenizer.encode("import os"))
    assert "".join(choice["logprobs"]["tokens"][:n_tokens]) == "import os"
    assert all(isinstance(value, float) for value in choice["logprobs"]["token_logprobs"])
    assert choice["logprobs"]["text_offset"][0] == 0


def test_a_token_that_ends_the_text_has_a_log_probability(exact, tokenizer):
    bias = {"logit_bias": {str(tokenizer.end): 100}}
    (choice,) = choices(exact, logprobs=1, **bias)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + 1
    assert choice["logprobs"]["tokens"][-1] == tokenizer.decode([tokenizer.end])
    (plain,) = choices(exact, logprobs=1, echo=False, **bias)
    assert plain["logprobs"]["tokens"] == []


@pytest.mark.parametrize("logprobs", [None, 2])
def test_no_token_is_shown_besides_the_prompt_if_none_is_asked_for(exact, tokenizer, logprobs):
    response = post(exact, max_tokens=0, logprobs=logprobs).json()
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(PROMPT), "length")
    assert response["usage"]["completion_tokens"] == 0
    assert choice["logprobs"] is None if logprobs is None else len(choice["logprobs"]["tokens"]) == len(PROMPT)


def test_a_number_for_prompt_logprobs_is_its_own(exact):
    (choice,) = choices(exact, logprobs=1, prompt_logprobs=3)
    assert min(len(at) for at in choice["prompt_logprobs"][1:]) >= 3
    assert max(len(top) for top in choice["logprobs"]["top_logprobs"][1:]) <= 2


def test_a_stream_begins_with_the_prompt(exact):
    events = post(exact, max_tokens=3, ignore_eos=True, logprobs=1, stream=True).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event.startswith("data: {")]
    (whole,) = choices(exact, max_tokens=3, ignore_eos=True, logprobs=1)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    found = [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"]["token_logprobs"]]
    assert found == whole["logprobs"]["token_logprobs"]


def test_the_likelihood_of_a_text_does_not_depend_on_how_it_is_asked(exact):
    """As lm-eval asks: the continuation's tokens, without the one that is generated."""
    context, continuation = PROMPT[:20], PROMPT[20:]
    (choice,) = choices(exact, logprobs=1)
    scored = choice["logprobs"]["token_logprobs"][len(context) : -1]
    (alone,) = choices(exact, max_tokens=0, logprobs=0)
    assert len(scored) == len(continuation)
    assert math.isclose(sum(scored), sum(alone["logprobs"]["token_logprobs"][len(context) :]))


def test_no_tokens_without_the_prompt_are_refused(exact):
    response = post(exact, max_tokens=0, echo=False)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "max_tokens must be at least 1, or 0 with echo true, not 0"
