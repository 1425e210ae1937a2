"""The grammars that requests ask for, of a text or of a message with calls: each is compiled before it is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octile.chat.template import Prompt
from octile.chat.thought import Thought
from octile.serve.engine.grammar import GrammarCompiler, GrammarError, json_schema
from octile.serve.http.message_grammar import CalledFunction, Calls, message_grammar
from octile.serve.http.protocol import ChatBody, Function, Generation
from octile.serve.http.responses import ApiError
from octile.serve.http.tools.parser import CallFormat
from octile.validation import quoted


class Grammars:
    """Makes the grammars of requests.

    Args:
        compiler: the compiler for the model's vocabulary.
        divides_thoughts: whether a thought is divided from the content of a chat's message.
    """

    def __init__(self, compiler: GrammarCompiler, divides_thoughts: bool):
        self._compiler, self._divides_thoughts = compiler, divides_thoughts

    def of_text(self, body: Generation) -> str:
        """Return the grammar of a text whose format is given; empty: any text.

        Raises:
            ApiError: 400, there is none such.
        """
        field = body.format_field
        with _named(field):
            grammar: str = getattr(body, field).grammar
            if grammar:
                self._compiler.compile(grammar)
        return grammar

    def of_message(self, body: ChatBody, prompt: Prompt, form: CallFormat | None) -> str:
        """Return the grammar of a chat's message whose format is given, or whose calls must follow schemas.

        It has the thought before them, too. Empty: any text.

        Args:
            body: the request.
            prompt: after which the message comes.
            form: how the model writes calls; None: the message has none.

        Raises:
            ApiError: 400, there is none such.
        """
        field, content, calls = body.format_field, "", None
        if field:
            with _named(field):
                content = getattr(body, field).grammar
        if form is not None and (content or body.has_bound_calls):
            called = [_called(i, function, body.must_call) for i, function in body.callable_functions.items()]
            is_parallel = body.parallel_tool_calls is not False and not body.calls_named_function
            calls = Calls(form, called, body.must_call, is_parallel)
        if calls is None and not content:
            return ""
        grammar = message_grammar(content, calls, self._thought(body, prompt), self._compiler.special_token)
        with _named(field or "tools"):
            try:
                self._compiler.compile(grammar)
            except GrammarError:
                if calls is not None:
                    self._check_parameters(body)
                raise
        return grammar

    def _thought(self, body: ChatBody, prompt: Prompt) -> Thought:
        """Whether a thought comes before the content and the calls. Where it is not divided, it is content."""
        if self._divides_thoughts:
            return prompt.thought
        field = body.format_field
        if field and prompt.thought is Thought.BEGUN:
            why = "the chat template begins a thought, and this server has no --reasoning-parser"
            raise ApiError(400, f"{field} cannot be followed: {why}", field)
        return Thought.BEGUN if prompt.thought is Thought.BEGUN else Thought.NONE

    def _check_parameters(self, body: ChatBody) -> None:
        """Raise ApiError, 400, for the first function whose arguments cannot be made to follow their schema."""
        for i, function in body.callable_functions.items():
            if body.must_call or function.strict:
                with _named(f"tools.{i}.function.parameters"):
                    self._compiler.compile(json_schema(function.schema_of_arguments))


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Raise ApiError, 400, for a field whose grammar cannot be made or compiled."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise ApiError(400, f"{field} cannot be followed: {error}", field) from None


def _called(number: int, function: Function, is_needed: bool) -> CalledFunction:
    """A function as the grammar has it: any arguments, unless they must follow their schema."""
    if not (is_needed or function.strict):
        return CalledFunction(function.name)
    schema, field = function.schema_of_arguments, f"tools.{number}.function.parameters"
    if schema["type"] != "object":
        raise ApiError(400, f"{field} must have the type 'object', not {quoted(schema['type'])}", field)
    return CalledFunction(function.name, schema)
