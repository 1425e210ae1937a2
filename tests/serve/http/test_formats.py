"""Answers that follow a schema, a pattern, choices or a grammar, over HTTP, by an engine with random logits."""

import json
import re

import httpx
import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")
pytest.importorskip("llguidance", reason="octile[serve] is not installed")

import openai

from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.http.config import Limits, Parsers
from tests.chat.templates import V31, with_tokens
from tests.serve.fake_runner import FakeRunner
from tests.serve.http.conftest import Served
from tests.serve.http.trip import SCHEMA, STOP, STRICT, TRIP, is_trip, schema_format

MESSAGES = [{"role": "user", "content": "Where to, and how long?"}]


class EngineOfRandomLogits(Engine):
    """An engine with what a test's server asks for besides."""

    def __init__(self, tokenizer, n_pages=2000, n_drafts=0, max_batch=8):
        runner = FakeRunner(n_pages, vocab_size=tokenizer.vocab_size, max_ahead=max_batch, n_drafts=n_drafts)
        super().__init__(runner, tokenizer, EngineConfig(max_batch=max_batch, max_step_tokens=256, n_drafts=n_drafts))
        self.tokenizer, self.max_position = tokenizer, runner.max_position


@pytest.fixture(scope="module")
def served(tokenizer):
    running = Served(EngineOfRandomLogits(tokenizer), Limits(), (), None)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def caller(tokenizer):
    """A server of a model that thinks and calls functions."""
    parsers = Parsers("deepseek_r1", "deepseek_v31")
    engine = EngineOfRandomLogits(with_tokens(tokenizer))
    running = Served(engine, Limits(), (), V31, parsers=parsers)
    yield running
    running.stop()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(caller):
    """Ask the model that thinks and calls; `likely` are tokens that it writes soon."""

    def ask(likely=(), **fields):
        ids = [caller.engine.tokenizer.backend.token_to_id(text) for text in likely]
        body = {"model": "micro", "messages": MESSAGES, "max_tokens": 400, "seed": 3, **fields}
        body["logit_bias"] = {str(token): 7 for token in ids} | {str(caller.engine.tokenizer.encode("}")[0]): 6}
        with openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(**body)
            return [*answer] if fields.get("stream") else answer

    return ask


def complete(served, **fields) -> httpx.Response:
    body = {"model": "micro", "prompt": "a", "max_tokens": 200, **fields}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("n", [1, 5])
def test_a_chat_follows_a_schema(client, n):
    how = {"max_tokens": 200, "n": n, "seed": 1}
    answer = client.chat.completions.create(model="micro", messages=MESSAGES, response_format=schema_format(), **how)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * n
    assert all(is_trip(choice.message.content) for choice in answer.choices)


def test_the_plain_template_does_not_cut_a_text_that_follows_a_grammar(client):
    text = "a\n\nUser: b"
    body = {"structured_outputs": {"choice": [text]}}
    answer = client.chat.completions.create(model="micro", messages=MESSAGES, extra_body=body)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")


def test_a_streamed_chat_follows_a_schema(client):
    chunks = client.chat.completions.create(
        model="micro", messages=MESSAGES, response_format=schema_format(), max_tokens=200, seed=2, stream=True
    )
    assert is_trip("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def test_a_chat_that_is_cut_says_so(client):
    answer = client.chat.completions.create(
        model="micro", messages=MESSAGES, response_format=schema_format(), max_tokens=4, seed=2
    )
    assert answer.choices[0].finish_reason == "length"


def test_json_object_is_any_object(client, tokenizer):
    (brace,) = tokenizer.encode("}")
    answer = client.chat.completions.create(
        model="micro", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=300, seed=4,
        logit_bias={str(brace): 8},
    )  # fmt: skip
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "x" root | "y"'}, "x*y"),
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{.*\}"),
    ],
    ids=["regex", "choice", "grammar", "json", "json as a text"],
)
def test_completions_follow_structured_outputs(served, how, pattern):
    choice = complete(served, structured_outputs=how, seed=1).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"], re.DOTALL)


def test_the_format_text_is_any_text(served):
    plain, text = (complete(served, seed=1, max_tokens=9, **how).json()["choices"][0]["text"]
                   for how in ({}, {"response_format": {"type": "text"}}))  # fmt: skip
    assert plain == text


def test_a_stream_that_no_token_may_follow_is_counted_once_as_an_error_of_its_client(served):
    fields = {"structured_outputs": {"regex": 'a"'}, "bad_words": ['"'], "stream": True}
    body = {"model": "micro", "prompt": [5, 6, 7], "max_tokens": 9, **fields}

    def counted() -> float:
        """Errors of streams, and responses: the error may come before a busy server sends the head of the stream."""
        names = ("octile_http_stream_errors_total", "octile_http_responses_total")
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        parts = (line.split() for line in lines if line.startswith(names))
        return sum(float(value) for name, value in parts if name.endswith('{path="/v1/completions",status="400"}'))

    before = counted()
    assert "cannot be continued" in httpx.post(f"{served.url}/v1/completions", json=body).text
    assert counted() == before + 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs cannot be followed: "),
        ({"response_format": schema_format({"type": "fruit"})}, "response_format",
         "response_format cannot be followed: "),
        ({"response_format": schema_format({"properties": {"a": {"$ref": "#/nowhere"}}})}, "response_format",
         "response_format cannot be followed: "),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "json_schema must be given for the type json_schema, and for no other"),
        ({"response_format": {"type": "xml"}}, "response_format.type",
         "response_format.type must be 'text', 'json_object' or 'json_schema', not 'xml'"),
        ({"structured_outputs": {}}, "structured_outputs.json",
         "structured_outputs.json must be given, or one of regex, choice, grammar and json_object, and no other"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.json",
         "structured_outputs.json must be given, or one of regex, choice, grammar and json_object, and no other"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice",
         "structured_outputs.choice must be a list of at least 1, not []"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag",
         "structured_outputs.structural_tag must be null, not 'a'"),
        ({"structured_outputs": {"regex": '"'}, "bad_words": ['"']}, None,
         "choice 0 cannot be continued: no token may come next: the grammar, bad_words or min_tokens forbid all"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs",
         "structured_outputs and response_format are both given: give one of them"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens",
         "min_tokens must be 0 for a text that follows a grammar, not 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(served, fields, param, message):
    response = complete(served, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert "\n" not in error["message"]


THINKING = {"chat_template_kwargs": {"thinking": True}}
SECTION, THOUGHT_END = "<｜tool▁calls▁begin｜>", "</think>"


def are_valid(calls) -> bool:
    """Whether all calls have the arguments of their functions."""
    named = [(call.function.name, call.function.arguments) for call in calls]
    return all(is_trip(text) if name == "trip" else (name, json.loads(text)) == ("stop", {}) for name, text in named)


@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_is_required_follows_its_schema(chat, seed):
    (choice,) = chat(tools=[TRIP, STOP], tool_choice="required", seed=seed, parallel_tool_calls=False).choices
    assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == ("tool_calls", None, 1)
    assert are_valid(choice.message.tool_calls)


@pytest.mark.slow
def test_several_calls_may_be_required(chat):
    (choice,) = chat(["<｜tool▁call▁begin｜>"], tools=[TRIP, STOP], tool_choice="required").choices
    assert len(choice.message.tool_calls) > 1
    assert are_valid(choice.message.tool_calls)


@pytest.mark.parametrize("name", ["trip", "stop"])
def test_a_named_function_is_called(chat, name):
    named = {"type": "function", "function": {"name": name}}
    (choice,) = chat(tools=[TRIP, STOP], tool_choice=named).choices
    assert [call.function.name for call in choice.message.tool_calls] == [name]
    assert are_valid(choice.message.tool_calls)


def test_a_streamed_call_that_is_required_follows_its_schema(chat):
    chunks = chat(tools=[TRIP], tool_choice="required", parallel_tool_calls=False, stream=True)
    assert are_valid([call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()])
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def allowed(mode: str, *names: str) -> dict:
    """The choice of these functions alone."""
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


@pytest.mark.parametrize("name", ["trip", "stop"])
def test_only_an_allowed_function_is_called(chat, name):
    answer = chat([SECTION], tools=[TRIP, STOP], tool_choice=allowed("auto", name), parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name


@pytest.mark.parametrize("name", ["trip", "stop"])
def test_a_streamed_call_that_is_required_is_of_an_allowed_function(chat, name):
    choice = allowed("required", name)
    chunks = chat(tools=[TRIP, STOP], tool_choice=choice, parallel_tool_calls=False, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls] == [name]
    assert are_valid(calls)


def test_a_model_with_allowed_functions_may_write_text(chat, tokenizer):
    bias = {"logit_bias": {str(tokenizer.end): 8}}
    (choice,) = chat(tools=[TRIP, STOP], tool_choice=allowed("auto", "stop"), extra_body=bias).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def test_a_required_call_comes_after_a_thought(chat):
    likely = [THOUGHT_END]
    (choice,) = chat(
        likely, tools=[TRIP], tool_choice="required", parallel_tool_calls=False, extra_body=THINKING
    ).choices
    assert are_valid(choice.message.tool_calls)
    assert choice.message.content is None


def test_special_tokens_that_no_parser_looks_for_are_skipped(caller):
    begin = caller.engine.tokenizer.begin
    body = {"model": "micro", "messages": MESSAGES, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{caller.url}/v1/chat/completions", json={**body, "logit_bias": {str(begin): 100}}).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]) == (4, "")


def test_strict_calls_follow_their_schemas(chat):
    (choice,) = chat([SECTION], tools=[STRICT], max_tokens=600, parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    assert are_valid(choice.message.tool_calls)


def test_without_need_a_model_with_strict_functions_may_write_text(chat, tokenizer):
    bias = {"logit_bias": {str(tokenizer.end): 8}}
    (choice,) = chat(tools=[STRICT], extra_body=bias).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def test_a_schema_is_followed_after_a_thought(chat):
    """The prompt begins the thought, so that there is content only after its end."""
    (choice,) = chat([THOUGHT_END], response_format=schema_format(), extra_body=THINKING).choices
    assert is_trip(choice.message.content)


def test_a_choice_after_a_thought_and_a_newline_is_one_of_the_texts(chat):
    newline = "Ċ"  # as the tokenizer's bytes are spelled
    fields = {**THINKING, "structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = chat([THOUGHT_END, newline], extra_body=fields).choices
    assert choice.message.content in ("yes", "no")


@pytest.mark.parametrize("likely", [[SECTION], ["{"]], ids=["call", "content"])
def test_with_a_format_and_tools_the_answer_is_one_of_them(chat, likely):
    (choice,) = chat(likely, response_format=schema_format(), tools=[STRICT], parallel_tool_calls=False).choices
    message = choice.message
    assert are_valid(message.tool_calls) if likely == [SECTION] else is_trip(message.content)
    assert (message.tool_calls is None) != (message.content is None)


SPELLED = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def test_text_that_spells_a_call_is_no_call(chat):
    asked = {"tools": [TRIP], "extra_body": {"structured_outputs": {"choice": [SPELLED]}}}
    (choice,) = chat(["<"], **asked).choices
    assert (choice.message.content, choice.message.tool_calls) == (SPELLED, None)
    chunks = [chunk.choices[0].delta for chunk in chat(["<"], stream=True, **asked)]
    assert "".join(delta.content or "" for delta in chunks) == SPELLED
    assert not any(delta.tool_calls for delta in chunks)


def test_an_argument_may_spell_the_end_of_its_call(chat):
    schema = {
        "type": "object",
        "properties": {"s": {"const": SPELLED}},
        "required": ["s"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "say", "strict": True, "parameters": schema}}
    (choice,) = chat(tools=[tool], tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, json.loads(call.function.arguments)) == (None, {"s": SPELLED})


def test_a_call_that_is_required_leaves_a_format_no_place(chat):
    fields = {"response_format": schema_format(), "tools": [TRIP, STOP], "tool_choice": "required"}
    (choice,) = chat(["{"], **fields, parallel_tool_calls=False).choices
    assert choice.message.content is None
    assert are_valid(choice.message.tool_calls)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tool_choice must be 'none' or 'auto' without tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "go"}}, "tools": [TRIP, STOP]}, "tool_choice",
         "tool_choice must name a function of tools, 'trip', 'stop', not 'go'"),
        ({"tool_choice": allowed("auto", "stop", "go"), "tools": [TRIP, STOP]}, "tool_choice",
         "tool_choice must name a function of tools, 'trip', 'stop', not 'go'"),
        ({"tool_choice": allowed("auto", "stop")}, "tool_choice",
         "tool_choice must be 'none' or 'auto' without tools"),
        ({"tool_choice": "required", "tools": [
            STOP, {"type": "function", "function": {"name": "a", "parameters": {"type": "fruit"}}}]},
         "tools.1.function.parameters", "tools.1.function.parameters must have the type 'object', not 'fruit'"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {
            "properties": {"x": {"type": "fruit"}}}}}]},
         "tools.0.function.parameters", "tools.0.function.parameters cannot be followed: "),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name",
         "tools.0.function.name must have at most 128 letters from A to Z, digits, _, - and ., not 'a b'"),
        ({"tool_choice": "required", "tools": [STOP], "extra_body": {"min_tokens": 3}}, "min_tokens",
         "min_tokens must be 0 for a text that follows a grammar, not 3"),
    ],
    ids=[
        *("no tools", "no such function", "no such allowed function", "allowed without tools"),
        *("no object", "no schema", "no name", "min_tokens"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_made_are_refused(chat, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**fields)
    assert caught.value.body["message"].startswith(message)
    assert caught.value.param == param


def test_a_format_after_a_thought_needs_a_parser(tokenizer):
    running = Served(EngineOfRandomLogits(with_tokens(tokenizer)), Limits(), (), V31)
    body = {"model": "micro", "messages": MESSAGES, "response_format": schema_format(), **THINKING}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    running.stop()
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "response_format cannot be followed: the chat template begins a thought, and this server has no "
        "--reasoning-parser"
    )
