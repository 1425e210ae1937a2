"""A parser of calls, while the text comes."""

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, lists, sampled_from

from octile.serve.http.tools.formats import FORMATS
from octile.serve.http.tools.parser import Called, CallFormat, CallText, ToolCall, ToolParser, is_mapping
from tests.serve.http.pieces import CUTS, split

FORM = CallFormat("[[", "]]", "<call>", "</call>", lambda body: CallText(*body.split(":", 1)) if ":" in body else None)
ADD, SUB = '<call>add:{"a": 1}</call>', '<call>sub:{"b": 2}</call>'


def parsed(*pieces: str, form: CallFormat = FORM, is_parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the name and arguments of each call."""
    parser = ToolParser(form, is_parallel)
    parts = [*map(parser.push, pieces), parser.end()]
    calls = [call for part in parts for call in part.calls]
    assert [call.number for call in calls] == list(range(len(calls)))
    return "".join(part.content for part in parts), [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("", "", []),
        ("a [b] c", "a [b] c", []),
        (f"[[{ADD}]]", "", ["add"]),
        (f"I add.\n[[{ADD}{SUB}]]", "I add.\n", ["add", "sub"]),
        (f"[[ {ADD}\n{SUB}\n]]", "", ["add", "sub"]),
        (f"[[{ADD}]]then[[{SUB}]].", "then.", ["add", "sub"]),
        (f"[[{ADD}", "", ["add"]),
        (f"{ADD}", ADD, []),
    ],
)
def test_a_text_is_divided_into_calls_and_other_text(text, content, names):
    assert (parsed(text)[0], [name for name, _ in parsed(text)[1]]) == (content, names)


@pytest.mark.parametrize(
    "malformed",
    ["[[", "[[]]", "[[a", "[[<ca", "[[<call>", "[[<call>add", "[[<call>add:{}", "[[<call>add:{}</cal",
     "[[<call>add</call>]]", "[[<call>:{}</call>]]", "[[<call>add:1</call>]]", "[[<call>add:{a}</call>]]",
     '[[<call>add:{"a": NaN}</call>]]', f"[[one {ADD}]]", f"[[ <call>add:{{</call>{ADD}]]"],
)  # fmt: skip
def test_malformed_calls_are_text(malformed):
    assert parsed(f"a{malformed}") == (f"a{malformed}", [])


@pytest.mark.parametrize(
    "rest", ["<call>sub:1</call>]]", "<call>sub:{}", " and ", f"<call></call>{SUB}]] [[{SUB}]]", "]"]
)
def test_from_a_malformed_call_on_the_text_has_no_calls(rest):
    assert parsed(f"[[{ADD}{rest}") == (rest, [("add", '{"a": 1}')])


def test_a_call_is_returned_when_it_is_complete():
    parser = ToolParser(FORM)
    assert parser.push('a[[<call>add:{"a": 1}</call') == Called("a")
    assert not parser.has_calls
    ((call,),) = [parser.push(">").calls]
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    assert call.id.startswith("chatcmpl-tool-")
    assert parser.has_calls


def test_only_the_first_call_is_returned_if_there_must_be_one():
    assert parsed(f"a[[{ADD}{SUB}]]b[[{SUB}]]", is_parallel=False) == ("ab", [("add", '{"a": 1}')])


def test_the_fields_of_a_call():
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert ToolCall(0, "x", "add", "{}").fields() == call


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}", True), ('{"a": [1]}', True), ("[]", False), ("", False), ("{}}", False), ("{'a': 1}", False),
     ('{"a": Infinity}', False), ('{"a":' * 100_000, False)],
)  # fmt: skip
def test_arguments_are_a_json_object(text, expected):
    assert is_mapping(text) is expected


def fragments(form: CallFormat) -> list[str]:
    """What texts of a format have: tags, parts of them, and what is between them."""
    tags = list(form[:4])
    separators = ["<｜tool▁sep｜>", "<|tool_call_argument_begin|>"]
    bodies = [
        "function<｜tool▁sep｜>f\n```json\n{}\n```",
        "f<｜tool▁sep｜>{}",
        'functions.f:0<|tool_call_argument_begin|>{"a": "é"}',
    ]
    complete = [form.call_begin + body + form.call_end for body in bodies]
    return [*tags, *tags, *[tag[:7] for tag in tags], *separators, *bodies, *complete, *complete, "\n", "a", "{", "}"]


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_are_divided_as_the_whole_text(name):
    form = FORMATS[name]

    @given(parts=lists(sampled_from(fragments(form)), max_size=8), begins=booleans(), cuts=CUTS)
    def check(parts, begins, cuts):
        text = form.begin * begins + "".join(parts)
        content, calls = whole = parsed(text, form=form)
        assert parsed(*split(text, cuts), form=form) == parsed(*text, form=form) == whole
        assert calls or content == text

    check()
