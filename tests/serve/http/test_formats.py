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
from octile.serve.http.config import Limits
from tests.serve.fake_runner import FakeRunner
from tests.serve.http.conftest import Served

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Where to, and how long?"}]


class EngineOfRandomLogits(Engine):
    """An engine with what a test's server asks for besides."""

    def __init__(self, tokenizer):
        runner = FakeRunner(n_pages=2000, vocab_size=tokenizer.vocab_size)
        super().__init__(runner, tokenizer, EngineConfig(max_batch=8, max_step_tokens=256))
        self.tokenizer, self.max_position = tokenizer, runner.max_position


@pytest.fixture(scope="module")
def served(tokenizer):
    running = Served(EngineOfRandomLogits(tokenizer), Limits(), (), None)
    yield running
    running.stop()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(served, **fields) -> httpx.Response:
    body = {"model": "micro", "prompt": "a", "max_tokens": 200, **fields}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


def is_trip(text: str) -> bool:
    trip = json.loads(text)
    return (
        set(trip) == {"city", "days"} and trip["city"] in SCHEMA["properties"]["city"]["enum"] and 0 < trip["days"] < 10
    )


def schema_format(schema=SCHEMA) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}


@pytest.mark.parametrize("n", [1, 5])
def test_a_chat_follows_a_schema(client, n):
    how = {"max_tokens": 200, "n": n, "seed": 1}
    answer = client.chat.completions.create(model="micro", messages=MESSAGES, response_format=schema_format(), **how)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * n
    assert all(is_trip(choice.message.content) for choice in answer.choices)


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
         "structured_outputs.structural_tag is unknown, or not supported here"),
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
