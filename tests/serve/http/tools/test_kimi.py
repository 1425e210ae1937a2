"""The format of Kimi-K2."""

import pytest

from octile.serve.http.tools.kimi import K2
from octile.serve.http.tools.parser import ToolParser


def called(*calls: str) -> list[tuple[str, str, str]]:
    section = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    parser = ToolParser(K2)
    parsed = parser.push(f"<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>").calls
    return [(call.id, call.name, call.arguments) for call in parsed]


def test_a_call_has_the_name_that_the_model_gave_it():
    assert called(
        'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Beijing"}',
        " functions.time.now:1 <|tool_call_argument_begin|> {} ",
        "time:2<|tool_call_argument_begin|>{}",
    ) == [
        ("functions.get_weather:0", "get_weather", '{"city": "Beijing"}'),
        ("functions.time.now:1", "time.now", "{}"),
        ("time:2", "time", "{}"),
    ]


@pytest.mark.parametrize(
    "call",
    ["functions.time<|tool_call_argument_begin|>{}", "functions.time:0{}", ":0<|tool_call_argument_begin|>{}"],
    ids=["no number", "no arguments", "no name"],
)
def test_a_call_that_is_written_in_another_way_is_malformed(call):
    assert called(call) == []
