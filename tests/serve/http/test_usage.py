"""What answers say of themselves: cached tokens, usage in chunks, and what has stopped a text."""

import json

import httpx
import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.engine.request import FinishReason, Output
from octile.serve.http.responses import ChatCompletion, Completion

ANSWERS = [Completion, ChatCompletion]


def events(served, **fields):
    body = {"model": "micro", "prompt": "abc", "max_tokens": 3, "stream": True, **fields}
    lines = httpx.post(f"{served.url}/v1/completions", json=body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_chunks_have_usage_null_before_the_last_one_if_it_is_asked_for(served):
    *chunks, last = events(served, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["usage"]["completion_tokens"] == 3


def test_chunks_have_the_usage_so_far_if_it_is_asked_for(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(served, stream_options=options)]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 3)


def test_chunks_have_no_usage_if_it_is_not_asked_for(served):
    assert not any("usage" in chunk for chunk in events(served))


@pytest.mark.parametrize("kind", ANSWERS)
def test_cached_tokens_are_those_of_the_first_choice_of_each_prompt(tokenizer, kind):
    answer = kind("m", tokenizer, [[1] * 9, [2] * 9], 2)
    for index, cached in enumerate([4, 8, 0, 8]):
        answer.add(index, Output(index, (5,), "a", cached_tokens=cached))
    assert answer.whole()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("kind", ANSWERS)
def test_usage_has_the_drafts_of_all_choices(tokenizer, kind):
    answer = kind("m", tokenizer, [[1] * 9], 2)
    for index, drafted, accepted in ((0, 2, 1), (1, 3, 0), (0, 6, 5)):
        answer.add(index, Output(index, (5,), "a", drafted_tokens=drafted, accepted_tokens=accepted))
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 4}
    assert answer.whole()["usage"]["completion_tokens_details"] == details


@pytest.mark.parametrize("stopped_by", ["END", 7, None])
@pytest.mark.parametrize("kind", ANSWERS)
def test_choices_name_what_has_stopped_them(tokenizer, kind, stopped_by):
    last = Output(0, (5,), "a", finish_reason=FinishReason.STOP, stopped_by=stopped_by)
    whole, streamed = (kind("m", tokenizer, [[1]], 1) for _ in range(2))
    whole.add(0, last)
    assert whole.whole()["choices"][0]["stop_reason"] == stopped_by
    assert streamed.chunk(0, last)["choices"][0]["stop_reason"] == stopped_by
