"""The grammar of a message in a chat: a thought, and then calls of functions, or content with a grammar of its own.

    start: TEXT </think> (@content | <calls> call+ </calls>)

A tag that is a special token of the tokenizer is that token; text that spells it with other tokens is text. Other tags
are text; the first one ends the thought, or begins the calls.

Source: https://github.com/guidance-ai/llguidance, docs/syntax.md, "Special tokens" and "Lazy lexemes".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from octile.chat.thought import BEGIN, END, Thought
from octile.serve.engine.grammar import ANY_OBJECT, with_blanks
from octile.serve.http.tools.parser import CallFormat

TEXT = r"/(.|\n)*/"
MAX_NEWLINES = 2  # that models write between a thought and the answer
BLANKS = rf"/\n{{0,{MAX_NEWLINES}}}/"


class CalledFunction(NamedTuple):
    """A function that a message may call.

    Attributes:
        name: its name.
        parameters: JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any] = ANY_OBJECT


class Calls(NamedTuple):
    """The calls that a message may have.

    Attributes:
        form: how the model writes them.
        functions: the functions that it may call, at least one.
        is_needed: whether there must be a call.
        is_parallel: whether there may be several.
    """

    form: CallFormat
    functions: Sequence[CalledFunction]
    is_needed: bool
    is_parallel: bool


def message_grammar(
    content: str, calls: Calls | None, thought: Thought, special_token: Callable[[str], int | None]
) -> str:
    """Return the grammar of a message, as llguidance compiles it; empty: any text.

    Args:
        content: the grammar of its content, if it has any; empty: any text.
        calls: the calls that it may have after a text, or in the place of content with a grammar; None: it has none, or
            whatever the model writes.
        thought: whether a thought comes before.
        special_token: returns the special token of a name, or None.
    """
    if calls is None and (not content or thought is Thought.NONE):
        return content
    if calls is not None and calls.is_needed:
        content = ""  # the message is calls alone
    tags = _Tags(special_token)
    answers, rules = list[str](), list[str]()
    if calls is not None:
        calls_rule, rules = _calls(calls, tags)
        begin = tags.written(calls.form.begin)
        if calls.is_needed or content:
            answers.append(f"{begin} {calls_rule}")
        else:
            answers.append(f"{tags.text_before(calls.form.begin, rules)} {calls_rule}")
    if content:
        answers.append("@content")
    elif calls is None or not calls.is_needed:
        answers.append(TEXT)
    start = [f"({' | '.join(answers)})"]
    if thought is not Thought.NONE:
        rest = f"{tags.text_before(END, rules)} {BLANKS}"
        start.insert(0, rest if thought is Thought.BEGUN else f"({tags.written(BEGIN)} {rest})?")
    lark = "\n".join([f"start: {' '.join(start)}", *rules])
    own = [{**_read(content), "name": "content"}] if content else []
    return json.dumps({"grammars": [{"lark_grammar": lark}, *own]})


def _read(grammar: str) -> dict[str, Any]:
    """A grammar as one of several: llguidance writes it as a list of one, or as Lark's text."""
    return json.loads(grammar)["grammars"][0] if grammar.lstrip().startswith("{") else {"lark_grammar": grammar}


class _Tags:
    """Writes tags into a grammar.

    Args:
        special_token: returns the special token of a name, or None.
    """

    def __init__(self, special_token: Callable[[str], int | None]):
        self._special_token = special_token

    def written(self, piece: str | re.Pattern[str]) -> str:
        """A tag, another text, or a regular expression."""
        if isinstance(piece, re.Pattern):
            return f"/{piece.pattern}/"
        token = self._special_token(piece)
        return json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>"

    def text_before(self, tag: str, rules: list[str]) -> str:
        """Any text up to a tag, and the tag."""
        if self._special_token(tag) is not None:
            return f"{TEXT} {self.written(tag)}"
        name = f"before_{len(rules)}"
        rules.append(f"{name}[lazy]: {TEXT} {self.written(tag)}")
        return name


def _calls(calls: Calls, tags: _Tags) -> tuple[str, list[str]]:
    """What follows the tag that begins the calls, to the tag that ends them, and the rules that it needs."""
    form = calls.form
    rules = list[str]()
    for i, function in enumerate(calls.functions):
        before = [tags.written(piece) for piece in (form.call_begin, *form.before_name)]
        between = [tags.written(piece) for piece in form.before_arguments]
        written = [*before, json.dumps(function.name), *between]
        schema = f"%json {json.dumps(with_blanks(function.parameters))}"
        after = [tags.written(piece) for piece in (*form.after_arguments, form.call_end)]
        rules.append(f"call_{i}: {' '.join([*written, schema, *after])}")
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(calls.functions)))}")
    separator = tags.written(form.separator) if form.separator else ""
    others = f" ({separator} call)*" if calls.is_parallel else ""
    return f"call{others} {tags.written(form.end)}", rules
