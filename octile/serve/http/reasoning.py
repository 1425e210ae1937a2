"""A text as a thought and the answer after it."""

from __future__ import annotations

from typing import NamedTuple

from octile.chat.thought import BEGIN, END
from octile.serve.http.tags import split_tag


class Thinking(NamedTuple):
    """A piece of a text: what belongs to the thought, and what follows it."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """A parser that divides a text into a thought and the answer after it, while it comes.

    A `<think>` counts at the text's beginning; blanks before it belong to no part. The first `</think>` after it ends
    the thought, and all that follows is the answer. A text that ends earlier is a thought alone.

    Args:
        is_inside: whether the prompt ends within a thought, so that the text begins there without `<think>`.
        begin, end: how the tags are written.

    Attributes:
        has_thought: whether the text has had a thought, or begins within one.
    """

    def __init__(self, is_inside: bool, begin: str = BEGIN, end: str = END):
        self._begin, self._end = begin, end
        self.has_thought = self._is_inside = is_inside
        self._has_begun, self._held = False, ""

    def push(self, text: str) -> Thinking:
        """Take the next piece of the text, and return what is certain now."""
        text = self._held + text
        if not self._has_begun:
            begin = text.lstrip()
            if len(begin) < len(self._begin) and self._begin.startswith(begin):
                self._held = text
                return Thinking()
            self._has_begun = True
            if begin.startswith(self._begin):
                text = begin.removeprefix(self._begin)
                self.has_thought = self._is_inside = True
        if not self._is_inside:
            self._held = ""
            return Thinking(content=text)
        thought, has_ended, rest = split_tag(text, self._end)
        if has_ended:
            self._is_inside, self._held = False, ""
            return Thinking(thought, rest)
        self._held = rest
        return Thinking(thought)

    def end(self) -> Thinking:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return Thinking(reasoning=held) if self._is_inside else Thinking(content=held)
