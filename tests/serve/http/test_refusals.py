"""What the server refuses: each with its status, in OpenAI's format, and nothing of it is left."""

import json

import httpx
import pytest

from octile.serve.http.config import Limits
from tests.serve.fake_engine import NAN
from tests.serve.http.conftest import wait_until

COMPLETION = {"model": "micro", "prompt": "a"}
CHAT = {"model": "micro", "messages": [{"role": "user", "content": "a"}]}
RESPONSE = {"model": "micro", "input": "a"}
PART = {"type": "text", "text": "a"}
ANSWER = {"role": "assistant", "content": "a"}


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    (name,) = response.json()
    assert name == "error"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def post(served, path, body, **options) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json=body, **options)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b'{"model": "micro", "prompt"', "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"model": "micro", "prompt": "\\ud800"}', "the body has an escape that is no character"),
        (b"[]", "the body must be an object"),
        (b"null", "the body must be an object"),
        (b'{"model": "micro", "prompt": "a", "temperature": NaN}', "temperature must be finite, not nan"),
    ],
    ids=["empty", "cut off", "not UTF-8", "nested", "half a surrogate pair", "list", "null", "NaN"],
)
def test_a_body_that_is_no_json_object(served, body, message):
    response = httpx.post(f"{served.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert served.is_idle()


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("completions", {"prompt": "a"}, "model", "model is missing"),
        ("completions", {"model": "micro"}, "prompt", "prompt is missing"),
        ("completions", {**COMPLETION, "prompt": 5}, "prompt", "prompt must be a text, a list of texts"),
        ("completions", {**COMPLETION, "prompt": []}, "prompt", "prompt must not be an empty list"),
        ("completions", {**COMPLETION, "prompt": [[]]}, "prompt", "prompt"),
        ("completions", {**COMPLETION, "prompt": [10**6]}, "prompt", "vocabulary"),
        ("completions", {**COMPLETION, "prompt": [-1]}, "prompt", "a list of tokens (whole numbers from 0)"),
        ("completions", {**COMPLETION, "temperature": 3}, "temperature", "temperature must be at most 2, not 3"),
        ("completions", {**COMPLETION, "prompt": ["a", 1]}, "prompt", "prompt must be a text, a list of texts"),
        ("completions", {**COMPLETION, "echo": 1}, "echo", "echo must be true or false, not 1"),
        ("completions", {**COMPLETION, "suffix": "b"}, "suffix", "suffix must be empty"),
        ("completions", {**COMPLETION, "best_of": 3}, "best_of", "best_of must be n, 1, not 3"),
        ("completions", {**COMPLETION, "best_of": 2, "n": None}, "best_of", "best_of must be n, 1, not 2"),
        ("completions", {**COMPLETION, "logprobs": 21}, "logprobs", "logprobs must be at most 20, not 21"),
        ("completions", {**COMPLETION, "max_tokens": -1}, "max_tokens", "max_tokens must be at least 0, not -1"),
        ("completions", {**COMPLETION, "max_tokens": "9"}, "max_tokens", "max_tokens must be a whole number, not '9'"),
        ("completions", {**COMPLETION, "temperature": -1}, "temperature", "temperature must be at least 0"),
        ("completions", {**COMPLETION, "top_p": 0}, "top_p", "top_p must be above 0, not 0"),
        ("completions", {**COMPLETION, "top_k": 10**30}, "top_k",
         "top_k must be at most 2147483647, not 1000000000"),
        ("chat/completions", {**CHAT, "top_k": 2**31}, "top_k", "top_k must be at most 2147483647, not 2147483648"),
        ("completions", {**COMPLETION, "temperature": 1e-39}, "temperature", "temperature must be 0, or"),
        ("chat/completions", {**CHAT, "temperature": 1e-300}, "temperature", "temperature must be 0, or"),
        ("completions", {**COMPLETION, "n": 129}, "n", "n must be at most 128, not 129"),
        ("completions", {**COMPLETION, "stop": [""]}, "stop", "stop must be a text, or a list of at most 16 texts"),
        ("completions", {**COMPLETION, "logit_bias": {"a": 1}}, "logit_bias",
         "logit_bias must have tokens, whole numbers from 0, as names, not 'a'"),
        ("completions", {**COMPLETION, "logit_bias": {"5": "1"}}, "logit_bias",
         "logit_bias must have numbers from -100 to 100, not '1'"),
        ("completions", {**COMPLETION, "logit_bias": {"5": 101}}, "logit_bias",
         "logit_bias must have numbers from -100 to 100, not 101"),
        ("completions", {**COMPLETION, "logit_bias": {"5": 1, "05": 1}}, "logit_bias",
         "logit_bias must have each token once"),
        ("completions", {**COMPLETION, "logit_bias": {"100000": 1}}, "logit_bias",
         "logit_bias has the token 100000, but the model's vocabulary has"),
        ("completions", {**COMPLETION, "stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
        ("completions", {**COMPLETION, "presence_penalty": 3}, "presence_penalty",
         "presence_penalty must be at most 2, not 3"),
        ("completions", {**COMPLETION, "repetition_penalty": 0}, "repetition_penalty",
         "repetition_penalty must be above 0, not 0"),
        ("completions", {**COMPLETION, "min_p": 1.1}, "min_p", "min_p must be at most 1, not 1.1"),
        ("completions", {**COMPLETION, "min_tokens": 17}, "min_tokens",
         "min_tokens must be at most the tokens of the answer, 16, not 17"),
        ("completions", {**COMPLETION, "bad_words": [""]}, "bad_words",
         "bad_words must be a list of texts, none of them empty"),
        ("completions", {**COMPLETION, "typical_p": 0.1}, "typical_p", "typical_p is unknown, or not supported here"),
        ("completions", {**COMPLETION, "guided_regex": "a+"}, "guided_regex",
         "guided_regex is unknown, or not supported here; perhaps you meant structured_outputs.regex"),
        ("completions", {**COMPLETION, "max_completion_tokens": 3}, "max_completion_tokens",
         "max_completion_tokens is unknown, or not supported here; perhaps you meant max_tokens"),
        ("chat/completions", {**CHAT, "max_output_tokens": 3}, "max_output_tokens",
         "max_output_tokens is unknown, or not supported here; perhaps you meant max_tokens"),
        ("completions", {**COMPLETION, "stop_sequences": ["a"]}, "stop_sequences",
         "stop_sequences is unknown, or not supported here; perhaps you meant stop"),
        ("completions", {**COMPLETION, "enable_thinking": False}, "enable_thinking",  # has no chat template
         "enable_thinking is unknown, or not supported here"),
        ("chat/completions", {**CHAT, "enable_thinking": False}, "enable_thinking",
         "enable_thinking is unknown, or not supported here; perhaps you meant chat_template_kwargs.enable_thinking"),
        ("chat/completions", {**CHAT, "temprature": 1}, "temprature",
         "temprature is unknown, or not supported here; perhaps you meant temperature"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "a", "names": "b"}]}, "messages.0.names",
         "messages.0.names is unknown, or not supported here; perhaps you meant messages.0.name"),
        ("chat/completions", {**CHAT, "priority": 3}, "priority", "priority must be 0 or null, not 3"),
        ("completions", {**COMPLETION, "\x1b[31m": 1}, "'\\x1b[31m'",
         "'\\x1b[31m' is unknown, or not supported here"),
        ("completions", {**COMPLETION, "stream_options": {}}, "stream_options",
         "stream_options is only for stream true"),
        ("completions", {**COMPLETION, "stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats",
         "stream_options.continuous_usage_stats is only for stream_options.include_usage true"),
        ("chat/completions", {"model": "micro", "messages": []}, "messages",
         "messages must be a list of at least 1, not []"),
        ("chat/completions", {**CHAT, "messages": [{"role": "king", "content": ""}]}, "messages.0.role",
         "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool', not 'king'"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": 1}]}, "messages.0.content",
         "messages.0.content must be a text, or a list of parts that are text, at most 2048, not 1"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.0.content.0.type", "messages.0.content.0.type must be 'text', not 'image_url'"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{**PART, "text": None}]}]},
         "messages.0.content.0.text", "messages.0.content.0.text must be a text, not null"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{**PART, "a": 1}]}]},
         "messages.0.content.0.a", "messages.0.content.0.a is unknown, or not supported here"),
        ("chat/completions", {**CHAT, "tool_choice": "zz"}, "tool_choice",
         """tool_choice must be 'none', 'auto', 'required', or {"type": "function", "function": {"name": NAME}} """
         """or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": FUNCTIONS}}, not """),
        ("responses", {**RESPONSE, "tool_choice": "zz"}, "tool_choice",
         """tool_choice must be 'none', 'auto', 'required', or {"type": "function", "name": NAME} """
         """or {"type": "allowed_tools", "mode": "auto" or "required", "tools": FUNCTIONS}, not 'zz'"""),
        ("responses", {**RESPONSE, "input": 5}, "input", "input must be a text, or a list of items, not 5"),
        ("responses", {**RESPONSE, "input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
         "input.0.content.0.type", "input.0.content.0.type must be 'input_text' or 'output_text', not 'text'"),
        ("responses", {**RESPONSE, "structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "text"}}},
         "structured_outputs", "structured_outputs and text.format are both given: give one of them"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages.0.content",
         "messages.0.content must be a text, or a list of parts that are text"),
        ("chat/completions", {**CHAT, "messages": [{"role": "system", "content": None}]}, "messages.0.content",
         "messages.0.content must be a text, or a list of parts that are text, at most 2048, not null"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": []}]}, "messages.0.content",
         "messages.0.content must be a text, or a list of parts that are text"),
        ("chat/completions", {**CHAT, "messages": [ANSWER | {"refusal": "No."}]}, "messages.0.refusal",
         "messages.0.refusal must be empty, not 'No.'"),
        ("chat/completions", {**CHAT, "messages": [ANSWER | {"tool_calls": [{}]}]}, "messages.0.tool_calls.0.id",
         "messages.0.tool_calls.0.id is missing"),
        ("chat/completions", {**CHAT, "messages": [ANSWER | {"audio": {"id": "a"}}]}, "messages.0.audio",
         "messages.0.audio must be empty, not an object of 1 fields"),
        ("chat/completions", {**CHAT, "messages": [ANSWER | {"mood": None}]}, "messages.0.mood",
         "messages.0.mood is unknown, or not supported here"),
        ("chat/completions", {**CHAT, "tools": [{}]}, "tools.0.type", "tools.0.type is missing"),
        ("chat/completions", {**CHAT, "functions": [{}]}, "functions", "functions must be empty"),
        ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, "modalities.1",
         "modalities.1 must be 'text', not 'audio'"),
        ("chat/completions", {**CHAT, "web_search_options": {}}, "web_search_options",
         "web_search_options must be null, not an object of 0 fields"),
        ("chat/completions", {**CHAT, "reasoning_effort": "high"}, "reasoning_effort",
         "reasoning_effort must be 'none' for this model"),
        ("chat/completions", {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation", "stream_options.include_obfuscation must be false, not true"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs true"),
        ("chat/completions", {**CHAT, "include_reasoning": False}, "include_reasoning",
         "include_reasoning must be true or null, not false"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_or_not_supported(served, path, body, param, message):
    error = error_of(post(served, path, body), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert served.is_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {**COMPLETION, "best_of": 1, "n": None}),
        ("completions", {**COMPLETION, "stream": True, "stream_options": {"include_obfuscation": False}}),
        ("chat/completions", {**CHAT, "modalities": ["text"], "verbosity": "medium", "reasoning_effort": "none"}),
        ("chat/completions", {**CHAT, "reasoning_effort": None, "prediction": None, "web_search_options": None}),
        ("chat/completions", {**CHAT, "functions": [], "function_call": "none", "audio": None, "verbosity": None}),
        ("chat/completions", {**CHAT, "top_logprobs": 0, "include_reasoning": True, "separate_reasoning": True}),
        ("responses", {**RESPONSE, "top_logprobs": 0, "include_reasoning": True, "stream_options": {}}),
        (
            "completions",
            {
                **COMPLETION,
                "structured_outputs": {
                    "choice": ["a"],
                    "disable_any_whitespace": False,
                    "whitespace_pattern": None,
                    "structural_tag": None,
                },
            },
        ),
    ],
)
def test_a_value_that_changes_nothing_is_accepted(served, path, body):
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    response = post(served, path, {**body, limit: 1})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("responses", "metadata", '{"a": [0, {"b": NaN}]}'),
        ("completions", "metadata", '{"a": [0, {"b": 1e999}]}'),
        ("chat/completions", "chat_template_kwargs", '{"a": [0, {"b": -Infinity}]}'),
    ],
)
def test_a_number_that_is_none_is_refused_wherever_it_is(served, path, field, value):
    body = {"responses": RESPONSE, "completions": COMPLETION, "chat/completions": CHAT}[path]
    content = json.dumps(body).removesuffix("}") + f', "{field}": {value}}}'
    headers = {"content-type": "application/json"}
    error = error_of(httpx.post(f"{served.url}/v1/{path}", content=content, headers=headers), 400)
    assert error["param"] == f"{field}.a.1.b"
    assert error["message"].startswith(f"{field}.a.1.b must be finite, not")


def test_fields_of_an_answer_that_are_empty_are_history(served):
    empty = {"refusal": None, "tool_calls": [], "function_call": None, "annotations": [], "audio": None}
    message = {**ANSWER, **empty, "reasoning_content": None}
    body = {**CHAT, "messages": [*CHAT["messages"], message, *CHAT["messages"]], "max_tokens": 1}
    assert post(served, "chat/completions", body).status_code == 200


def test_a_wrong_field_of_a_stream_has_its_status_too(served):
    error = error_of(post(served, "completions", {**COMPLETION, "max_tokens": 10**6, "stream": True}), 400)
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_that_exceeds_the_context(served):
    context = served.service.context
    error = error_of(post(served, "completions", {**COMPLETION, "prompt": [5] * context}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"] == (
        f"the prompt is too long: this model's maximum context length is {context} tokens, "
        f"but the prompt has {context}, and one new token is needed"
    )
    messages = [{"role": "user", "content": "x(" * context}]
    error = error_of(post(served, "chat/completions", {**CHAT, "messages": messages}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].startswith("the prompt is too long: this model's maximum context length is ")
    assert served.is_idle()


def test_new_tokens_that_exceed_the_context_with_the_prompt(served):
    context = served.service.context
    body = {**COMPLETION, "prompt": [5] * (context - 9), "max_tokens": 10}
    error = error_of(post(served, "completions", body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"] == (
        f"max_tokens is too large: this model's maximum context length is {context} tokens, "
        f"but the prompt has {context - 9} and max_tokens is 10"
    )


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_that_never_fits_is_not_encoded(serve, monkeypatch, path):
    served = serve(max_position=100)
    tokenizer, name = served.service.tokenizer, "prompt" if path == "completions" else "messages"
    text = "x" * (1 + 100 * max(map(len, tokenizer.token_bytes)))
    assert tokenizer.fewest_tokens(text) == 101
    monkeypatch.setattr(tokenizer, "backend", None)
    monkeypatch.setattr(served.service.chat, "_backend", None)
    message = {"role": "user", "content": text}
    body = {**COMPLETION, "prompt": text} if name == "prompt" else {**CHAT, "messages": [message]}
    error = error_of(post(served, path, body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    assert "the prompt has at least 10" in error["message"]


def test_a_prompt_that_the_model_does_not_know(serve):
    served = serve()
    error = error_of(post(served, "completions", {**COMPLETION, "prompt": [[5], [10**6]]}), 400)
    assert error["message"].startswith("prompt has the token 1000000, but the model's vocabulary has ")
    assert served.service.in_flight == 0


def test_more_tokens_than_the_server_allows(serve):
    served = serve(Limits(new_tokens=10))
    assert post(served, "completions", {**COMPLETION, "max_tokens": 10}).status_code == 200
    error = error_of(post(served, "completions", {**COMPLETION, "max_tokens": 11}), 400)
    assert error["message"] == "max_tokens must be at most 10, the limit of this server, not 11"
    assert post(served, "chat/completions", CHAT).json()["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
def test_a_body_that_is_too_large(serve, announced):
    served = serve(Limits(body=2000))
    body = b'{"model": "micro", "prompt": "' + b"a" * 100_000 + b'"}'
    content = body if announced else (body[i : i + 1000] for i in range(0, len(body), 1000))
    response = httpx.post(f"{served.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "more than 2000 bytes" in error_of(response, 413)["message"]
    assert post(served, "completions", COMPLETION).status_code == 200


def test_a_body_that_is_not_announced_as_json(served):
    error = error_of(
        httpx.post(f"{served.url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415
    )
    assert error["message"] == "content-type must be application/json, not text/plain"


def test_a_body_that_is_compressed(served):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = error_of(httpx.post(f"{served.url}/v1/completions", content=b"\x1f\x8b", headers=headers), 415)
    assert error["message"] == "content-encoding must be identity, not gzip: compressed bodies are not read"


def test_an_unknown_method(served):
    error = error_of(httpx.get(f"{served.url}/v1/completions"), 405)
    assert error["message"] == "/v1/completions has no method GET, but POST"


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/embeddings", ""),
        ("/v1/responses/input_tokens", ""),
        ("/chat/completions", "; perhaps you meant /v1/chat/completions"),
        ("/v1/v1/chat/completions", "; perhaps you meant /v1/chat/completions"),
        ("/models", "; perhaps you meant /v1/models"),
        ("//", ""),
    ],
)
def test_an_unknown_path(served, path, meant):
    error = error_of(httpx.post(f"{served.url}{path}", json=RESPONSE), 404)
    assert error["message"] == f"there is no path '{path}' here{meant}"


@pytest.mark.parametrize(("given", "status"), [("one", 200), ("two", 200), ("three", 401), (None, 401)])
def test_api_keys(serve, given, status):
    served = serve(api_keys=("one", "two"))
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    response = post(served, "completions", COMPLETION, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert error_of(httpx.get(f"{served.url}/v1/models", headers=headers), 401)
    assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.parametrize("path", ["health", "v1/completions", ""])
def test_another_sites_name_is_refused_where_only_this_machine_reaches_the_server(serve, path):
    served = serve(hosts=("mybox",))

    def status(host: str) -> int:
        return httpx.get(f"{served.url}/{path}", headers={"host": host}).status_code

    right = 405 if path == "v1/completions" else 200
    names = ["localhost:8000", "LOCALHOST", "a.localhost", "127.0.0.1:1", "[::1]:8000", "10.0.0.1", "mybox:80"]
    assert [status(host) for host in names] == [right] * len(names)
    assert [status(host) for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "")] == [403] * 4
    error = error_of(httpx.get(f"{served.url}/health", headers={"host": "evil.example"}), 403)
    assert "host 'evil.example' is refused: without an API key" in error["message"]


def test_any_name_is_answered_where_others_reach_the_server(serve):
    assert httpx.get(f"{serve().url}/health", headers={"host": "any.example"}).status_code == 200


def test_a_request_with_more_choices_than_the_server_takes(serve):
    served = serve(Limits(in_flight=3))
    error = error_of(post(served, "completions", {**COMPLETION, "n": 4}), 400)
    assert error["message"] == "the request has 4 choices, but this server takes at most 3 at once"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_beyond_those_in_flight_is_refused_until_they_end(serve, stream):
    served = serve(Limits(in_flight=2, drain=0), step_seconds=0.01)
    body = {**COMPLETION, "max_tokens": 3000, "n": 2, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        response = post(served, "completions", {**COMPLETION, "stream": stream})
        error = error_of(response, 503)
        assert (error["code"], error["type"], response.headers["retry-after"]) == ("overloaded", "server_error", "1")
    wait_until(served.is_idle)
    assert post(served, "completions", COMPLETION).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_takes_too_long(serve, stream):
    served = serve(Limits(seconds=0.3), step_seconds=0.02)
    response = post(served, "completions", {**COMPLETION, "max_tokens": 4000, "stream": stream})
    if stream:
        last = response.text.strip().rpartition("\n\n")[2]
        assert '"code":"timeout"' in last
    else:
        assert error_of(response, 504)["code"] == "timeout"
        assert response.headers["x-should-retry"] == "false"
    wait_until(served.is_idle)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_fails_alone(served, stream):
    response = post(served, "completions", {**COMPLETION, "prompt": [5, NAN], "stream": stream})
    message = "the engine failed in choice 0: the model's logits are NaN"
    if stream:
        assert message in response.text.strip().rpartition("\n\n")[2]
    else:
        assert error_of(response, 500)["message"] == message
    wait_until(served.is_idle)
    assert post(served, "completions", COMPLETION).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_that_fails_ends_the_server(serve, stream):
    served = serve(fails_after=3, step_seconds=0.01)
    response = post(served, "completions", {**COMPLETION, "max_tokens": 50, "stream": stream})
    message = "the engine has failed: RuntimeError: a kernel has failed"
    if stream:
        assert message in response.text
    else:
        assert error_of(response, 500)["message"] == message
    served.thread.join()
    assert str(served.error) == "a kernel has failed"
