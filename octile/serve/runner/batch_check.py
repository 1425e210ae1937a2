"""The check of a batch before a step: whether the model and its cache have what the chunks name."""

from __future__ import annotations

from array import array

from octile.ops.latent_cache import PAGE
from octile.serve.runner.batch import Batch, Chunk


class BatchCheck:
    """Checks batches, one after the other; pages that the chunk of the same number had before are not checked again.

    Args:
        vocab_size: tokens of the model.
        max_position: positions are below it.
        n_pages: pages of the cache.
    """

    def __init__(self, vocab_size: int, max_position: int, n_pages: int):
        self._vocab_size, self._max_position, self._n_pages = vocab_size, max_position, n_pages
        self._checked: list[array[int] | None] = []  # the pages of the chunk of each number

    def __call__(self, batch: Batch) -> None:
        """Check a batch.

        Raises:
            ValueError: it is empty, a chunk has no tokens or too many logits, a token is not in the vocabulary, a
                position is not below max_position, or a page is missing or not in the cache.
        """
        chunks = batch.chunks
        if not chunks:
            raise ValueError("batch must have at least one chunk")
        checked = self._checked
        checked += [None] * (len(chunks) - len(checked))
        for i, chunk in enumerate(chunks):
            pages = chunk.pages
            why = self._why_not(chunk) or (None if checked[i] == pages else self._why_not_pages(pages))
            if why is not None:
                raise ValueError(f"chunk {i} {why}")
            if checked[i] != pages:
                checked[i] = pages[:]

    def _why_not(self, chunk: Chunk) -> str | None:
        """Return why a chunk cannot be run, whatever pages it names; None: it can."""
        tokens, start, pages, n_logits = chunk
        size = len(tokens)
        if not size or not 0 <= n_logits <= size:
            return f"must have tokens and at most as many logits, not {size} tokens and n_logits {n_logits}"
        if start < 0 or start + size > self._max_position:
            return f"has positions {start} to {start + size - 1}, but they must be from 0 to {self._max_position - 1}"
        needed = (start + size + PAGE - 1) // PAGE
        if len(pages) < needed:
            return f"has {len(pages)} pages, but {start + size} positions need {needed}"
        if not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            return f"must have tokens from 0 to {self._vocab_size - 1}, not {min(tokens)} to {max(tokens)}"
        return None

    def _why_not_pages(self, pages: array[int]) -> str | None:
        """Return why the cache does not have all pages; None: it has."""
        if min(pages) < 0 or max(pages) >= self._n_pages:
            return f"must have pages from 0 to {self._n_pages - 1}, not {list(pages)}"
        return None
