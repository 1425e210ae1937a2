"""The display of single tokens to a reader."""

from __future__ import annotations

import re

from octile.byte_level import byte_of_character
from octile.tokenizer import Tokenizer

VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})
LONG_RUN = re.compile(r"([␣↵␍⇥\s])\1{3,}")  # of visible white space


def visible_token(tokenizer: Tokenizer, token: int) -> str:
    """A token's text with visible white space, long runs of it counted; its bytes if they are not valid UTF-8."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        byte_of = byte_of_character()
        return "bytes " + " ".join(f"{byte_of[c]:02X}" for c in tokenizer.backend.id_to_token(token) or "")
    return LONG_RUN.sub(lambda run: f"{run[1]}×{len(run[0])} ", text.translate(VISIBLE)).rstrip(" ")
