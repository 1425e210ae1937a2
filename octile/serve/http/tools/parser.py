"""A parser of calls, while the text comes."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

from octile.serve.http.tags import split_tag


class CallText(NamedTuple):
    """A call as the model has written it.

    Attributes:
        name: the function's name.
        arguments: the text of its arguments.
        id: the call's own name; None: the format has none.
    """

    name: str
    arguments: str
    id: str | None = None


class CallFormat(NamedTuple):
    """How a model writes calls: a section of calls, with nothing but blanks between them.

    Attributes:
        begin, end: tags of the section.
        call_begin, call_end: tags of a call.
        read: reads what is between the tags of a call; None: it is no call.
        before_name, before_arguments, after_arguments: what is written between these tags besides the name and the
            arguments: texts, tags, and regular expressions.
        separator: text between two calls.
    """

    begin: str
    end: str
    call_begin: str
    call_end: str
    read: Callable[[str], CallText | None]
    before_name: Sequence[str] = ()
    before_arguments: Sequence[str | re.Pattern[str]] = ()
    after_arguments: Sequence[str] = ()
    separator: str = ""

    def written(self, write: Callable[[str], str], read: Callable[[str], str]) -> CallFormat:
        """Return the format of texts in which tags are written otherwise; read: makes such a text what it was."""
        return self._replace(
            begin=write(self.begin),
            end=write(self.end),
            call_begin=write(self.call_begin),
            call_end=write(self.call_end),
            read=lambda body: self.read(read(body)),
        )

    @property
    def texts(self) -> list[str]:
        """The tags and texts that calls have, some of which are special tokens."""
        between = (*self.before_name, *self.before_arguments, *self.after_arguments)
        tags = self.begin, self.end, self.call_begin, self.call_end
        return [*tags, *(text for text in between if isinstance(text, str))]


class ToolCall(NamedTuple):
    """A call of a message.

    Attributes:
        number: the position of the call in its message, from 0.
        id: the call's name, which the message with the function's result repeats.
        name: the function's name.
        arguments: a JSON object.
    """

    number: int
    id: str
    name: str
    arguments: str

    def fields(self) -> dict[str, Any]:
        """The call as OpenAI has it in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Called(NamedTuple):
    """A piece of a text: what is no call, and the calls that are complete now."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class _State(Enum):
    TEXT = auto()  # before a section, or after one
    SECTION = auto()  # between calls
    CALL = auto()
    MALFORMED = auto()  # to the end of the text


class ToolParser:
    """A parser that divides a text into calls and other text, while it comes.

    A call is returned when it is complete. From a malformed one on, the text has no calls: all of it is returned as it
    is, tags too. A call is malformed if the format cannot read it, if its arguments are not a JSON object, if its end
    is missing, or if something else than a call is in the section.

    Args:
        form: how the model writes calls.
        is_parallel: whether there may be several calls; otherwise only the first one is returned.
    """

    def __init__(self, form: CallFormat, is_parallel: bool = True):
        self._form, self._is_parallel = form, is_parallel
        self._state, self._held = _State.TEXT, ""
        self._unsure, self._body = list[str](), list[str]()  # what is text if it is malformed; of it, the call's
        self._n_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether there has been a call."""
        return self._n_calls > 0

    def push(self, text: str) -> Called:
        """Take the next piece of the text, and return what is certain now."""
        self._held += text
        content, calls = list[str](), list[ToolCall]()
        while self._advance(content, calls):
            pass
        return Called("".join(content), tuple(calls))

    def end(self) -> Called:
        """Return what was held back, at the end of the text: an incomplete call is text."""
        left = "".join([*self._unsure, self._held])
        is_between_calls = self._state is _State.SECTION and not left.strip()
        self._unsure, self._held, self._state = [], "", _State.MALFORMED
        return Called() if is_between_calls else Called(left)

    def _advance(self, content: list[str], calls: list[ToolCall]) -> bool:
        """Go on to the next state, if the text that is held decides it; return whether it does."""
        form = self._form
        match self._state:
            case _State.TEXT:
                before, found, self._held = split_tag(self._held, form.begin)
                content.append(before)
                if found:
                    self._state, self._unsure = _State.SECTION, [form.begin]
                return found
            case _State.SECTION:
                return self._advance_in_section(content)
            case _State.CALL:
                before, found, self._held = split_tag(self._held, form.call_end)
                self._unsure.append(before)
                self._body.append(before)
                if found:
                    self._end_call(content, calls)
                return found
            case _State.MALFORMED:
                content.append(self._held)
                self._held = ""
                return False

    def _advance_in_section(self, content: list[str]) -> bool:
        form, rest = self._form, self._held.lstrip()
        ends = (form.end,) if not self._unsure else ()  # a section has a call
        if rest.startswith(form.call_begin):
            self._unsure.append(self._held[: len(self._held) - len(rest)] + form.call_begin)
            self._state, self._body, self._held = _State.CALL, [], rest.removeprefix(form.call_begin)
        elif rest.startswith(ends):
            self._state, self._held = _State.TEXT, rest.removeprefix(form.end)
        elif any(tag.startswith(rest) for tag in (form.call_begin, *ends)):
            return False
        else:
            content += self._unsure
            self._state, self._unsure = _State.MALFORMED, []
        return True

    def _end_call(self, content: list[str], calls: list[ToolCall]) -> None:
        call = self._form.read("".join(self._body))
        if call is None or not call.name or not is_mapping(call.arguments):
            content += [*self._unsure, self._form.call_end]
            self._state, self._unsure = _State.MALFORMED, []
            return
        if self._is_parallel or not self._n_calls:
            id = call.id or f"chatcmpl-tool-{uuid.uuid4().hex}"
            calls.append(ToolCall(self._n_calls, id, call.name, call.arguments))
        self._n_calls += 1
        self._state, self._unsure = _State.SECTION, []


def is_mapping(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
