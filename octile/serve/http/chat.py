"""The chat template: messages to the tokens of a prompt.

A template is jinja, as transformers has it in `tokenizer_config.json` or `chat_template.jinja`. It runs in a sandbox. A
base model has none; it gets a plain one, and the server says so.

Text of a message that spells a special token stays text: it cannot end a message or begin another.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octile.tokenizer import Tokenizer, token_text
from octile.validation import read_text

PLAIN = """\
{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}

{% endfor %}Assistant:"""
PLAIN_STOP = ("\n\nUser:",)


class ChatTemplate:
    """The chat template of a tokenizer, or a plain one.

    Args:
        tokenizer: the tokenizer.
        source: jinja, or None for the plain template: a role, a colon and the text for each message.

    Attributes:
        is_plain: whether the tokenizer has no template of its own.
        stop: strings that end an answer besides those of the request.

    Raises:
        ValueError: the template is not jinja.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None):
        self.is_plain, self.stop = source is None, PLAIN_STOP if source is None else ()
        self._tokenizer = tokenizer
        self._backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = False  # those that the template writes
        added = self._backend.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._template = _compile(PLAIN if source is None else source)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read the template of a folder.

        Args:
            folder: that has the tokenizer, and perhaps a `chat_template.jinja`, which precedes the tokenizer's
                configuration.
            tokenizer: read from there.

        Raises:
            ValueError: there is a template, and it cannot be read.
        """
        file = folder / "chat_template.jinja"
        if not file.is_file():
            return cls(tokenizer, _of(tokenizer.config))
        return cls(tokenizer, read_text(file))

    def tokens(
        self, messages: Sequence[Mapping[str, str]], check: Callable[[str], object] = lambda text: None
    ) -> list[int]:
        """The prompt after which the model writes the assistant's next message.

        Args:
            messages: {"role", "content"} of each, and "name" and "tool_call_id" where they are given.
            check: is called with the prompt's text before the tokens are computed, and may raise.

        Raises:
            ValueError: the template refuses the messages, or fails.
        """
        mark, found = secrets.token_hex(8), list[str]()

        def hide(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"{mark}{len(found) - 1:08d}"

        hidden = [{key: self._special.sub(hide, text) for key, text in message.items()} for message in messages]
        names = {key: token_text(self._tokenizer.config.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        try:
            text = self._template.render(messages=hidden, add_generation_prompt=True, tools=None, **names)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        parts = re.split(f"{mark}([0-9]{{8}})", text)
        parts[1::2] = [found[int(part)] for part in parts[1::2]]
        check("".join(parts))
        # `encode` of a single text would hold the interpreter's lock, and with it every other thread
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(parts, add_special_tokens=False)]
        encoded[1::2] = self._tokenizer.encode_batch(parts[1::2])
        return [token for tokens in encoded for token in tokens]


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat_template is not jinja: {error}") from None


def _of(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer's configuration: the only one, or of several named ones the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
        if template is None:
            raise ValueError(
                f"the tokenizer's chat_template has none named default: there are {', '.join(map(str, named))}"
            )
    if template is not None and not isinstance(template, str):
        raise ValueError(f"the tokenizer's chat_template must be a text, not {type(template).__name__}")
    return template


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
