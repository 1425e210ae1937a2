"""The chat template: messages to the tokens of a prompt.

A template is jinja, as transformers has it in `tokenizer_config.json` or `chat_template.jinja`. It runs in a sandbox. A
base model has none; it gets a plain one, and the server says so.

Text of a request that spells a special token, or another added token in angle brackets, stays text: it cannot end a
message or begin another. DeepSeek's `<｜User｜>` is such a token, and not special. `<think>` and `</think>` of the
assistant's messages are tags, which templates look for. A text is divided within such a token, and both parts are
encoded as they stand by byte-level tokenizers, which all models that are served have.

Training reads whole conversations by it, and learns the assistant's messages only: what transformers' tag
`{% generation %}` marks in a template, or what a template without that tag writes after the beginning of an answer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octile.chat.thought import BEGIN, END, Thought, ends_inside, thought_after
from octile.tokenizer import CHAT_TEMPLATE, NAMED_TEMPLATES, Tokenizer, disable_word_cache, token_text
from octile.validation import parse_json, read_text

PLAIN = """\
{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}

{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
PLAIN_STOP = ("\n\nUser:",)
NO_VARIABLES = "chat_template", "tokenize"  # arguments of transformers' function, which renders a template
CLOCK = "strftime_now"  # the function of templates that gives the time
DIGITS = 8  # of the number of a token that a text spells
TAG = re.compile(r"<.+>", re.DOTALL)
LEFT_OUT = {"description": "", "parameters": {"type": "object", "properties": {}}}  # of functions
ANSWER_MARKS = "marks of answers"  # the variable with what is written around an answer; no template can read its name


class FieldError(ValueError):
    """A field of a request asks for what the chat template does not do.

    Args:
        field: the field.
        problem: what is wrong with it.
    """

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field} {problem}")
        self.field = field


class Arguments(dict[str, Any]):
    """Arguments of a call: an object, also for `tojson`, and JSON text where a template concatenates or prints them.

    Some templates read an object, others, such as DeepSeek's, a text; a call means the same to both.

    Args:
        members: the object.
        text: its JSON.
    """

    __slots__ = ("text",)

    def __init__(self, members: Mapping[str, Any], text: str):
        super().__init__(members)
        self.text = text

    @classmethod
    def parse(cls, text: str) -> Arguments:
        """Parse JSON.

        Raises:
            ValueError: the text is not the JSON of an object, or the object is nested too deeply or has texts that
                UTF-8 cannot encode.
        """
        members = parse_json(text.encode(), "arguments")
        json.dumps(members, ensure_ascii=False).encode()
        return cls(members, text)

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


class Rendering(NamedTuple):
    """What a template gets besides the messages, and where the prompt ends.

    Attributes:
        tools: the functions that the model may call, as OpenAI describes them.
        variables: further variables of the template.
        reasoning_effort: how long the model is to think; None: not given.
        add_generation_prompt: whether the template begins the assistant's next message.
        continue_final_message: whether the prompt ends within the last message, which the model continues.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Prompt(NamedTuple):
    """A rendered prompt.

    Attributes:
        tokens: its tokens.
        text: its text.
        continued: the part of it at its end that is of the message that the model continues.
    """

    tokens: list[int]
    text: str
    continued: str = ""

    @property
    def thought(self) -> Thought:
        """Whether the model's text begins as a thought: after a `<think>` that is not closed."""
        return thought_after(self.text, self.continued)


class Conversation(NamedTuple):
    """A rendered conversation.

    Attributes:
        tokens: its tokens.
        is_answer: for each token whether the assistant writes it.
    """

    tokens: list[int]
    is_answer: list[bool]


class ChatTemplate:
    """The chat template of a tokenizer, or a plain one.

    Args:
        tokenizer: the tokenizer.
        source: jinja, or None for the plain template: a role, a colon and the text for each message.
        tool_use: jinja for requests with tools, if that is another one.

    Attributes:
        is_plain: whether the tokenizer has no template of its own.
        texts: the template and that for requests with tools; None where there is none.
        reads_clock: whether what it writes may depend on the time.
        stop: strings that end an answer besides those of the request.

    Raises:
        ValueError: the template is not jinja.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None, tool_use: str | None = None):
        self.is_plain, self.stop = source is None, PLAIN_STOP if source is None else ()
        self.texts = source, tool_use
        self._tokenizer = tokenizer
        self._backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = False  # those that the template writes
        added = self._backend.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        tags = {token.content for token in added if TAG.fullmatch(token.content)}
        self._control = _any_of(self._special | tags)
        self._control_of_answers = _any_of((self._special | tags) - {BEGIN, END})
        self._control_to_learn = _any_of(self._special - {BEGIN, END})  # in answers of training data, which have tags
        self._source = _Source(PLAIN if source is None else source)
        self._tool_use = self._source if tool_use is None else _Source(tool_use)
        self.reads_clock = any(one.reads_clock for one in (self._source, self._tool_use))

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read the template of a folder.

        Args:
            folder: that has the tokenizer, and perhaps a `chat_template.jinja`, which precedes the tokenizer's
                configuration, and an `additional_chat_templates/tool_use.jinja`, as transformers writes named ones.
            tokenizer: read from there.

        Raises:
            ValueError: there is a template, and it cannot be read.
        """
        file, tool_use = folder / CHAT_TEMPLATE, folder / NAMED_TEMPLATES / "tool_use.jinja"
        if not file.is_file():
            return cls(tokenizer, *_in_config(tokenizer.config))
        return cls(tokenizer, read_text(file), read_text(tool_use) if tool_use.is_file() else None)

    def disable_word_cache(self) -> None:
        """Disable the cache of encoded words; see `octile.tokenizer.disable_word_cache`."""
        disable_word_cache(self._backend)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = Rendering(),  # noqa: B008 - it is immutable
        check: Callable[[str], object] = lambda text: None,
    ) -> Prompt:
        """Render the prompt after which the model writes.

        Args:
            messages: {"role", "content"} of each, and what else the template knows.
            rendering: what the template gets besides.
            check: is called with the prompt's text before the tokens are computed, and may raise.

        Raises:
            FieldError: the template does not do what the request asks for.
            ValueError: the template refuses the messages, or fails.
        """
        hiding = _Hiding()
        source, names = self._tool_use if rendering.tools else self._source, self._names()
        given = _given(messages, rendering, source)
        variables = _chosen(rendering, source, (*given, *names))
        last, end = "", f"{hiding.mark}end "
        if rendering.continue_final_message:
            *others, final = messages
            last = final["content"]
            given["messages"] = [*others, {**final, "content": last + end}]
        hidden = self._hide_control_tokens({**given, **variables}, hiding, self._control_of_answers)
        text = source.render({**hidden, **names})
        if rendering.continue_final_message:
            text = _before(text, end)
        parts = hiding.split(text)
        whole = "".join(parts)
        if rendering.reasoning_effort is not None and "reasoning_effort" not in variables:
            _check_effort(rendering.reasoning_effort, ends_inside(whole, last))
        check(whole)
        return Prompt(self._encode(parts), whole, last)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Conversation:
        """Render a whole conversation, and find the answers in it.

        Each answer is encoded apart from what precedes it, as in serving.

        Args:
            messages, tools, variables: as in `prompt` and `Rendering`.

        Raises:
            ValueError: the template refuses the messages, or fails; or it is not known which tokens the answers have.
        """
        hiding = _Hiding()
        source, rendering = self._tool_use if tools else self._source, Rendering(tools, variables, None, False)
        if any(message.get("reasoning_content") for message in messages) and not source.reads_thoughts:
            raise FieldError("messages", "must have no reasoning_content: the chat template does not read it")
        given = _given(messages, rendering, source)
        chosen = _chosen(rendering, source, (*given, *self._names()))
        variables_hidden = self._hide_control_tokens({**given, **chosen}, hiding, self._control_to_learn)
        hidden: dict[str, Any] = {**variables_hidden, **self._names()}
        if source.marks_answers:
            begin, end = (f"{hiding.mark}{word}" for word in ("begin", "end"))
            text = source.render({**hidden, ANSWER_MARKS: (begin, end)})
            first, *others = text.split(begin)
            pieces = [(first, False)]
            for answer, _, rest in (other.partition(end) for other in others):
                pieces += [(answer, True), (rest, False)]
        else:
            pieces = _answers_by_prefixes(source, hidden)
        tokens, are_answers = list[int](), list[bool]()
        for piece, is_answer in pieces:
            encoded = self._encode(hiding.split(piece))
            tokens += encoded
            are_answers += [is_answer] * len(encoded)
        return Conversation(tokens, are_answers)

    def _hide_control_tokens(
        self, variables: Mapping[str, Any], hiding: _Hiding, answer_tokens: re.Pattern[str]
    ) -> dict[str, Any]:
        """A template's variables without the control tokens that their texts spell; those of the assistant's differ."""
        hide, hide_in_answers = (partial(hiding.hide, tokens) for tokens in (self._control, answer_tokens))
        messages = [
            _map_texts(message, hide_in_answers if message["role"] == "assistant" else hide)
            for message in variables["messages"]
        ]
        return {**_map_texts({**variables, "messages": []}, hide), "messages": messages}

    def _names(self) -> dict[str, str]:
        config = self._tokenizer.config
        return {key: token_text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token")}

    def _encode(self, parts: Sequence[str]) -> list[int]:
        """Encode parts of a text: the even ones have control tokens, the odd ones spell them."""
        # `encode` of a single text would hold the interpreter's lock, and with it every other thread
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(list(parts), add_special_tokens=False)]
        for i, part in enumerate(parts[1::2]):
            # a token that is not special is found wherever its text is whole
            pieces = [part] if part in self._special else [part[:1], part[1:]]
            encoded[2 * i + 1] = [token for tokens in self._tokenizer.encode_batch(pieces) for token in tokens]
        return [token for tokens in encoded for token in tokens]


class _Hiding:
    """Replaces tokens that texts spell, while a template is rendered.

    Attributes:
        mark: a random text, of which no template or message knows.
    """

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._found = list[str]()

    def hide(self, tokens: re.Pattern[str], text: str) -> str:
        """Replace the tokens of a text."""
        return tokens.sub(self._replace, text)

    def split(self, text: str) -> list[str]:
        """Split a rendered text: the even parts are as rendered, the odd ones are what was replaced."""
        first, *others = text.split(self.mark)  # a regular expression of each mark would have to be compiled
        parts = [first]
        for other in others:
            number = other[:DIGITS]
            if len(number) == DIGITS and number.isascii() and number.isdecimal():
                parts += [self._found[int(number)], other[DIGITS:]]
            else:
                parts[-1] += self.mark + other
        return parts

    def _replace(self, match: re.Match[str]) -> str:
        self._found.append(match[0])
        return f"{self.mark}{len(self._found) - 1:0{DIGITS}d}"


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which functions have the fields that a request may leave out, for templates that write them anyway.

    What prints a function as a whole, such as `tools | tojson`, does not see them.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return obj.attribute."""
        return _or_left_out(obj, attribute, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return obj[argument]."""
        return _or_left_out(obj, argument, super().getitem(obj, argument))


def _or_left_out(obj: Any, name: Any, found: Any) -> Any:
    is_function = isinstance(found, Undefined) and isinstance(obj, Mapping) and "name" in obj
    return LEFT_OUT.get(name, found) if is_function and isinstance(name, str) else found


class _AnswerTag(Extension):
    """transformers' `{% generation %}…{% endgeneration %}` around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked", [nodes.ContextReference()]), [], [], body).set_lineno(line)

    def _marked(self, context: Context, caller: Macro) -> str:
        begin, end = context.get(ANSWER_MARKS) or ("", "")
        return f"{begin}{caller()}{end}"


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the names, the longest one of those that begin at the same place."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _given(messages: Sequence[Mapping[str, Any]], rendering: Rendering, source: _Source) -> dict[str, Any]:
    """The variables of a template that a request does not choose.

    Raises:
        FieldError: the template does not read the messages' calls.
    """
    if any("tool_calls" in message for message in messages) and not source.reads_calls:
        raise FieldError("messages", "must have no tool_calls: the chat template does not read them")
    return {
        "messages": messages,
        "add_generation_prompt": rendering.add_generation_prompt,
        "tools": rendering.tools or None,
        "documents": None,
    }


def _answers_by_prefixes(source: _Source, variables: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Split a conversation into (text, whether it is an answer), by rendering its beginnings.

    An answer is what the template writes for a message of the assistant after it has begun it
    (`add_generation_prompt`).

    Raises:
        ValueError: the template never begins an answer, or a beginning is rendered in another way than in the whole
            conversation.
    """
    if not source.begins_answers:
        raise ValueError(
            "the chat template does not read add_generation_prompt, so it is not known where an answer begins: mark "
            "what the assistant writes with {% generation %} in the template"
        )
    messages = variables["messages"]
    whole = source.render(variables)
    pieces, done = list[tuple[str, bool]](), 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = source.render({**variables, "messages": messages[:i], "add_generation_prompt": True})
            through = source.render({**variables, "messages": messages[: i + 1]})
            if not (through.startswith(before) and whole.startswith(through) and len(before) >= done):
                raise ValueError(
                    f"messages[{i}]: the chat template writes this answer, or what precedes it, in another way in the "
                    "whole conversation than up to here, so the answer's tokens are not known: mark what the assistant "
                    "writes with {% generation %} in the template"
                )
            pieces += [(whole[done : len(before)], False), (whole[len(before) : len(through)], True)]
            done = len(through)
    return [*pieces, (whole[done:], False)]


class _Source:
    """A template.

    Args:
        source: jinja.

    Attributes:
        variables: names of the variables that it reads.
        reads_calls: whether it reads the tool_calls of messages.
        reads_thoughts: whether it reads the reasoning_content of messages.
        reads_clock: whether what it writes may depend on the time.
        marks_answers: whether it marks what the assistant writes.
        begins_answers: whether it reads `add_generation_prompt`.

    Raises:
        ValueError: the source is not jinja.
    """

    def __init__(self, source: str):
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _AnswerTag])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals[CLOCK] = lambda form: datetime.now().strftime(form)
        self.reads_calls, self.reads_thoughts = "tool_calls" in source, "reasoning_content" in source
        self.reads_clock = CLOCK in source
        try:
            parsed = environment.parse(source)
            self.marks_answers = next(parsed.find_all(nodes.ExtensionAttribute), None) is not None
            self.begins_answers = any(
                name.name == "add_generation_prompt" and name.ctx == "load" for name in parsed.find_all(nodes.Name)
            )
            self.variables = frozenset(find_undeclared_variables(parsed))
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat_template is not jinja: {error}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template; raise ValueError if it refuses the messages, or fails."""
        try:
            return self._template.render(variables)
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as e:
            raise ValueError(f"the chat template refuses the messages: {e}") from None


def _before(text: str, end: str) -> str:
    """A rendered text up to the end of its last message, as transformers has it.

    Args:
        text: the text.
        end: what was written after the message. Where its own last space is missing, the template trims messages.

    Raises:
        FieldError: the template does not show the message.
    """
    begin = text.rfind(end.rstrip())
    if begin < 0:
        raise FieldError("continue_final_message", "must be false: the chat template does not show the last message")
    return text[:begin] if text.startswith(end, begin) else text[:begin].rstrip()


def _chosen(rendering: Rendering, source: _Source, given: Sequence[str]) -> dict[str, Any]:
    """The variables of a template that a request chooses.

    Args:
        rendering: what a request asks for.
        source: the template.
        given: names of the other variables.

    Raises:
        FieldError: a name is taken, or the template does not read the tools.
    """
    variables, effort = dict(rendering.variables), rendering.reasoning_effort
    if rendering.tools and "tools" not in source.variables:
        raise FieldError("tools", "must be empty: the chat template does not read them")
    for name in (*given, *NO_VARIABLES):
        if name in variables:
            raise FieldError("chat_template_kwargs", f"must not have {name}: octile gives it to the template")
    if effort is not None and "reasoning_effort" in variables:
        raise FieldError("reasoning_effort", "must not be in chat_template_kwargs, too: give one of them")
    if effort is not None and "reasoning_effort" in source.variables:
        variables["reasoning_effort"] = effort
    return variables


def _check_effort(effort: str, is_thinking: bool) -> None:
    """Refuse a reasoning_effort that the template does not read, unless it changes nothing.

    "none" changes nothing where the template begins no thought.

    Raises:
        FieldError: it would change something.
    """
    if effort != "none":
        why = f"the chat template does not read it, so {effort!r} would have no effect"
        raise FieldError("reasoning_effort", f"must be 'none' for this model: {why}")
    if is_thinking:
        why = "the chat template does not read it, and begins a thought for this request"
        raise FieldError("reasoning_effort", f"must not be 'none': {why}")


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with all of its texts changed, names of fields, too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Arguments):
        return Arguments(_map_texts(dict(value), change), change(value.text))
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(member, change) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(member, change) for member in value]
    return value


def _in_config(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template in a tokenizer's configuration: the only one, or of several named ones the default; and tool_use."""
    template, tool_use = config.get("chat_template"), None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template, tool_use = named.get("default"), named.get("tool_use")
        if template is None:
            raise ValueError(
                f"the tokenizer's chat_template has none named default: there are {', '.join(map(str, named))}"
            )
    for text in (template, tool_use):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"the tokenizer's chat_template must be a text, not {type(text).__name__}")
    return template, tool_use


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, with the arguments of transformers'."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
