"""The server answers OpenAI's own client."""

import openai
import pytest

from octile.serve.engine.request import Output, TokenLogprobs
from octile.serve.http.responses import ChatCompletion


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client


PROMPT = "def f(x):"
REPEATED = "<|begin|>def f(x):" * 100


def begin_of_answer(tokenizer, n_tokens):
    """What the engine, which repeats the prompt, answers."""
    tokens = [tokenizer.begin, *tokenizer.encode(PROMPT)]
    return tokenizer.decode([tokens[i % len(tokens)] for i in range(n_tokens)])


def test_a_completion(client, tokenizer):
    answer = client.completions.create(model="micro", prompt=PROMPT, max_tokens=7)
    assert (answer.object, answer.model, len(answer.choices)) == ("text_completion", "micro", 1)
    assert answer.choices[0].text == begin_of_answer(tokenizer, 7)
    assert answer.choices[0].finish_reason == "length"
    n_prompt = len(tokenizer.encode(PROMPT)) + 1
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 7,
        "total_tokens": n_prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }


def test_a_completion_has_16_tokens_by_default(client):
    assert client.completions.create(model="micro", prompt=PROMPT).usage.completion_tokens == 16


def test_a_stream_has_the_same_text(client, tokenizer):
    chunks = list(client.completions.create(model="micro", prompt=PROMPT, max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == begin_of_answer(tokenizer, 40)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_the_last_chunk_has_the_usage_if_asked_for(client):
    *chunks, last = client.completions.create(
        model="micro", prompt=PROMPT, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    assert (last.choices, last.usage.completion_tokens) == ([], 5)
    assert all(chunk.usage is None for chunk in chunks)


def test_several_prompts_and_choices_are_in_order(client, tokenizer):
    prompts = [[5, 6, 7], [8]]
    answer = client.completions.create(model="micro", prompt=prompts, n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [tokenizer.decode(tokens) for tokens in ([5, 6, 7], [8, 8, 8])]
    assert [choice.text for choice in answer.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert answer.usage.prompt_tokens == 4


def test_a_stop_string_ends_the_text_before_it(client):
    answer = client.completions.create(model="micro", prompt="abc(d", max_tokens=50, stop=["("])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == "<|begin|>abc"


def test_logprobs_of_a_completion(client, tokenizer):
    logprobs = client.completions.create(model="micro", prompt=[70, 71], max_tokens=2, logprobs=1).choices[0].logprobs
    texts = [tokenizer.decode([token]) for token in (70, 71)]
    assert (logprobs.tokens, logprobs.token_logprobs) == (texts, [-0.5, -0.5])
    assert logprobs.top_logprobs == [{text: -0.5} for text in texts]
    assert logprobs.text_offset == [0, len(texts[0])]


def test_a_chat(client, tokenizer):
    answer = client.chat.completions.create(
        model="micro", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}],
        max_completion_tokens=1000,
    )  # fmt: skip
    prompt = f"System: Be brief.\n\nUser: {PROMPT}\n\nAssistant:"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content.startswith(f"<|begin|>{prompt}<|begin|>")
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt)) + 1


def test_an_answer_is_history_of_the_next_turn(client, tokenizer):
    messages = [{"role": "user", "content": PROMPT}]
    first = client.chat.completions.create(model="micro", messages=messages, max_tokens=5).choices[0].message
    question = {"role": "user", "content": "more"}
    answer = client.chat.completions.create(model="micro", messages=[*messages, first, question], max_tokens=1)
    prompt = f"User: {PROMPT}\n\nAssistant: {first.content}\n\nUser: more\n\nAssistant:"
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt)) + 1


def test_a_streamed_chat(client):
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model="micro", messages=messages, max_tokens=30)
    chunks = list(client.chat.completions.create(model="micro", messages=messages, max_tokens=30, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_logprobs_of_a_chat(client):
    answer = client.chat.completions.create(
        model="micro", messages=[{"role": "user", "content": "a"}], max_tokens=1, logprobs=True, top_logprobs=1
    )
    (entry,) = answer.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("<|begin|>", -0.5, list(b"<|begin|>"))
    assert entry.top_logprobs[0].token == "<|begin|>"


def test_logprobs_of_a_chat_have_the_bytes_of_half_a_character(tokenizer):
    half = tokenizer.token_bytes.index(b"\xc3")
    answer = ChatCompletion("micro", tokenizer, [[1]], 1)
    answer.add(0, Output(0, (half,), logprobs=(TokenLogprobs(half, -0.5, ((half, -0.5),), 1),)))
    (entry,) = answer.whole()["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == entry["top_logprobs"][0]["bytes"] == [0xC3]


@pytest.mark.slow
def test_a_chat_has_the_rest_of_the_context_by_default(client, served):
    usage = client.chat.completions.create(model="micro", messages=[{"role": "user", "content": "a"}]).usage
    assert usage.total_tokens == served.service.context


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").id == "micro"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_an_unknown_model_is_refused(client):
    with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here; 'micro' is") as caught:
        client.completions.create(model="gpt", prompt="")
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        "model_not_found", "model", "invalid_request_error",
    )  # fmt: skip
