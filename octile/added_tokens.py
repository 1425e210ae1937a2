"""Tokens that a folder's JSON files add to a tokenizer: special ones, and words that are never split.

    tokenizer_config.json    added_tokens_decoder: id → text and properties
    added_tokens.json        text → id; their properties are the default ones

A tokenizer that transformers has saved has them in its tokenizer.json, too. Where that lacks some they are added here.
`tokenizers` chooses the ids of added tokens: that of a token of this text in the vocabulary, or the next id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octile.validation import from_json, quoted, read_json

if TYPE_CHECKING:
    import tokenizers

FILE = "added_tokens.json"
KEY = "added_tokens_decoder"


@dataclass(frozen=True)
class AddedToken:
    """An added token and its properties, as `tokenizers.AddedToken` has them.

    Attributes:
        content: the text of the token.
        single_word: whether it is not found inside a word.
        lstrip, rstrip: whether spaces before and after it belong to it.
        normalized: whether it is looked for in the normalized text; None: unless it is special.
        special: whether it is a mark that no text has.
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


def read_added_tokens(config_file: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens of a folder by their ids.

    Args:
        config_file: `tokenizer_config.json`; `added_tokens.json` may be next to it.
        config: its content.

    Raises:
        ValueError: an entry has another type, or one text or one id has two.
    """
    found: dict[int, AddedToken] = {}
    decoder = config.get(KEY) or {}
    if not isinstance(decoder, dict):
        raise ValueError(f"{config_file}: {KEY} must be an object, not {quoted(decoder)}")
    names = {field.name for field in fields(AddedToken)}
    for token, entry in decoder.items():
        if not token.isdecimal() or not isinstance(entry, dict):
            raise ValueError(f"{config_file}: {KEY} must have ids and their tokens, not {token!r}: {quoted(entry)}")
        known = {name: value for name, value in entry.items() if name in names}
        try:
            found[int(token)] = from_json(AddedToken, known, f"{KEY}.{token}")
        except ValueError as error:
            raise ValueError(f"{config_file}: {error}") from None
    file = config_file.with_name(FILE)
    for text, token in (read_json(file) if file.is_file() else {}).items():
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{file}: the id of {text!r} must be a whole number, not {quoted(token)}")
        if found.setdefault(token, AddedToken(text)).content != text:
            raise ValueError(f"{file}: {text!r} has the id {token}, but {KEY} has {found[token].content!r} there")
    return found


def add_tokens(backend: tokenizers.Tokenizer, tokens: Mapping[int, AddedToken], where: str) -> None:
    """Add the tokens that a tokenizer lacks.

    Args:
        backend: the tokenizer.
        tokens: token of each id.
        where: whose tokens they are, for messages.

    Raises:
        ValueError: the tokenizer has another token with the id of one, or cannot give that id to it.
    """
    import tokenizers

    has = {token: added.content for token, added in backend.get_added_tokens_decoder().items()}
    for token, added in sorted(tokens.items()):
        if has.get(token) == added.content:
            continue
        there = backend.id_to_token(token)
        if there is not None and there != added.content:
            raise ValueError(f"{where}: the id {token} of the added token {added.content!r} is that of {there!r}")
        normalized = not added.special if added.normalized is None else added.normalized
        how = {name: getattr(added, name) for name in ("single_word", "lstrip", "rstrip", "special")}
        backend.add_tokens([tokenizers.AddedToken(added.content, normalized=normalized, **how)])
        if (given := backend.token_to_id(added.content)) != token:
            raise ValueError(
                f"{where}: the added token {added.content!r} must have the id {token}, but {given} is its id or the "
                "next free one"
            )
