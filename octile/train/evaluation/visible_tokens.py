"""The display of single tokens to a reader."""

from __future__ import annotations

import re

from octile.tokenizer import Tokenizer

VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})
LONG_RUN = re.compile(r"([␣↵␍⇥\s])\1{3,}")  # of visible white space


def visible_token(tokenizer: Tokenizer, token: int) -> str:
    """A token's text with visible white space, long runs of it counted; its bytes if they are not valid UTF-8."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        return "bytes " + " ".join(f"{_byte(c):02X}" for c in tokenizer.backend.id_to_token(token) or "")
    return LONG_RUN.sub(lambda run: f"{run[1]}×{len(run[0])} ", text.translate(VISIBLE)).rstrip(" ")


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def _byte(character: str) -> int:
    """The byte that a character represents in a byte-level vocabulary: itself, or the n-th non-printable byte."""
    code = ord(character)
    return code if code < 256 else _OTHERS[code - 256]
