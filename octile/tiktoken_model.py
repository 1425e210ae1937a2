"""Read Moonshot's `tiktoken.model`, the vocabulary of Moonlight and Kimi-K2, as a tokenizer of `tokenizers`.

A line has the bytes of a token in base64 and its rank, which is its id. Of two adjacent tokens whose concatenation is a
token, those with the lowest rank are merged first. The file has neither the pattern by which a text is split into
words nor the special tokens. Moonshot's Python code next to it has the pattern. That code is not run: the pattern is
written here, and a folder whose code has another one is refused.

`tokenizers` has a rank for each pair that it merges, so every division of a token into two others is a pair with the
token's rank. The ids are those of the package `tiktoken`, but Moonshot's code first cuts texts of more than 400,000
characters and runs of more than 25,000 spaces or other characters.

Sources: https://github.com/openai/tiktoken; `tokenization_kimi.py`, published with Kimi-K2.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octile.added_tokens import AddedToken
from octile.byte_level import byte_of_character
from octile.validation import quoted, read_text

if TYPE_CHECKING:
    import tokenizers

FILE = "tiktoken.model"
MODULES = ("tokenization_kimi", "tokenization_moonshot")  # whose class TikTokenTokenizer has the pattern
RESERVED = 256  # ids after the ranks that are special tokens
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = (  # the words of a text: the first of these that matches
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def read_tiktoken_model(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read the vocabulary, without special tokens.

    Args:
        file: a `tiktoken.model`.
        config: content of the `tokenizer_config.json` next to it.

    Raises:
        ValueError: the file is damaged, or the tokenizer is not Moonshot's or has another pattern.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    _check_pattern(file, config)
    ranks = _read_ranks(file)
    characters = {byte: character for character, byte in byte_of_character().items()}
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = sorted(
        (rank, ranks[left], ranks[right], names[left], names[right])
        for token, rank in ranks.items()
        for left, right in ((token[:i], token[i:]) for i in range(1, len(token)))
        if left in ranks and right in ranks
    )
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocabulary, [pair[-2:] for pair in merges], ignore_merges=True))
    words = pre_tokenizers.Split(Regex("|".join(PATTERN)), "isolated")
    to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_characters])
    backend.decoder = decoders.ByteLevel()
    return backend


def reserved_tokens(n_ranks: int) -> dict[int, AddedToken]:
    """Return the special tokens as they are where `tokenizer_config.json` names no other ones, by their ids."""
    ids = range(n_ranks, n_ranks + RESERVED)
    return {token: AddedToken(f"<|reserved_token_{token}|>", special=True) for token in ids}


def _check_pattern(file: Path, config: Mapping[str, Any]) -> None:
    auto_map = config.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    name = named[0] if isinstance(named, list) and named else named
    module = str(name).rpartition("--")[2].removesuffix(".TikTokenTokenizer")  # REPOSITORY--MODULE.CLASS
    if module not in MODULES:
        raise ValueError(
            f"{file}: its pattern is known if auto_map in tokenizer_config.json names the class TikTokenTokenizer of "
            f"{' or '.join(MODULES)}, but it names {quoted(name)}; save the tokenizer as a tokenizer.json"
        )
    code = file.with_name(f"{module}.py")
    if code.is_file():
        text = read_text(code)
        if missing := [part for part in PATTERN if part not in text]:
            raise ValueError(
                f"{code} has another pattern than Kimi-K2's, without {missing[0]}: save the tokenizer as a "
                "tokenizer.json"
            )


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each token by its bytes."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{file} is damaged: line {number} is no token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file} is damaged: the ranks of its {len(ranks)} tokens are not 0, 1, 2, …")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{file} is damaged: the byte 0x{missing[0]:02x} is no token")
    return ranks
