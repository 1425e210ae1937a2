"""What the model writes in a chat, as the parts of a message."""

from __future__ import annotations

from typing import Any, NamedTuple

from octile.serve.engine.text import MARK
from octile.serve.http.message_grammar import MAX_NEWLINES
from octile.serve.http.reasoning import ReasoningParser
from octile.serve.http.tools.parser import ToolCall, ToolParser


class Delta(NamedTuple):
    """What is new about a message.

    Attributes:
        reasoning: the thought's next piece.
        content: the answer's next piece.
        calls: calls that are complete now.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def joined(cls, first: Delta, second: Delta) -> Delta:
        """One for two that follow each other."""
        return cls(first.reasoning + second.reasoning, first.content + second.content, first.calls + second.calls)

    def fields(self) -> dict[str, Any]:
        """The fields of the message that are there, as a stream has them."""
        calls = [{"index": call.number, **call.fields()} for call in self.calls]
        fields = {"reasoning_content": self.reasoning, "content": self.content, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}


def without_marks(text: str) -> str:
    """Return a text of the engine without what marks tokens in it."""
    return text.replace(MARK, "")


def _shown(reasoning: str, content: str, calls: tuple[ToolCall, ...] = ()) -> Delta:
    return Delta(without_marks(reasoning), without_marks(content), calls)


class MessageParser:
    """A parser of one message, while its text comes. Its parsers see the marks of tokens, its results have none.

    Args:
        reasoning: the parser of its thought; None: thoughts are not divided from the answer.
        tools: the parser of calls, which are in the answer; None: they are not divided from it.
        must_call: whether the answer is calls alone: white space between its thought and them is left out.
        has_format: whether the content follows a format: the newlines that its grammar allows between the thought and
            the content are left out, so that the content is a text of the format.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        must_call: bool = False,
        has_format: bool = False,
    ):
        self._reasoning, self._tools, self._must_call = reasoning, tools, must_call
        self._newlines = MAX_NEWLINES if has_format else 0  # that may still be left out

    @property
    def has_calls(self) -> bool:
        """Whether the message has had a call."""
        return self._tools is not None and self._tools.has_calls

    def push(self, text: str) -> Delta:
        """Take the next piece of the text, and return what is certain now."""
        thought, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._delta(thought, self._without_newlines(answer))

    def end(self) -> Delta:
        """Return what was held back, at the end of the text."""
        thought, answer = ("", "") if self._reasoning is None else self._reasoning.end()
        last = self._delta(thought, self._without_newlines(answer))
        return last if self._tools is None else Delta.joined(last, _shown("", *self._tools.end()))

    def _without_newlines(self, answer: str) -> str:
        """The next piece of the answer without newlines at its beginning, if a format comes after a thought."""
        if not (answer and self._newlines and self._reasoning is not None and self._reasoning.has_thought):
            return answer
        left_out = min(len(answer) - len(answer.lstrip("\n")), self._newlines)
        self._newlines = self._newlines - left_out if left_out == len(answer) else 0
        return answer[left_out:]

    def _delta(self, thought: str, answer: str) -> Delta:
        if self._tools is None:
            return _shown(thought, answer)
        content, calls = self._tools.push(answer)
        return _shown(thought, "" if self._must_call and content.isspace() else content, calls)

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of the message that a whole text is; content is null if there is something else alone."""
        reasoning, content, calls = Delta.joined(self.push(text), self.end())
        fields: dict[str, Any] = {"content": None if (reasoning or calls) and not content else content}
        if self._reasoning is not None:
            fields["reasoning_content"] = reasoning or None
        if calls:
            fields["tool_calls"] = [call.fields() for call in calls]
        return fields
