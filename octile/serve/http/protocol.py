"""The bodies of requests, as OpenAI defines them.

A field that would change the result and is not supported is refused, and so is an unknown field: nothing is dropped
silently. `octile.serve.http.neutral` has the fields of other servers that are accepted with values that change nothing.
Fields that are not OpenAI's have vLLM's names.

Sources: OpenAI's API reference, completions and chat completions; vLLM's documentation of structured outputs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from octile.chat.template import Arguments, Rendering
from octile.serve.engine.config import InFlight
from octile.serve.engine.grammar import ANY_OBJECT, choice, context_free, json_schema, regex
from octile.serve.engine.request import MAX_LOGPROBS, MAX_TOP_K, Sampling
from octile.serve.http import neutral
from octile.serve.http.neutral import Values, is_neutral
from octile.serve.http.responses import ApiError
from octile.serve.weights.source import BufferSource, FolderSource, WeightsSource
from octile.validation import MAX_SEED, quoted

MAX_NAME = 60  # characters of an unknown field that an error repeats
MAX_CHOICES = 128  # OpenAI's limit of n
MAX_TEXTS = 1024  # of structured_outputs.choice
MAX_PROMPTS = MAX_MESSAGES = MAX_PARTS = MAX_TOOLS = 2048
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # OpenAI's rule, with points and up to 64 characters more
MAX_STOPS = 16  # fewer than Sampling's, which also has those of the chat template
CHOICE_OF_TOOLS = "'none', 'auto', 'required', or {} or {}"
NEEDED = {  # what pydantic would describe one member of the union after the other
    "prompt": "a text, a list of texts, a list of tokens (whole numbers from 0), or a list of lists of tokens, "
    f"of at most {MAX_PROMPTS} prompts",
    "bad_words": "a list of texts, none of them empty",
    "stop": f"a text, or a list of at most {MAX_STOPS} texts, none of them empty",
    "tool_choice": CHOICE_OF_TOOLS.format(
        '{"type": "function", "function": {"name": NAME}}',
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": FUNCTIONS}}',
    ),
    "content": f"a text, or a list of parts that are text, at most {MAX_PARTS}",
}

OTHER_NAMES = {  # what other servers and clients call a field, or where they have it
    "guided_json": ("structured_outputs.json",),  # of older vLLMs
    "guided_regex": ("structured_outputs.regex",),
    "guided_choice": ("structured_outputs.choice",),
    "guided_grammar": ("structured_outputs.grammar",),
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
    "thinking": ("chat_template_kwargs.thinking",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("max_output_tokens",),
    "max_output_tokens": ("max_tokens",),
    "messages": ("input",),
    "response_format": ("text.format",),
    "reasoning_effort": ("reasoning.effort",),
    "stop_sequences": ("stop",),
}

WORDING = {  # pydantic's name of an error: what the field must be
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "finite",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "list_type": "a list",
    "dict_type": "an object",
    "none_required": "null",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "literal_error": "{expected}",
}

# a list is read up to its first error: millions of them would be described before the first one is reported
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Size = Annotated[int, Field(ge=0, lt=2**50)]  # of tensors, in elements or in bytes
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS, fail_fast=True)]


def _check_finite(value: Any, name: str = "") -> Any:
    """Refuse JSON with a number that is none: NaN, or too large; an answer could not repeat it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name[:MAX_NAME]} must be finite, not {value}")
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        _check_finite(member, f"{name}.{key}".removeprefix("."))
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]


class Body(BaseModel):
    """A JSON object whose fields have exactly their types, and which has no other fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    neutral: ClassVar[Mapping[str, Values]] = {}  # other fields, with their values that change nothing
    needed: ClassVar[Mapping[str, str]] = NEEDED

    @model_validator(mode="after")
    def _has_no_other_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():  # extra="forbid" would describe each of them
            if name not in self.neutral:
                raise PydanticCustomError("unknown_field", "{name}", {"name": name, "meant": self._meant(name)})
            if not is_neutral(value, self.neutral[name]):
                raise UnsupportedError(name, value, _one_of(self.neutral[name]))
        return self

    def _meant(self, unknown: str) -> list[str]:
        """The fields that could be meant by a name that is unknown; none, commonly."""
        if len(unknown) > MAX_NAME:
            return []
        fields = [field.alias or name for name, field in type(self).model_fields.items()]
        others = [name for name in OTHER_NAMES.get(unknown, ()) if name.partition(".")[0] in fields]
        return others or get_close_matches(unknown, fields, n=1, cutoff=0.8)


class StreamOptions(Body):
    """Options of a stream.

    include_usage adds a last chunk with the numbers of tokens; with continuous_usage_stats, vLLM's name, each chunk has
    those so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """A schema, and what it is called."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
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

    neutral = neutral.STRUCTURED_OUTPUTS

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)] | None = None
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


class SampledBody(Body):
    """What all requests for a text have in common."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    stop: Annotated[str, Field(min_length=1)] | Stops | None = None
    stream: bool | None = False
    ignore_eos: bool | None = False
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None  # numbers by token
    stop_token_ids: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = True
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    # of no effect: who asks, and how OpenAI accounts and caches
    user: str | None = None
    metadata: JsonObject | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _has_biases(self) -> Self:
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isdecimal() and token.isascii() and len(token) < 10):
                raise ValueError(f"logit_bias must have tokens, whole numbers from 0, as names, not {quoted(token)}")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must have numbers from -100 to 100, not {describe_value(bias)}")
        return self


class Generation(SampledBody):
    """What completions and chat completions have in common."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = False

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs and response_format are both given: give one of them")
        options = self.stream_options
        if options is not None and not self.stream:
            raise ValueError("stream_options is only for stream true")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options.continuous_usage_stats is only for stream_options.include_usage true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is only for stream false: a stream has no log-probabilities of prompts")
        return self

    @property
    def prompt_scores(self) -> int | None:
        """How many most likely tokens the log-probabilities of prompts have; None: they are not needed."""
        return self.prompt_logprobs

    @property
    def format_field(self) -> str:
        """The field that gives the format of the text; empty: none."""
        return next((name for name in ("response_format", "structured_outputs") if getattr(self, name) is not None), "")

    def sampling(
        self,
        max_new_tokens: int,
        logprobs: int | None,
        choice: int,
        defaults: Mapping[str, Any],
        bad_words: tuple[tuple[int, ...], ...],
        grammar: str,
        stop: tuple[str, ...] = (),
    ) -> Sampling:
        """The sampling of one choice. With a seed, each choice has its own, the following one.

        Args:
            max_new_tokens: limit of this choice's tokens.
            logprobs: as in `Sampling`.
            choice: the number of the choice, from 0.
            defaults: fields of `Sampling` of the model, which count if the request gives none.
            bad_words: tokens of the words that may not appear.
            grammar: as in `Sampling`.
            stop: strings that end the text besides the request's own.

        Raises:
            ApiError: 400, the engine samples with no such value.
        """
        if (self.min_tokens or 0) > max_new_tokens:
            message = f"min_tokens must be at most the tokens of the answer, {max_new_tokens}, not {self.min_tokens}"
            raise ApiError(400, message, "min_tokens")
        top_k = None if self.top_k is None else max(self.top_k, 0)
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k, "min_p": self.min_p}
        given |= {name: getattr(self, name) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")}
        how = {"temperature": 1.0, **defaults, **{name: value for name, value in given.items() if value is not None}}
        own = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            return Sampling(
                max_new_tokens=max_new_tokens,
                **how,
                seed=None if self.seed is None else (self.seed + choice) % (MAX_SEED + 1),
                stop=tuple(dict.fromkeys((*own, *stop))),
                logprobs=logprobs,
                ignore_eos=bool(self.ignore_eos),
                prompt_logprobs=self.prompt_scores,
                logit_bias=tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items()),
                stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
                min_tokens=self.min_tokens or 0,
                bad_words=bad_words,
                skip_special_tokens=self.skip_special_tokens is not False,
                grammar=grammar,
            )
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from None


class CompletionBody(Generation):
    """The body of POST /v1/completions."""

    neutral = neutral.COMPLETIONS

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _is_a_supported_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo true, not 0")
        refuse(self, "suffix", self.suffix, "empty")
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of must be n, {self.n or 1}, not {self.best_of}: all choices are returned")
        if not self.prompts:
            raise ValueError("prompt must not be an empty list")
        return self

    @property
    def prompt_scores(self) -> int | None:
        """How many most likely tokens the log-probabilities of prompts have; None: they are not needed."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((number for number in asked if number is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text, or tokens, which are read unchanged."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if prompt and isinstance(prompt[0], int) else prompt


class TextPart(Body):
    """A part of a message's content; images, sounds and files are not supported."""

    type: Literal["text"]
    text: str
    cache_control: JsonObject | None = None  # of no effect: how Anthropic caches


class CalledFunction(Body):
    """The function of a call: its name, and its arguments as JSON."""

    name: str
    arguments: str


class MessageCall(Body):
    """A call of a message; index is that of a stream, which some clients send back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        text = self.function.arguments or "{}"
        arguments: Arguments | str = text
        with suppress(ValueError):  # a model may have written text that is not JSON, or not all of it
            arguments = Arguments.parse(text)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Body):
    """A message of a conversation; a developer's counts as a system's."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    # for the chat template; `reasoning` is the name in vLLM's newest answers
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    # clients send back an answer as they got it, with its fields that are empty
    refusal: str | None = None
    function_call: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content must be {NEEDED['content']}, not null")
        if self.thought and self.role != "assistant":
            name = "reasoning_content" if self.reasoning_content else "reasoning"
            raise ValueError(f"{name} is only for messages of the role 'assistant', not of {self.role!r}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls is only for messages of the role 'assistant', not of {self.role!r}")
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise ValueError("reasoning and reasoning_content differ: give one of them")
        for field in ("refusal", "function_call", "annotations", "audio"):
            refuse(self, field, getattr(self, field), "empty")
        return self

    @property
    def thought(self) -> str | None:
        """What the model thought before it wrote the message, by either of the two names."""
        return self.reasoning_content or self.reasoning or None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it: role and text, and other fields where they are given."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        named = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.thought,
            "reasoning": self.thought,  # as vLLM: templates have either name
            "tool_calls": [call.plain() for call in self.tool_calls] if self.tool_calls else None,
        }
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": None if self.tool_calls and not text else text,
            **{key: value for key, value in named.items() if value is not None},
        }


class Function(Body):
    """A function that the model may call; parameters is a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not FUNCTION_NAME.fullmatch(self.name):
            rule = "at most 128 letters from A to Z, digits, _, - and ."
            raise ValueError(f"name must have {rule}, not {quoted(self.name)}")
        return self

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of its arguments, which are an object; without parameters, an empty one."""
        if self.parameters is None:
            return {"type": "object", "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(Body):
    """Messages, and what the chat template gets besides them."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: JsonObject | None = None
    chat_template: Any = None
    documents: list[Any] | None = None  # accepted if empty

    @model_validator(mode="after")
    def _can_be_rendered(self) -> Self:
        refuse(self, "documents", self.documents, "empty")
        if self.chat_template is not None:
            raise ValueError("chat_template is not taken from a request: the model's own template is used")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise ValueError("continue_final_message must be false: the last message has tool_calls")
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise ValueError("continue_final_message needs add_generation_prompt false: no new message begins")
        return self

    def rendering(self) -> Rendering:
        """What the chat template gets besides the messages."""
        return Rendering(
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
        )


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(Body):
    """The functions that may be called; with the mode required, one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Body):
    """A choice of some of the tools, of which the chat template still gets all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class ChatBody(Generation, Conversation):
    """The body of POST /v1/chat/completions."""

    neutral = neutral.CHAT

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None

    # accepted with the value that changes nothing
    functions: list[Any] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None

    @model_validator(mode="after")
    def _is_a_supported_chat(self) -> Self:
        names = dict.fromkeys(tool.function.name for tool in self.tools or ())
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice must be 'none' or 'auto' without tools")
        for name in sorted(self._named_functions or ()):
            if name not in names:
                known = ", ".join(map(repr, names))
                raise ValueError(f"tool_choice must name a function of tools, {known}, not {quoted(name)}")
        refuse(self, "functions", self.functions, "empty")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self

    @property
    def may_call(self) -> bool:
        """Whether the model's calls are answered as such."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the model has to call a function."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return mode == "required" or self.calls_named_function

    @property
    def has_bound_calls(self) -> bool:
        """Whether calls must be of some of the functions, or their arguments must follow their schemas."""
        is_bound = self.must_call or self._named_functions is not None
        return is_bound or any(function.strict for function in self.callable_functions.values())

    @property
    def calls_named_function(self) -> bool:
        """Whether the model has to call the one function that is named."""
        return isinstance(self.tool_choice, NamedFunction)

    @property
    def callable_functions(self) -> dict[int, Function]:
        """The functions that the model may call, by their index in tools."""
        functions = {i: tool.function for i, tool in enumerate(self.tools or ())} if self.may_call else {}
        named = self._named_functions
        return {i: f for i, f in functions.items() if named is None or f.name in named}

    @property
    def _named_functions(self) -> set[str] | None:
        """The only functions that may be called, if tool_choice names some."""
        if isinstance(self.tool_choice, NamedFunction):
            return {self.tool_choice.function.name}
        if isinstance(self.tool_choice, AllowedTools):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return None


class TokenizeText(Body):
    """The body of POST /tokenize for a text, before which the same tokens come as in a completion."""

    neutral = neutral.TOKENIZE
    needed: ClassVar[Mapping[str, str]] = {**NEEDED, "prompt": "a text"}

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChat(Conversation):
    """The body of POST /tokenize for a conversation, as a chat completion reads it."""

    neutral = neutral.TOKENIZE

    model: str | None = None
    add_special_tokens: Literal[False] | None = False  # the template has them
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    tokens: Tokens
    model: str | None = None


class WeightsUpdate(Body):
    """What all updates of the weights have in common; fields that are not octile's have SGLang's names."""

    in_flight: InFlight = "finish"

    # accepted with the value that changes nothing
    load_format: Literal["auto"] | None = None
    flush_cache: Literal[True] | None = True
    abort_all_requests: Literal[False] | None = None
    is_async: Literal[False] | None = None


class FolderUpdate(WeightsUpdate):
    """The body of POST /update_weights_from_disk."""

    model_path: Annotated[str, Field(min_length=1)]

    @property
    def source(self) -> WeightsSource:
        """Where the weights are."""
        return FolderSource(self.model_path)


class Layout(Body):
    """Where a tensor lies in a buffer, as in the header of a safetensors file."""

    dtype: str
    shape: Annotated[list[Size], Field(max_length=8, fail_fast=True)]
    data_offsets: Annotated[list[Size], Field(min_length=2, max_length=2)]


class CudaIpc(Body):
    """Memory of a GPU: the handle of an allocation, where the buffer begins in it, and the GPU's UUID."""

    handle: str
    offset: Annotated[Size, Field(multiple_of=8)]  # a kernel that reads a number at another address ends the context
    device: str


class BufferUpdate(WeightsUpdate):
    """The body of POST /update_weights_from_tensor."""

    config: dict[str, Any]
    tensors: dict[str, Layout]
    shared_memory: Annotated[str, Field(min_length=1)] | None = None
    cuda_ipc: CudaIpc | None = None

    @model_validator(mode="after")
    def _has_one_buffer(self) -> Self:
        if (self.shared_memory is None) == (self.cuda_ipc is None):
            raise ValueError("shared_memory or cuda_ipc must be given, and not both")
        if not self.tensors:
            raise ValueError("tensors must not be empty")
        return self

    @property
    def source(self) -> WeightsSource:
        """Where the weights are."""
        layout = {name: tensor.model_dump() for name, tensor in self.tensors.items()}
        given = self.model_dump(include={"shared_memory", "cuda_ipc"}, exclude_none=True)
        return BufferSource(self.config, layout, given)


class UnsupportedError(ValueError):
    """A field has a value that would change the result in a way that is not supported."""

    def __init__(self, field: str, value: object, needed: str):
        super().__init__(f"{field} must be {needed}, not {describe_value(value)}")


def refuse(body: Body, field: str, value: object, needed: str) -> None:
    """Refuse a value that is not the neutral one."""
    if value:
        raise UnsupportedError(field, value, needed)


def _one_of(values: Values) -> str:
    """Describe the values that change nothing, for a message."""
    return " or ".join([*(json.dumps(value) for value in values), "null"])


def describe_value(value: object) -> str:
    """What came, for a message; true, false and null as JSON has them."""
    return json.dumps(value) if value is None or isinstance(value, bool) else quoted(value)


def parse(form: type[Any], content: bytes) -> Any:
    """Read a body.

    Raises:
        ApiError: 400, with the name of the field: the body is not JSON, or a field is not what it must be.
    """
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        raise ApiError(400, *describe(error, form.needed)) from None


def describe(error: ValidationError, needed: Mapping[str, str]) -> tuple[str, str | None]:
    """The message and the field of the first thing that is wrong.

    Args:
        error: pydantic's error.
        needed: what fields must be whose types are unions.
    """
    found = _first(error)
    where = [str(part) for part in found["loc"] if not _is_member(part)]
    field, context, given = ".".join(where), found.get("ctx", {}), describe_value(found["input"])
    match found["type"]:
        case "json_invalid":
            if "hex escape" in context["error"]:  # JSON may have half of a surrogate pair, UTF-8 text may not
                return f"the body has an escape that is no character: {context['error']}", None
            return f"the body is not JSON: {context['error']}", None
        case "value_error":
            message = ".".join([*where, str(context["error"])])
            return message, message.split()[0]
        case "missing":
            return f"{field} is missing", field
        case "unknown_field":
            name = context["name"]
            field = ".".join([*where, name if name.isidentifier() and len(name) <= MAX_NAME else quoted(name)])
            meant = " or ".join(".".join([*where, each]) for each in context["meant"])
            return f"{field} is unknown, or not supported here{f'; perhaps you meant {meant}' * bool(meant)}", field
        case "union_tag_invalid":
            kinds = re.findall(r"'a (\w+)'", context["expected_tags"])
            return (
                f"{field}.type must be {', '.join(map(repr, kinds))}, not {quoted(context['tag'][2:])}",
                f"{field}.type",
            )
        case "model_type" | "model_attributes_type":
            return f"{field or 'the body'} must be an object, not {given}", field or None
    for i, name in enumerate(where, 1):
        if name in needed and (i == len(where) or name != "content"):
            field = ".".join(where[:i])
            came = f", not {given}" if i == len(where) else ""  # otherwise it is a part of the field
            return f"{field} must be {needed[name]}{came}", field
    bounds = {key: _in_json(value) for key, value in context.items()}
    wanted = WORDING[found["type"]].format(**bounds) if found["type"] in WORDING else found["msg"]
    return f"{field} must be {wanted}, not {given}", field


def _first(error: ValidationError) -> ErrorDetails:
    """Return the first error; of a content that is a list, that of a part, if there is one."""
    first, *others = error.errors(include_url=False)
    if first["loc"][-2:] == ("content", "str") and isinstance(first["input"], list):
        return next((other for other in others if any(isinstance(part, int) for part in _after_content(other))), first)
    return first


def _after_content(error: ErrorDetails) -> tuple[int | str, ...]:
    return error["loc"][error["loc"].index("content") + 1 :] if "content" in error["loc"] else ()


def _in_json(bound: object) -> object:
    """A bound as JSON has it: 0, not 0.0, and false, not False."""
    if isinstance(bound, float) and bound.is_integer():
        return int(bound)
    return bound.replace("False", "false").replace("True", "true") if isinstance(bound, str) else bound


def _is_member(part: object) -> bool:
    """Whether a part of a location is not a field or an index but pydantic's name of a member of a union."""
    return (isinstance(part, str) and not part.isidentifier()) or part in {"str", "int", "float", "bool"}
