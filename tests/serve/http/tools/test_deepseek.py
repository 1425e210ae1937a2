"""The formats of DeepSeek-V3, R1 and V3.1."""

import pytest

from octile.serve.engine.text import TextStream
from octile.serve.http.tools.deepseek import V3, V31
from octile.serve.http.tools.parser import ToolParser
from tests.chat.templates import with_tokens

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def called(form, text: str) -> list[tuple[str, str]]:
    parser = ToolParser(form)
    pieces = [parser.push(text), parser.end()]
    return [(call.name, call.arguments) for piece in pieces for call in piece.calls]


def v3(name: str, arguments: str, kind: str = "function") -> str:
    return f"<｜tool▁call▁begin｜>{kind}<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def test_v3_has_a_block_of_markdown():
    calls = [("weather", '{"city": "Qingdao",\n "note": "```json"}'), ("time", "{}")]
    assert called(V3, BEGIN + "\n".join(v3(*call) for call in calls) + END) == calls


def test_v31_has_the_arguments_alone():
    calls = [("weather", '{"city": "Qingdao",\n "days": 2}'), ("time", "{}")]
    assert called(V31, BEGIN + "".join(v31(*call) for call in calls) + END) == calls


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_are_tokens_are_in_the_text_of_an_engine(tokenizer, special):
    own, text = with_tokens(tokenizer, special), BEGIN + v31("weather", '{"city": "é"}') + END
    own.backend.encode_special_tokens = False
    tokens, stream = own.encode(text), TextStream(own)
    assert own.backend.token_to_id(BEGIN) == tokens[0]
    assert called(V31, "".join(map(stream.add, tokens)) + stream.end()) == [("weather", '{"city": "é"}')]


@pytest.mark.parametrize(
    ("form", "call"),
    [
        (V3, v31("weather", "{}")),
        (V3, v3("weather", "{}", kind="macro")),
        (V31, v3("weather", "{}")),
        (V31, "<｜tool▁call▁begin｜>weather {}<｜tool▁call▁end｜>"),
    ],
    ids=["V3.1 in V3", "not a function", "V3 in V3.1", "no separator"],
)
def test_another_format_is_malformed(form, call):
    assert called(form, BEGIN + call + END) == []
