"""The sequences of tokens that are a forbidden word, for `Sampling.bad_words`.

A word is encoded at the beginning of a text and after a space, as vLLM does. Other divisions of its characters into
tokens, which a model seldom samples, are not forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable

from octile.tokenizer import Tokenizer


def token_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens of words, each once."""
    forms = [form for word in words for form in (word, f" {word.lstrip(' ')}")]
    encoded = tokenizer.encode_batch(forms) if forms else []
    return tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))
