"""Whole answers: their parts are joined once."""

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.engine.request import FinishReason, Output, TokenLogprobs
from octile.serve.http.responses import ChatCompletion, Completion


def lists_of(value) -> list[list]:
    """All lists within a JSON value."""
    if isinstance(value, dict):
        return [found for member in value.values() for found in lists_of(member)]
    return [value, *(found for member in value for found in lists_of(member))] if isinstance(value, list) else []


def outputs(n: int) -> list[Output]:
    return [Output(0, (70 + i,), "ab"[i % 2], (TokenLogprobs(70 + i, -0.5, ()),)) for i in range(n)]


@pytest.mark.parametrize("form", [Completion, ChatCompletion])
def test_a_step_adds_to_an_answer_and_copies_nothing_of_it(tokenizer, form):
    answer = form("micro", tokenizer, [[5]], 1)
    first, *others = outputs(50)
    answer.add(0, first)
    before = lists_of(answer.whole()["choices"][0]["logprobs"])
    for output in others:
        answer.add(0, output)
    after = lists_of(answer.whole()["choices"][0]["logprobs"])
    assert set(map(id, before)) <= set(map(id, after))
    assert max(map(len, after)) == 50


@pytest.mark.parametrize("form", [Completion, ChatCompletion])
def test_the_log_probability_of_a_masked_token_is_a_number(tokenizer, form):
    masked = Output(0, (70,), "a", (TokenLogprobs(70, -0.5, ((70, -0.5), (71, float("-inf")))),))
    answer = form("micro", tokenizer, [[5]], 1)
    answer.add(0, masked)
    logprobs = answer.whole()["choices"][0]["logprobs"]
    if form is Completion:
        assert logprobs["top_logprobs"] == [{tokenizer.decode([70]): -0.5, tokenizer.decode([71]): -9999.0}]
    else:
        assert [entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]] == [-0.5, -9999.0]


def test_the_whole_text_and_log_probabilities(tokenizer):
    for form in (Completion, ChatCompletion):
        answer = form("micro", tokenizer, [[5]], 2)
        for output in outputs(4):
            answer.add(1, output)
        answer.add(1, Output(0, finish_reason=FinishReason.LENGTH))
        empty, choice = answer.whole()["choices"]
        text, logprobs = choice.get("text", choice.get("message", {}).get("content")), choice["logprobs"]
        assert (text, choice["finish_reason"], empty["logprobs"]) == ("abab", "length", None)
        shown = logprobs["tokens"] if form is Completion else [entry["token"] for entry in logprobs["content"]]
        assert shown == [tokenizer.decode([70 + i]) for i in range(4)]
        assert empty.get("text", empty.get("message", {}).get("content")) == ""
