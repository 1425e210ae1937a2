"""The format of Kimi-K2.

Source: MoonshotAI, Kimi-K2, docs/tool_call_guidance.md.
"""

from __future__ import annotations

import re

from octile.serve.http.tools.parser import CallFormat, CallText

CALL = re.compile(r"((?:functions\.)?([^<\s]+):\d+)\s*<\|tool_call_argument_begin\|>(.*)", re.DOTALL)


def _read(body: str) -> CallText | None:
    """Read the call's own name, such as functions.get_weather:0, and the arguments."""
    match = CALL.fullmatch(body.strip())
    return match and CallText(match[2], match[3].strip(), id=match[1])


K2 = CallFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    _read,
    before_name=("functions.",),
    before_arguments=(re.compile(":[0-9]{1,4}"), "<|tool_call_argument_begin|>"),
)
