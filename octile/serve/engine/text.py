"""From tokens to pieces of text: characters whose bytes are complete, up to a stop string.

A token is a sequence of bytes, which need not end with a character, and a stop string need not begin or end with a
token. So a piece of text may come later than its token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octile.tokenizer import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MARK = "\ud800"  # before the name of a shown token: no bytes of a text become a surrogate
MAX_PENDING = 8  # tokens after the last piece: a character has four bytes at most


class TextStream:
    """The text of one request, as it grows.

    Args:
        tokenizer: decodes the tokens.
        stop: strings that end the text before them.
        skip_special_tokens: whether special tokens add nothing; otherwise they appear as their names.
        shown_tokens: special tokens that are not skipped. `MARK` stands before their names, which text that only
            spells one does not have, unless the tokenizer has no `token_bytes`. Stop strings do not see it.

    Attributes:
        is_stopped: whether a stop string was found. Further tokens add nothing.
        stopped_by: that stop string; of several the one that begins first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = False,
        shown_tokens: Sequence[int] = (),
    ):
        self._tokenizer, self._stop, self._shown = tokenizer, stop, frozenset(shown_tokens)
        self._skipped = tokenizer.special_tokens.difference(shown_tokens) if skip_special_tokens else frozenset[int]()
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []  # where the tokenizer has to decode: those of the last piece, and those after it
        self._n_before = 0  # those of the last piece, which the decoder may read for the next
        self._withheld = ""  # may be the beginning of a stop string
        self.is_stopped = False
        self.stopped_by: str | None = None

    def add(self, token: int, may_stop: bool = True) -> str:
        """Append a token, and return the text that it completes; may_stop: whether a stop string may end the text."""
        if token in self._skipped:
            return ""
        if self._bytes is not None:
            # a model's vocabulary may be larger than the tokenizer's: such tokens have no text
            new = self._decoder.decode(self._bytes[token]) if token < len(self._bytes) else ""
            if token in self._shown:
                name = self._bytes[token].decode()
                new = f"{new.removesuffix(name)}{MARK}{name}"
            return self._release(new, may_stop)
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(INCOMPLETE) and len(self._tokens) - self._n_before < MAX_PENDING:
            return ""
        return self._release(self._beyond_last(text), may_stop)

    def end(self) -> str:
        """Return the rest of the text. Bytes that are no character become the replacement character."""
        if self._bytes is not None:
            rest = self._decoder.decode(b"", final=True)
        else:
            rest = self._beyond_last(self._tokenizer.decode(self._tokens))
        text = self._release(rest, may_stop=True) + self._withheld
        self._withheld = ""
        return text

    def _beyond_last(self, text: str) -> str:
        """Return what `text`, that of all `_tokens`, adds to the last piece."""
        new = text[len(self._tokenizer.decode(self._tokens[: self._n_before])) :]
        if new or len(self._tokens) > MAX_PENDING:
            del self._tokens[: self._n_before]
            self._n_before = len(self._tokens)
        return new

    def _release(self, new: str, may_stop: bool) -> str:
        """Return the text up to a stop string, or up to what may become one."""
        if self.is_stopped:
            return ""
        if not self._stop:
            return new
        text = self._withheld + new
        plain = text.replace(MARK, "")
        found = [(i, stop) for i, stop in ((plain.find(stop), stop) for stop in self._stop) if i >= 0]
        if found and may_stop:
            end, self.stopped_by = min(found)
            self.is_stopped, self._withheld = True, ""
            return text[: _length_with_marks(text, end)]
        end = _length_with_marks(text, len(plain) - max(overlap(plain, stop) for stop in self._stop))
        self._withheld = text[end:]
        return text[:end]


def _length_with_marks(text: str, length: int) -> int:
    """Return the length of a text's beginning that has so many characters besides marks."""
    end = length
    while end - text.count(MARK, 0, end) < length:
        end += 1
    return end


def overlap(text: str, searched: str) -> int:
    """Return the length of the longest end of a text with which the searched string begins, but is not complete."""
    return next((n for n in range(min(len(searched) - 1, len(text)), 0, -1) if text.endswith(searched[:n])), 0)
