"""Reads examples to fine-tune on: a JSONL file, or all in a folder. Each line is an object of one of three kinds.

    {"messages": [{"role": …, "content": …}, …]}    a conversation, by the tokenizer's chat template; the loss is that
                                                    of the assistant's messages. It may have "tools" and
                                                    "chat_template_kwargs", too
    {"prompt": TEXT, "completion": TEXT}            the loss is that of the completion and of the end of the text
    {"text": TEXT}                                  the loss is that of the whole text and its end

Fields that are null count as absent, and other fields are not read. Text that spells a special token is text. A line
has at most MAX_LINE bytes, so that a file without line ends, such as one of binary data, is not read as a whole.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from octile.chat.template import Arguments, ChatTemplate, FieldError, Rendering
from octile.tokenizer import Tokenizer
from octile.train.data.corpus import files_below, is_path, why_not_opened
from octile.validation import quoted

SUFFIX = ".jsonl"
KINDS = '"messages", or "prompt" and "completion", or "text"'
TEXTS = ("messages", "prompt", "completion", "text")
FIELDS = (*TEXTS, "tools", "chat_template_kwargs")
MAX_LINE = 2**24  # bytes, the line end included; millions of tokens
NO_TEMPLATE = (
    "; the tokenizer has no chat template, so octile's plain one writes messages: add the model's chat_template.jinja "
    "to its folder"
)
NAMED = 10  # lines of a file that are no examples and are named, with what is wrong
BEGIN = 4096  # bytes in which a file of examples begins one
ROLES = ("system", "developer", "user", "assistant", "tool")


class Example(NamedTuple):
    """A text to train on.

    Attributes:
        line: its line in the file, from 1.
        n_bytes: the bytes of that line, without a byte order mark.
        tokens: its tokens.
        has_loss: for each token whether it is to be predicted.
        prompt: the tokens before the first answer to a user; if there is none, all tokens.
        empty_answers: the answers and completions without text and calls, which have the loss of their end alone.
    """

    line: int
    n_bytes: int
    tokens: list[int]
    has_loss: list[bool]
    prompt: list[int]
    empty_answers: int


def is_examples(source: str | Path) -> bool:
    """Whether a source of data is a file of examples, by its name, or a folder with files of examples."""
    if is_path(source) and Path(source).is_dir():
        return any(begins_with_example(file) == "line" for file in example_files(source))
    return is_path(source) and str(source).endswith(SUFFIX)


def example_files(source: str | Path) -> list[Path]:
    """The files of examples: the named one, or those below a folder that have the suffix, sorted by their names there.

    Files and folders that a text corpus leaves out without opening them are left out here, too.
    """
    path = Path(source)
    if not path.is_dir():
        return [path]
    if why_not_opened(path) is not None:  # a folder of the kernel
        return []
    return [file for file in files_below(path)[0] if file.suffix == SUFFIX and why_not_opened(file) is None]


def begins_with_example(path: Path) -> Literal["line", "array"] | None:
    """How a file begins with an example, whatever the file's name: as a line, or in a JSON array; None if it does not.

    An example of more than MAX_LINE bytes is none.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(min(BEGIN, MAX_LINE))
            if not begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[")):
                return None
            begin += file.read(MAX_LINE - len(begin))
    except OSError:  # reading the data says why
        return None
    text = begin.removeprefix(codecs.BOM_UTF8).decode(errors="replace").lstrip()
    is_array = text.startswith("[")
    try:
        row, end = json.JSONDecoder().raw_decode(text := text[is_array:].lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not ("messages" in row or "text" in row or {"prompt", "completion"} <= row.keys()):
        return None
    if is_array:
        return "array"
    is_line = "\n" not in text[:end] and not text[end:].partition("\n")[0].strip()
    return "line" if is_line else None


def read_examples(path: Path, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Example]:
    """Read the examples of a file, in its order. Empty lines are skipped.

    Args:
        path: the file.
        tokenizer: the tokenizer.
        template: its chat template.

    Raises:
        ValueError: after the last example, if lines are no examples, or the template does not render them: names the
            file, their number, and the first NAMED with what is wrong. Behind a line longer than MAX_LINE none is read.
    """
    refused, count, hint = list[str](), 0, ""
    try:
        for number, line in read_lines(path, str(path)):
            try:
                fields = _read(_parse(line), tokenizer, template)
            except (ValueError, RecursionError) as error:
                is_deep = isinstance(error, RecursionError)
                if template.is_plain and isinstance(error, FieldError):
                    hint = NO_TEMPLATE
                count += 1
                if count <= NAMED:
                    why = "its objects and lists are nested too deeply" if is_deep else error
                    refused.append(f"line {number}: {why}")
            else:
                yield Example(number, len(line), *fields)
    except ValueError as error:  # a line that is too long
        count += 1
        refused.append(str(error).removeprefix(f"{path}, "))
    if count == 1:
        raise ValueError(f"{path}, {refused[0]}{hint}")
    if count:
        more = f"; and {count - len(refused):,} more" if count > len(refused) else ""
        raise ValueError(f"{path}: {count:,} lines are no examples: {'; '.join(refused)}{more}{hint}")


def read_lines(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a JSONL file, each with its number from 1. Empty lines and a byte order mark are skipped.

    Args:
        path: the file.
        name: what messages call it.

    Raises:
        ValueError: a line is longer than MAX_LINE.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), b""), start=1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{name}, line {number}: must have at most {MAX_LINE:,} bytes, but has more")
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield number, text


def _parse(line: bytes) -> dict[str, Any]:
    """The fields of a line that are read and not null."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object with {KINDS}, not {quoted(row)}")
    read = {name: value for name, value in row.items() if name in FIELDS and value is not None}
    if not any(name in read for name in TEXTS):
        raise ValueError(f"must have {KINDS}; it has {', '.join(map(repr, row)) or 'no field'}")
    if len(pair := read.keys() & {"prompt", "completion"}) == 1:
        (lacking,) = {"prompt", "completion"} - pair
        raise ValueError(f"has no {lacking}; it has {', '.join(map(repr, row))}")
    for name, value in read.items():
        check_encodable(name, value)
    return read


def check_encodable(name: str, value: object) -> None:
    """Refuse a value of JSON whose text UTF-8 cannot encode.

    Raises:
        ValueError: it has a lone surrogate; names `name`.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"{name} must be text that UTF-8 can encode, but has a lone surrogate, \\u{code:x}") from None


def _read(
    row: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[bool], list[int], int]:
    """The tokens, losses, prompt and number of empty answers of an example."""
    kinds = [kind for kind in (("messages",), ("prompt", "completion"), ("text",)) if any(name in row for name in kind)]
    if len(kinds) != 1:
        raise ValueError(f"must have no more than {KINDS}; it has {', '.join(map(repr, row))}")
    if kinds[0] == ("messages",):
        return _conversation(row, tokenizer, template)
    texts = []
    for name in kinds[0]:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} must be a text, not {quoted(row.get(name))}")
        texts.append(row[name])
    *prompt, answer = texts
    before = tokenizer.encode_prompt(prompt[0]) if prompt else [tokenizer.begin]
    after = [*tokenizer.encode(answer), tokenizer.end]
    tokens = before + after
    has_loss, n_empty = [False] * len(before) + [True] * len(after), int(bool(prompt) and not answer.strip())
    return tokens, has_loss, before if any(prompt) else tokens, n_empty


def _conversation(
    row: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[bool], list[int], int]:
    read, tools, variables = read_messages(row)
    tokens, has_loss = template.conversation(read, tools, variables)
    if template.is_plain and read[-1]["role"] == "assistant":  # a plain template does not end a text
        tokens, has_loss = [*tokens, tokenizer.end], [*has_loss, True]
    n_empty = sum(message["role"] == "assistant" and _is_empty(message) for message in read)
    roles = [message["role"] for message in read]
    answers = [i for i, role in enumerate(roles) if role == "assistant" and "user" in roles[:i]]
    if not answers:
        return tokens, has_loss, tokens, n_empty
    return tokens, has_loss, template.prompt(read[: answers[0]], Rendering(tools, variables)).tokens, n_empty


def read_messages(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """The messages of a row as chat templates read them, its tools, and the template's further variables.

    Raises:
        ValueError: a field is not what it must be.
    """
    messages, tools, variables = row["messages"], row.get("tools") or [], row.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {quoted(messages)}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools must be a list of objects, not {quoted(tools)}")
    if not isinstance(variables, dict):
        raise ValueError(f"chat_template_kwargs must be an object, not {quoted(variables)}")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)], tools, variables


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a message has no text, no thought and no calls."""
    texts = message["content"] or "", message.get("reasoning_content") or ""
    return "tool_calls" not in message and not any(str(text).strip() for text in texts)


def _message(name: str, message: object) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    if not isinstance(message, dict):
        raise ValueError(f'{name} must be {{"role": …, "content": …}}, not {quoted(message)}')
    message = {key: value for key, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if role is None:
        raise ValueError(f"{name} has no role; it has {', '.join(map(repr, message)) or 'no field'}")
    if role not in ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(ROLES)}, not {quoted(role)}")
    if message.get("weight", 1) != 1:
        raise ValueError(f"{name}.weight must be 1, not {quoted(message['weight'])}: every answer has a loss")
    if isinstance(content, list):
        content = _joined(f"{name}.content", content)
    calls = message.get("tool_calls") or []
    if not isinstance(content, str) and not (content is None and role == "assistant" and calls):
        raise ValueError(f"{name}.content must be a text, not {quoted(content)}")
    read = {key: value for key, value in message.items() if key not in ("weight", "tool_calls")}
    read |= {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        read["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    return read


def _joined(name: str, parts: Sequence[object]) -> str:
    """The text of a content that is a list of parts."""
    texts = []
    for i, part in enumerate(parts):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f'{name}[{i}] must be {{"type": "text", "text": TEXT}}, not {quoted(part)}')
        texts.append(part["text"])
    if not texts:
        raise ValueError(f"{name} must be a text, or a list of at least one part, not []")
    return "".join(texts)


def _calls(name: str, calls: object) -> list[dict[str, Any]]:
    """Return a message's calls as chat templates read them."""
    if not isinstance(calls, list):
        raise ValueError(f"{name} must be a list, not {quoted(calls)}")
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{name}[{i}] must be {{"function": {{"name": TEXT, "arguments": …}}}}, not {quoted(call)}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = Arguments.parse(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(
                f"{name}[{i}].function.arguments must be an object, or the JSON of one, not {quoted(arguments)}"
            )
        if not isinstance(arguments, Arguments):
            arguments = Arguments(arguments, json.dumps(arguments, ensure_ascii=False))
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
