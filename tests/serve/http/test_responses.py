"""Writing a whole answer: parts are joined once, into the same JSON in small pieces; the event loop goes on between."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.engine.request import FinishReason, Output, TokenLogprobs
from octile.serve.http.responses import (
    ANY_TEXT,
    PIECE_BYTES,
    ChatCompletion,
    Completion,
    Shown,
    event,
    json_bytes,
    json_pieces,
)


def answer(n_tokens: int) -> dict:
    top = [{"token": "é", "logprob": -1.5, "bytes": [195, 169]}] * 20
    logprobs = {"content": [{"token": '"', "logprob": -0.5, "bytes": None, "top_logprobs": top}] * n_tokens}
    choices = [{"index": i, "message": {"content": "a\n"}, "logprobs": logprobs} for i in range(3)]
    return {"id": "chatcmpl-1", "choices": choices, "usage": {"total_tokens": n_tokens}}


@pytest.mark.parametrize(
    "value",
    [answer(0), answer(1), answer(256), answer(257), {}, [], {"a": {}}, [[], [1, [2, [3, [4, [5]]]]]], None, 1.5],
)
def test_the_pieces_are_one_json_value(value):
    assert "".join(json_pieces(value)) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("write", [event, lambda value: asyncio.run(json_bytes(value))], ids=["stream", "whole"])
def test_numbers_that_are_no_json_are_never_written(write, number):
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        write({"choices": [{"logprobs": {"content": [[number]]}}]})


@pytest.mark.slow
def test_the_event_loop_goes_on_while_an_answer_is_written():
    async def main() -> tuple[int, bytes]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        content = await json_bytes(answer(2000))
        counting.cancel()
        return turns, content

    turns, content = asyncio.run(main())
    assert json.loads(content) == answer(2000)
    assert max(map(len, json_pieces(answer(2000)))) < len(content) / 20
    assert turns >= len(content) // (8 * PIECE_BYTES)


def lists_of(value) -> list[list]:
    """All lists within a JSON value."""
    if isinstance(value, dict):
        return [found for member in value.values() for found in lists_of(member)]
    return [value, *(found for member in value for found in lists_of(member))] if isinstance(value, list) else []


def outputs(n: int) -> list[Output]:
    return [Output(0, (70 + i,), "ab"[i % 2], (TokenLogprobs(70 + i, -0.5, (), 1),)) for i in range(n)]


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


STREAMED = st.builds(
    lambda index, tokens, text, logprobs, reason, version: (
        index,
        Output(0, tokens, text, logprobs, reason, weights_version=version),
    ),
    st.integers(0, 1),
    st.lists(st.integers(70, 99), max_size=2).map(tuple),
    st.sampled_from(["", ANY_TEXT, '"', "é"]) | st.text(),
    st.sampled_from([(), outputs(1)[0].logprobs]),
    st.sampled_from([None, None, FinishReason.STOP]),
    st.integers(0, 1),
)


@pytest.mark.one_case
@pytest.mark.parametrize("form", [Completion, ChatCompletion])
@given(new=st.lists(STREAMED), shown=st.builds(Shown, st.just(False), *[st.booleans()] * 3))
def test_an_event_is_its_chunk_whether_or_not_its_fields_were_serialized_before(tokenizer, form, new, shown):
    streamed, chunked = (form(ANY_TEXT, tokenizer, [[5]], 2, shown) for _ in range(2))
    chunked._created = streamed._created
    chunks = (chunked.chunk(index, output) for index, output in new)
    assert streamed.events(new) == "".join(event(chunk) for chunk in chunks if chunk is not None)
    assert streamed.usage() == chunked.usage()


@pytest.mark.parametrize("form", [Completion, ChatCompletion])
def test_the_log_probability_of_a_masked_token_is_a_number(tokenizer, form):
    masked = Output(0, (70,), "a", (TokenLogprobs(70, -0.5, ((70, -0.5), (71, float("-inf"))), 1),))
    answer = form("micro", tokenizer, [[5]], 1)
    answer.add(0, masked)
    logprobs = answer.whole()["choices"][0]["logprobs"]
    if form is Completion:
        assert logprobs["top_logprobs"] == [{tokenizer.decode([70]): -0.5, tokenizer.decode([71]): -9999.0}]
    else:
        assert [entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]] == [-0.5, -9999.0]


@pytest.mark.parametrize(
    ("form", "none"),
    [
        (Completion, {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}),
        (ChatCompletion, {"content": [], "refusal": None}),
    ],
)
def test_log_probabilities_of_a_choice_without_tokens_are_empty_lists(tokenizer, form, none):
    answer = form("micro", tokenizer, [[5]], 1, Shown(logprobs=True))
    answer.add(0, Output(0, (1,), "", finish_reason=FinishReason.STOP))
    assert answer.whole()["choices"][0]["logprobs"] == none


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
