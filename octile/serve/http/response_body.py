"""The body of POST /v1/responses, as OpenAI defines it, and the chat that it asks for.

Responses are not kept: each request has the whole conversation, and a field that names an earlier response is refused.

Source: OpenAI's API reference, "Create a model response" and its input items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from octile.serve.engine.request import MAX_LOGPROBS
from octile.serve.http import neutral
from octile.serve.http.protocol import (
    CHOICE_OF_TOOLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    NEEDED,
    Body,
    ChatBody,
    Effort,
    Function,
    JsonObject,
    SampledBody,
    describe,
    refuse,
)
from octile.serve.http.responses import ApiError

NOT_KEPT = "responses are not kept here: send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
FIELDS_OF_CHAT = {  # a field of the chat: the field of this body that it comes from
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextPart(Body):
    """A part of a message's content; images, files and refusals are not supported."""

    type: Literal["input_text", "output_text"]
    text: str

    # of an earlier answer
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ReasoningText(Body):
    """A part of a thought."""

    type: Literal["reasoning_text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Item(Body):
    """What all items have that were a part of an earlier answer."""

    neutral = neutral.RESPONSE_ITEMS

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = None


class ReasoningItem(Item):
    """What the model thought before the items that follow."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    summary: list[Any] | None = None
    encrypted_content: Literal[""] | None = None


class CallItem(Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _item_tag(value: Any) -> str:
    """The kind of an item; OpenAI's clients leave out that of a message."""
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return f"a {kind}"  # no name of a field: it is not shown in messages


AnyItem = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[ReasoningItem, Tag("a reasoning")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[CallOutputItem, Tag("a function_call_output")],
    Discriminator(_item_tag),
]


class FunctionKind(Body):
    """The kind of a tool: functions are supported."""

    type: Literal["function"]


class ResponseTool(Function, FunctionKind):
    """A function that the model may call; its kind is looked at first."""


class ChosenFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str

    def for_chat(self) -> dict[str, Any]:
        """The choice as a chat has it."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Body):
    """The functions that may be called; with the mode required, one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    def for_chat(self) -> dict[str, Any]:
        """The choice as a chat has it."""
        functions = [tool.for_chat() for tool in self.tools]
        return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": functions}}


class TextFormat(Body):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None  # every schema is followed strictly

    @model_validator(mode="after")
    def _has_a_schema_where_it_needs_one(self) -> Self:
        if (self.schema_ is None) == (self.type == "json_schema"):
            raise ValueError("schema must be given for the type json_schema, and for no other")
        return self

    def for_chat(self) -> dict[str, Any]:
        """The format as a chat has it."""
        given = {"type": self.type}
        return given if self.schema_ is None else given | {"json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(Body):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """How the model thinks. It writes no summary of it: the thought itself is in the response."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: None = None


class ResponseBody(SampledBody):
    """The body of POST /v1/responses."""

    neutral = neutral.RESPONSES
    needed: ClassVar[Mapping[str, str]] = {
        **NEEDED,
        "tool_choice": CHOICE_OF_TOOLS.format(
            '{"type": "function", "name": NAME}',
            '{"type": "allowed_tools", "mode": "auto" or "required", "tools": FUNCTIONS}',
        ),
    }

    input: Annotated[
        Annotated[str, Tag("a text")]
        | Annotated[
            Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)], Tag("a list")
        ],
        Discriminator(
            lambda value: {str: "a text", list: "a list"}.get(type(value)),
            custom_error_type="no_text_or_list",
            custom_error_message="a text, or a list of items",
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: JsonObject | None = None

    # accepted with the values that change nothing
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: str | None = None
    conversation: Any = None

    @model_validator(mode="after")
    def _is_a_supported_response(self) -> Self:
        for field in ("previous_response_id", "conversation"):
            if getattr(self, field):
                raise ValueError(f"{field} must be null: {NOT_KEPT}")
        if self.structured_outputs is not None and self.text is not None and self.text.format is not None:
            raise ValueError("structured_outputs and text.format are both given: give one of them")
        if self.top_logprobs and not self.shows_logprobs:
            raise ValueError(f"top_logprobs needs include {LOGPROBS}")
        for i, item in enumerate([] if isinstance(self.input, str) else self.input):
            if isinstance(item, ReasoningItem):
                refuse(self, f"input.{i}.summary", item.summary, "empty: no summary was written here")
        return self

    @property
    def shows_logprobs(self) -> bool:
        """Whether the text has its log-probabilities."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatBody:
        """The chat that is asked for.

        Raises:
            ApiError: 400, fields do not fit together; it has the chat's names of fields, as in `own_names`.
        """
        given = self.model_dump(include={*SampledBody.model_fields}, exclude_unset=True, by_alias=True)
        form = None if self.text is None or self.text.format is None else self.text.format.for_chat()
        choice = self.tool_choice
        tools = [{"type": "function", "function": _without_type(tool)} for tool in self.tools or ()]
        fields = {
            **given,
            "messages": [*self._messages()],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": form,
            "tools": tools,
            "tool_choice": choice.for_chat() if isinstance(choice, ChosenFunction | AllowedTools) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.shows_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise ApiError(400, *describe(error, ChatBody.needed)) from None

    def _messages(self) -> Sequence[dict[str, Any]]:
        """The conversation. What the model has written between two messages of others is one message."""
        messages = list[dict[str, Any]]()
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, MessageItem) and item.role != "assistant":
                messages.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, CallOutputItem):
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            else:
                if not messages or messages[-1]["role"] != "assistant" or _begins_anew(item, messages[-1]):
                    messages.append({"role": "assistant"})
                _extend(messages[-1], item)
        return messages


def _begins_anew(item: Item, message: dict[str, Any]) -> bool:
    """Whether an item of the model is of another message than the one before: a thought comes first, calls last."""
    if isinstance(item, ReasoningItem):
        return True
    return isinstance(item, MessageItem) and ("content" in message or "tool_calls" in message)


def _extend(message: dict[str, Any], item: Item) -> None:
    """Add an item that the model has written to its message."""
    if isinstance(item, ReasoningItem):
        message["reasoning_content"] = "".join(part.text for part in item.content or ())
    elif isinstance(item, MessageItem):
        message["content"] = _text(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _without_type(tool: ResponseTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type"}, exclude_none=True)


@contextmanager
def own_names() -> Iterator[None]:
    """Give errors of the chat the names that fields have in this body."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        first, _, rest = error.param.partition(".")
        own = ".".join(filter(None, (FIELDS_OF_CHAT.get(first, first), rest))).replace(".function.", ".")
        message = error.message.replace(error.param, own)
        raise ApiError(error.status, message, own, error.code, error.headers) from None
