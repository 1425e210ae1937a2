"""What an answer must follow: `response_format`, as OpenAI has it, and `structured_outputs`, as vLLM has it.

Source: OpenAI's API reference, chat completions; vLLM's documentation of structured outputs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octile.serve.engine.grammar import choice, context_free, json_schema, regex
from octile.serve.http.body import Body

MAX_CHOICES = 1024  # texts of structured_outputs.choice
ANY_OBJECT = {"type": "object"}


class JsonSchema(Body):
    """A schema, and what it is called."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # every schema is followed strictly


class ResponseFormat(Body):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema_where_it_needs_one(self) -> Self:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema must be given for the type json_schema, and for no other")
        return self

    @property
    def grammar(self) -> str:
        """The grammar; empty: any text."""
        if self.type == "text":
            return ""
        return json_schema(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(Body):
    """What an answer must follow: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar", min_length=1)] = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _has_one_of_them(self) -> Self:
        given = [
            self.json_ is not None,
            bool(self.regex),
            bool(self.choice),
            bool(self.grammar_),
            bool(self.json_object),
        ]
        if sum(given) != 1:
            raise ValueError("json must be given, or one of regex, choice, grammar and json_object, and no other")
        return self

    @property
    def grammar(self) -> str:
        """The grammar.

        Raises:
            ValueError: json is no schema, or grammar is neither Lark nor GBNF.
        """
        if self.regex is not None:
            return regex(self.regex)
        if self.choice is not None:
            return choice(self.choice)
        if self.grammar_ is not None:
            return context_free(self.grammar_)
        return json_schema(ANY_OBJECT if self.json_ is None else self.json_)
