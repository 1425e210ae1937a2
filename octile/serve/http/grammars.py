"""The grammars that requests ask for, of a text or of a message with calls: each is compiled before it is accepted."""

from __future__ import annotations

from collections.abc import Callable

from octile.serve.engine.grammar import GrammarCompiler, json_schema
from octile.serve.http.chat import Prompt
from octile.serve.http.message_grammar import CalledFunction, Calls, message_grammar
from octile.serve.http.protocol import ChatBody, Function, Generation
from octile.serve.http.reasoning import Thought
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
        return self._compile(field, lambda: getattr(body, field).grammar)

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
        content, calls = self.of_text(body) if body.format_field else "", None
        if form is not None and (content or body.has_bound_calls):
            called = [self._called(i, function, body.must_call) for i, function in body.callable_functions.items()]
            is_parallel = body.parallel_tool_calls is not False and body.chosen_function is None
            calls = Calls(form, called, body.must_call, is_parallel)
        if calls is None and not content:
            return ""
        grammar = message_grammar(content, calls, self._thought(body, prompt), self._compiler.special_token)
        return self._compile("tools", lambda: grammar)

    def _thought(self, body: ChatBody, prompt: Prompt) -> Thought:
        """Whether a thought comes before the content and the calls. Where it is not divided, it is content."""
        if self._divides_thoughts:
            return prompt.thought
        field = body.format_field
        if field and prompt.thought is Thought.BEGUN:
            why = "the chat template begins a thought, and this server has no --reasoning-parser"
            raise ApiError(400, f"{field} cannot be followed: {why}", field)
        return Thought.BEGUN if prompt.thought is Thought.BEGUN else Thought.NONE

    def _called(self, number: int, function: Function, is_needed: bool) -> CalledFunction:
        """A function as the grammar has it: any arguments, unless they must follow their schema."""
        if not (is_needed or function.strict):
            return CalledFunction(function.name)
        schema, field = function.schema_of_arguments, f"tools.{number}.function.parameters"
        if schema["type"] != "object":
            raise ApiError(400, f"{field} must have the type 'object', not {quoted(schema['type'])}", field)
        self._compile(field, lambda: json_schema(schema))
        return CalledFunction(function.name, schema)

    def _compile(self, field: str, make: Callable[[], str]) -> str:
        """Return the grammar that a field asks for; raise ApiError, 400, if it cannot be made or compiled."""
        try:
            grammar = make()
            if grammar:
                self._compiler.compile(grammar)
        except (ValueError, ImportError) as error:
            raise ApiError(400, f"{field} cannot be followed: {error}", field) from None
        return grammar
