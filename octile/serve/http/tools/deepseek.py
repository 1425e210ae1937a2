"""The formats of DeepSeek-V3, R1 and V3.1.

Source: the chat templates of DeepSeek-V3 and DeepSeek-R1; the model card of DeepSeek-V3.1, "ToolCall".
"""

from __future__ import annotations

import re

from octile.serve.http.tools.parser import CallFormat, CallText

TAGS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
V3_CALL = re.compile(r"function<｜tool▁sep｜>([^\n]+)\n```json\n(.*)\n```", re.DOTALL)
V31_CALL = re.compile(r"(.+?)<｜tool▁sep｜>(.*)", re.DOTALL)


def _read_v3(body: str) -> CallText | None:
    """Read the word function, a name, and the arguments in a block of Markdown."""
    match = V3_CALL.fullmatch(body.strip())
    return match and CallText(match[1].strip(), match[2].strip())


def _read_v31(body: str) -> CallText | None:
    """Read a name and the arguments."""
    match = V31_CALL.fullmatch(body.strip())
    return match and CallText(match[1].strip(), match[2].strip())


V3 = CallFormat(
    *TAGS,
    _read_v3,
    before_name=("function", SEPARATOR),
    before_arguments=("\n```json\n",),
    after_arguments=("\n```",),
    separator="\n",
)
V31 = CallFormat(*TAGS, _read_v31, before_arguments=(SEPARATOR,))
