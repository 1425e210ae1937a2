"""Bodies: the guide names all fields, and of one with very many wrong items little is done before it is refused."""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from pydantic import ValidationError

from octile.serve.engine.request import Sampling
from octile.serve.http.config import Limits
from octile.serve.http.neutral import is_neutral
from octile.serve.http.protocol import ChatBody, CompletionBody, Message, StreamOptions, parse
from octile.serve.http.responses import ApiError

MANY = 5000
UNKNOWN = {f"field{i}": 0 for i in range(MANY)}
TEXT = {"type": "text", "text": "a"}


def user(**fields) -> list[dict]:
    return [{"role": "user", **fields}]


def completion(**fields) -> tuple[type, dict]:
    return CompletionBody, {"model": "micro", "prompt": "a", **fields}


def chat(**fields) -> tuple[type, dict]:
    return ChatBody, {"model": "micro", "messages": user(content="a"), **fields}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (completion(prompt=[{}] * MANY), "prompt must be a text, a list of texts"),
        (completion(prompt=[[{}]] * MANY), "prompt must be a text, a list of texts"),
        (completion(prompt=[[{}] * MANY]), "prompt must be a text, a list of texts"),
        (completion(prompt=["a"] * MANY), "or a list of lists of tokens, of at most 2048 prompts"),
        (completion(prompt=[[]] * MANY), "or a list of lists of tokens, of at most 2048 prompts"),
        (completion(stop=[0] * MANY), "stop must be a text, or a list of at most 16 texts"),
        (
            completion(logit_bias=dict.fromkeys(UNKNOWN, "a")),
            "logit_bias must have tokens, whole numbers from 0, as names, not",
        ),
        (completion(**UNKNOWN), "field0 is unknown, or not supported here"),
        (completion(stream=True, stream_options=UNKNOWN), "stream_options.field0 is unknown, or not supported here"),
        (chat(messages=[{}] * MANY), "messages.0.role is missing"),
        (chat(messages=user(content="a") * MANY), "messages must be a list of at most 2048, not a list of 5000 items"),
        (chat(messages=user(content="a", **UNKNOWN)), "messages.0.field0 is unknown, or not supported here"),
        (chat(messages=user(content=[{}] * MANY)), "messages.0.content.0.type is missing"),
        (chat(messages=user(content=[TEXT] * MANY)), "a list of parts that are text, at most 2048"),
        (chat(messages=user(content=[{**TEXT, **UNKNOWN}])), "messages.0.content.0.field0 is unknown, or not"),
        (chat(response_format={"type": "text", **UNKNOWN}), "response_format.field0 is unknown, or not supported here"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else value,
)
def test_a_body_with_very_many_errors_is_refused_for_the_first(body, message):
    form, fields = body
    content = json.dumps(fields).encode()
    with pytest.raises(ValidationError) as caught:
        form.model_validate_json(content)
    assert caught.value.error_count() <= 4  # one for each member of a union
    with pytest.raises(ApiError) as refused:
        parse(form, content)
    assert message in refused.value.message
    assert refused.value.param is not None
    assert refused.value.message.startswith(refused.value.param)


def test_as_many_tokens_as_a_context_has_are_one_prompt():
    form, fields = completion(prompt=[5] * 160_000)
    assert parse(form, json.dumps(fields).encode()).prompts == [[5] * 160_000]


@pytest.mark.parametrize("form", [CompletionBody, ChatBody, Message, StreamOptions, Limits])
def test_every_field_and_limit_is_in_the_guide(form):
    guide = (Path(__file__).parents[3] / "docs/http_server.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(form)] if is_dataclass(form) else list(form.model_fields)
    shown = {name: f"--limits.{name.replace('_', '-')}" if form is Limits else name for name in names}
    assert [name for name, text in shown.items() if not re.search(rf"[`.]{text}[`.]", guide)] == []


@pytest.mark.parametrize("form", [CompletionBody, ChatBody])
def test_every_field_of_other_servers_is_in_the_guide(form):
    guide = (Path(__file__).parents[3] / "docs/http_server.md").read_text(encoding="utf-8")
    assert [name for name in form.neutral if f"`{name}`" not in guide] == []


@pytest.mark.parametrize("form", [CompletionBody, ChatBody])
def test_fields_of_other_servers_are_not_fields_of_octile(form):
    assert not set(form.neutral) & set(form.model_fields)


NEEDED = {CompletionBody: {"prompt": "a"}, ChatBody: {"messages": user(content="a")}}
NEUTRAL = [(form, name, value) for form in NEEDED for name in form.neutral for value in (None, *form.neutral[name])]
OTHERS = [(form, name) for form in NEEDED for name in form.neutral]


@pytest.mark.one_case
@pytest.mark.parametrize(("form", "name", "value"), NEUTRAL)
def test_a_field_of_another_server_is_accepted_with_values_that_change_nothing(form, name, value):
    parse(form, json.dumps({"model": "micro", **NEEDED[form], name: value}).encode())


@pytest.mark.parametrize(("form", "name"), OTHERS)
@pytest.mark.parametrize("value", [7, {"a": 1}, "other"])
def test_a_field_of_another_server_is_refused_with_another_value(form, name, value):
    with pytest.raises(ApiError) as refused:
        parse(form, json.dumps({"model": "micro", **NEEDED[form], name: value}).encode())
    assert refused.value.message.startswith(f"{name} must be ")
    assert "null, not " in refused.value.message
    assert refused.value.param == name


@pytest.mark.parametrize(("value", "neutral"), [(1, True), (True, 1), (0, False), (False, 0)])
def test_true_is_not_1(value, neutral):
    assert not is_neutral(value, (neutral,))
    assert is_neutral(neutral, (neutral,))


def sampling(**fields):
    form, body = completion(**fields)
    return parse(form, json.dumps(body).encode()).sampling(16, None, 0, {"min_p": 0.3}, ((7, 8),), "")


def test_fields_of_the_sampling_are_those_of_the_request():
    found = sampling(
        min_p=0.1, repetition_penalty=1.2, frequency_penalty=-1, presence_penalty=0.5, logit_bias={"5": 3, "0": -100},
        stop_token_ids=[3, 4, 3], min_tokens=2, skip_special_tokens=False,
    )  # fmt: skip
    assert found == Sampling(
        16, 1.0, seed=None, min_p=0.1, repetition_penalty=1.2, frequency_penalty=-1.0, presence_penalty=0.5,
        logit_bias=((5, 3.0), (0, -100.0)), stop_token_ids=(3, 4), min_tokens=2, bad_words=((7, 8),),
    )  # fmt: skip


def test_what_a_request_does_not_give_is_the_model_s_or_changes_nothing():
    assert sampling() == Sampling(16, 1.0, seed=None, min_p=0.3, bad_words=((7, 8),), skip_special_tokens=True)


def test_null_is_accepted_wherever_a_field_has_a_default():
    for form, needed in (
        (CompletionBody, {"prompt": "a"}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        nulls = {name: None for name, field in form.model_fields.items() if not field.is_required()}
        parse(form, json.dumps({"model": "micro", **needed, **nulls}).encode())
