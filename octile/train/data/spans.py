"""Spans of held-out text that occur in training text, too: they are cut out of what is trained on.

Held-out loss is a measure of what a model learned only if the held-out text was not trained on. Exact duplicates of
documents are left out anyway; licenses, copied functions and other versions of a file are not. After cutting, no
`SPAN` consecutive tokens of a held-out document are in a training document.

Spans are compared by 64-bit hashes. If two different ones have the same, a span too much is cut. Memory: 8 bytes for
each held-out token, and what a batch of documents takes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octile.train.data.batches import mix

SPAN = 50  # tokens
FILTER_BITS = 27  # at most, of the table that is asked before the sorted hashes: 128 MiB

Tokens = npt.NDArray[np.integer]
Hashes = npt.NDArray[np.uint64]


class HeldOutSpans:
    """The spans of held-out documents, each of which is an array [T] that begins and ends with a special token.

    Args:
        special: the ids of these tokens; no span contains one.

    Attributes:
        cut_tokens: the tokens of text that were cut out.
    """

    def __init__(self, special: tuple[int, int]):
        self.cut_tokens = 0
        self._special = special
        self._parts: list[Hashes] = []
        self._sorted: Hashes | None = None

    def add(self, documents: Sequence[Tokens]) -> None:
        """Add the spans of held-out documents."""
        hashes, is_text = self._spans(np.concatenate(documents))
        self._parts.append(np.unique(hashes[is_text]))
        self._sorted = None

    def cut(self, documents: Sequence[Tokens]) -> Sequence[Tokens]:
        """Training documents without the spans that are held out.

        A document is divided where a span was, and each part begins and ends as a document does. Parts shorter than a
        span are left out, too.
        """
        if not documents:
            return documents
        tokens_T = np.concatenate(documents)
        hashes, is_text = self._spans(tokens_T)
        shared = np.flatnonzero(self._contains(hashes) & is_text)
        if not len(shared):
            return documents
        change = np.zeros(len(tokens_T) + 1, np.int32)
        change[shared] += 1
        change[shared + SPAN] -= 1
        is_left_T = change[:-1].cumsum() == 0
        parts: list[Tokens] = []
        ends = np.cumsum([len(document) for document in documents])
        for document, is_left in zip(documents, np.split(is_left_T, ends[:-1]), strict=True):
            parts += [document] if is_left.all() else self._parts_of(document, is_left)
        return parts

    def _parts_of(self, document: Tokens, is_left: npt.NDArray[np.bool_]) -> list[Tokens]:
        """The parts of a document that are left, with the tokens that begin and end it."""
        borders = np.flatnonzero(np.diff(is_left[1:-1], prepend=False, append=False)) + 1
        texts = [document[first:last] for first, last in borders.reshape(-1, 2) if last - first >= SPAN]
        self.cut_tokens += len(document) - 2 - sum(map(len, texts))
        return [np.concatenate([document[:1], text, document[-1:]]) for text in texts]

    def _spans(self, tokens_T: Tokens) -> tuple[Hashes, npt.NDArray[np.bool_]]:
        """The hash of each span of tokens [T], and whether it holds no special token."""
        hashes = hash_spans(tokens_T)
        before = np.concatenate(([0], np.isin(tokens_T, self._special).cumsum()))
        return hashes, before[len(before) - len(hashes) :] == before[: len(hashes)]

    def _contains(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Whether each hash is that of a held-out span. A table of its upper bits answers for most of them."""
        if self._sorted is None:
            self._sorted = np.unique(np.concatenate([*self._parts, np.zeros(0, np.uint64)]))
            bits = min(len(self._sorted).bit_length() + 5, FILTER_BITS)
            self._shift = np.uint64(64 - bits)
            self._filter = np.zeros(1 << bits, bool)
            self._filter[self._sorted >> self._shift] = True
        found = self._filter[hashes >> self._shift]
        maybe = np.flatnonzero(found)
        index = np.searchsorted(self._sorted, hashes[maybe])
        found[maybe] = self._sorted[np.minimum(index, len(self._sorted) - 1)] == hashes[maybe]
        return found


def hash_spans(tokens_T: Tokens) -> Hashes:
    """The hash of every span of tokens [T]: uint64 [T − SPAN + 1], or none if there are fewer tokens.

    A hash of 2n tokens is computed from two of n tokens, and SPAN is 32 + 16 + 2.
    """
    if len(tokens_T) < SPAN:
        return np.zeros(0, np.uint64)
    hashes = {1: mix(tokens_T.astype(np.uint64) + np.uint64(1))}
    for n in (1, 2, 4, 8, 16):
        hashes[2 * n] = _join(hashes[n], n, hashes[n])
    return mix(_join(_join(hashes[32], 32, hashes[16]), 48, hashes[2]))


def _join(first: Hashes, n: int, second: Hashes) -> Hashes:
    """The hashes of each span of `first`, of n tokens, together with the span of `second` that follows it."""
    length = len(second) - n
    return first[:length] * np.uint64(0x9E3779B97F4A7C15 + 2 * n) + second[n:]
