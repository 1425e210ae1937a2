"""What the model writes, as the parts of a message."""

import pytest
from hypothesis import given
from hypothesis.strategies import booleans

from octile.serve.engine.text import MARK
from octile.serve.http.message import Delta, MessageParser
from octile.serve.http.reasoning import ReasoningParser
from octile.serve.http.tools.parser import CallFormat, CallText, ToolParser
from tests.serve.http.pieces import CUTS, split, texts_of


def test_without_parsers_a_text_is_the_content():
    parser = MessageParser()
    assert [parser.push("<think>"), parser.push(""), parser.end()] == [Delta(content="<think>"), Delta(), Delta()]
    assert MessageParser().whole("") == {"content": ""}


def test_a_delta_has_the_fields_that_are_there():
    assert Delta().fields() == {}
    assert Delta("a", "b").fields() == {"reasoning_content": "a", "content": "b"}


def test_an_empty_answer_after_a_thought_is_null():
    assert MessageParser(ReasoningParser(True)).whole("a") == {"reasoning_content": "a", "content": None}
    assert MessageParser(ReasoningParser(False)).whole("") == {"reasoning_content": None, "content": ""}


CALL = '[[<call>add:{"a": 1}</call>]]'
FIELDS = {"id": "id", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def calling(is_inside: bool = True, must_call: bool = False) -> MessageParser:
    form = CallFormat("[[", "]]", "<call>", "</call>", lambda body: CallText(*body.split(":", 1), id="id"))
    return MessageParser(ReasoningParser(is_inside), ToolParser(form), must_call)


def test_a_message_with_a_thought_an_answer_and_a_call():
    message = {"reasoning_content": "why", "content": "I add.", "tool_calls": [FIELDS]}
    assert calling().whole(f"why</think>I add.{CALL}") == message


def test_the_content_of_a_message_with_calls_alone_is_null():
    message = {"reasoning_content": None, "content": None, "tool_calls": [FIELDS]}
    assert calling(is_inside=False).whole(CALL) == message


def test_blanks_between_a_thought_and_calls_that_are_required_are_left_out():
    parser = calling(must_call=True)
    assert parser.push(f"why</think>\n\n{CALL}").fields() == {
        "reasoning_content": "why",
        "tool_calls": [{"index": 0, **FIELDS}],
    }


def of_format(is_inside: bool = True) -> MessageParser:
    return MessageParser(ReasoningParser(is_inside), has_format=True)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("why</think>\n\nyes", "yes"),
        ("why</think>\nyes\n", "yes\n"),
        ("why</think>yes", "yes"),
        ("why</think>\n\n\nyes", "\nyes"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_newlines_between_a_thought_and_a_format_are_left_out(text, content, size):
    parser = of_format()
    parts = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(part.content for part in [*parts, parser.end()]) == content


def test_a_format_without_a_thought_has_its_newlines():
    assert of_format(is_inside=False).whole("\n\nyes")["content"] == "\n\nyes"


def test_any_text_after_a_thought_has_its_newlines():
    assert MessageParser(ReasoningParser(True)).whole("why</think>\n\nyes")["content"] == "\n\nyes"


def test_a_call_within_a_thought_belongs_to_the_thought():
    parser = calling()
    assert parser.whole(CALL) == {"reasoning_content": CALL, "content": None}
    assert not parser.has_calls


def test_a_delta_has_the_numbers_of_calls():
    delta = calling().push(f"</think>{CALL}")
    assert delta.fields() == {"tool_calls": [{"index": 0, **FIELDS}]}


@given(text=texts_of("</think>", "[[", "<call>add:{}", "</call>", "]]", CALL), cuts=CUTS, is_inside=booleans())
def test_pieces_are_the_message_of_the_whole_text(text, cuts, is_inside):
    parser, joined = calling(is_inside), Delta()
    for piece in split(text, cuts):
        joined = Delta.joined(joined, parser.push(piece))
    joined, whole = Delta.joined(joined, parser.end()), calling(is_inside).whole(text)
    assert (joined.reasoning or None, joined.content) == (whole["reasoning_content"], whole["content"] or "")
    assert [call.fields() for call in joined.calls] == whole.get("tool_calls", [])


def test_marks_of_tokens_are_in_no_result_and_only_marked_tags_count():
    parser = MessageParser(ReasoningParser(True, f"{MARK}<think>", f"{MARK}</think>"))
    fields = parser.whole(f"why </think> {MARK}</think>because {MARK}</think>")
    assert fields == {"reasoning_content": "why </think> ", "content": "because </think>"}
