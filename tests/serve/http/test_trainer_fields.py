"""What trainers outside need of an answer: log-probabilities of its prompt, tokens, and versions of the weights."""

import json

import httpx
import pytest
import torch

from octile.serve.engine.request import FinishReason, Output, TokenLogprobs
from octile.serve.http.responses import ChatCompletion, Completion, Shown
from tests.serve.http.conftest import Served
from tests.serve.models import text

PROMPT = text(90)


def ask(served: Served, path: str = "completions", **fields) -> dict:
    body = {"model": "micro", "max_tokens": 3, "ignore_eos": True, **fields}
    response = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_log_probabilities_of_a_prompt_are_those_of_training_also_if_it_is_cached(exact, model, tokenizer):
    with torch.no_grad():
        expected = model.log_probs(torch.tensor([PROMPT]))[0].tolist()
    for _ in range(2):
        (choice,) = ask(exact, prompt=PROMPT, prompt_logprobs=2, return_token_ids=True)["choices"]
        first, *others = choice["prompt_logprobs"]
        assert (first, choice["prompt_token_ids"], len(choice["token_ids"])) == (None, PROMPT, 3)
        assert [at[str(token)]["logprob"] for at, token in zip(others, PROMPT[1:], strict=True)] == expected
        for at in others:
            assert sorted(entry["rank"] for entry in at.values())[:2] == [1, 2]
            assert len(at) in (2, 3)
            assert all(entry["decoded_token"] == tokenizer.decode([int(token)]) for token, entry in at.items())


def test_those_of_a_chat_are_beside_its_choices(exact):
    messages = [{"role": "user", "content": "a b"}]
    answer = ask(exact, "chat/completions", messages=messages, n=2, prompt_logprobs=0, return_token_ids=True)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [3, 3]
    assert "prompt_logprobs" not in answer["choices"][0]


def test_an_answer_names_its_version_and_has_none_of_what_it_was_not_asked_for(exact):
    (choice,) = ask(exact, prompt=PROMPT)["choices"]
    assert choice["weights_version"] == 0
    others = {"weights_versions", "old_latents", "prompt_logprobs", "token_ids", "prompt_token_ids"}
    assert others.isdisjoint(choice)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_has_tokens_and_versions(exact, path):
    given = {"prompt": [1, 2]} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "micro", "max_tokens": 4, "ignore_eos": True, "stream": True, "return_token_ids": True, **given}
    events = httpx.post(f"{exact.url}/v1/{path}", json=body, timeout=60).text.split("\n\n")
    first, *chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    holder = first["choices"][0] if path == "completions" else first
    assert holder["prompt_token_ids"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sum(len(choice["token_ids"]) for choice in choices) == 4
    assert {choice["weights_version"] for choice in choices} == {0}


@pytest.mark.one_case
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_has_ended_a_text_is_the_last_one_and_has_its_log_probability(exact, model, path, stream):
    given = {"prompt": [1, 2], "logprobs": 0} if path == "completions" else {"logprobs": True}
    given |= {} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "micro", "max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "seed": 3, **given}
    whole = httpx.post(f"{exact.url}/v1/{path}", json=body, timeout=60).json()
    tokens = whole["choices"][0]["token_ids"]
    prompt = (whole if path == "chat/completions" else whole["choices"][0])["prompt_token_ids"]
    end = tokens[-1]
    expected = tokens[: tokens.index(end) + 1]
    body |= {"stop_token_ids": [end], "stream": stream}
    response = httpx.post(f"{exact.url}/v1/{path}", json=body, timeout=60)
    choices = _choices(response.text) if stream else response.json()["choices"]
    entries = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    found = [
        value
        for each in entries
        for value in each.get("token_logprobs", []) + [entry["logprob"] for entry in each.get("content", [])]
    ]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == expected
    with torch.no_grad():
        scores = model.log_probs(torch.tensor([prompt + expected]))[0]
    assert found == scores[len(prompt) - 1 :].tolist()


def _choices(stream: str) -> list[dict]:
    """The choices of the chunks of a stream."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("form", [Completion, ChatCompletion])
def test_a_text_without_tokens_is_without_that_which_has_ended_it(tokenizer, form):
    output = Output(0, (70,), "a", (), FinishReason.STOP, end_logprobs=TokenLogprobs(71, -0.5, (), 1), end_token=71)
    for shown, n_entries in ((Shown(logprobs=True), 0), (Shown(tokens=True, logprobs=True), 1)):
        answer = form("micro", tokenizer, [[5]], 1, shown)
        answer.add(0, output)
        body = answer.whole()
        logprobs = body["choices"][0]["logprobs"]
        assert len(logprobs["content"] if form is ChatCompletion else logprobs["tokens"]) == n_entries
        assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("form", [Completion, ChatCompletion])
def test_a_choice_of_several_versions_names_them(tokenizer, form):
    outputs = [
        Output(0, (70, 71), "a"),
        Output(0, (72,), "b", weights_version=1, has_old_latents=True),
        Output(0, (), "", (), FinishReason.LENGTH, None, 1),
    ]
    answer, stream = form("micro", tokenizer, [[5]], 1), form("micro", tokenizer, [[5]], 1)
    for output in outputs:
        answer.add(0, output)
    (choice,) = answer.whole()["choices"]
    parts = [{"version": 0, "first_token": 0}, {"version": 1, "first_token": 2}]
    assert (choice["weights_version"], choice["weights_versions"], choice["old_latents"]) == (1, parts, True)
    chunks = [stream.chunk(0, output)["choices"][0] for output in outputs]
    assert [chunk["weights_version"] for chunk in chunks] == [0, 1, 1]
    assert [chunk.get("weights_versions") for chunk in chunks] == [None, None, parts]


def test_a_stream_has_no_log_probabilities_of_prompts(exact):
    body = {"model": "micro", "prompt": "a", "stream": True, "prompt_logprobs": 0}
    response = httpx.post(f"{exact.url}/v1/completions", json=body)
    message = "prompt_logprobs is only for stream false: a stream has no log-probabilities of prompts"
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    assert response.json()["error"]["param"] == "prompt_logprobs"
