"""Which tokens a text has so far: what penalties and forbidden words depend on.

Arrays grow with the text, so a step costs each text a copy of its different tokens, not another count of all of them.

Shapes: N different tokens; arrays on the host, of one request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np


class _GrowingArray:
    """An array of int64 that grows."""

    def __init__(self, numbers: Sequence[int] = ()):
        self._array = np.array(numbers, dtype=np.int64)
        self._n = len(numbers)

    @property
    def values(self) -> np.ndarray:
        """The appended numbers, as a view."""
        return self._array[: self._n]

    def append(self, number: int) -> None:
        if self._n == len(self._array):
            self._array = np.concatenate((self._array, np.zeros(max(64, self._n), np.int64)))
        self._array[self._n] = number
        self._n += 1


class TokenCounts:
    """The tokens of a prompt, and how often each token was generated since.

    Args:
        prompt: the tokens of the prompt.
    """

    def __init__(self, prompt: Sequence[int]):
        self._n_read = len(prompt)
        self._prompt = set(prompt)
        self._seen = _GrowingArray([*self._prompt])
        self._tokens, self._counts = _GrowingArray(), _GrowingArray()
        self._index: dict[int, int] = {}  # of each generated token in these

    @property
    def seen(self) -> np.ndarray:
        """The different tokens of prompt and text, int64 [N]."""
        return self._seen.values

    @property
    def generated(self) -> tuple[np.ndarray, np.ndarray]:
        """The different generated tokens, and how often each of them was generated: int64 [N] each."""
        return self._tokens.values, self._counts.values

    def read(self, tokens: Sequence[int]) -> None:
        """Count the generated tokens of a text that were not counted yet; tokens: the prompt and those."""
        for token in tokens[self._n_read :]:
            i = self._index.setdefault(token, len(self._index))
            if i == len(self._tokens.values):
                self._tokens.append(token)
                self._counts.append(0)
                if token not in self._prompt:
                    self._seen.append(token)
            self._counts.values[i] += 1
        self._n_read = len(tokens)

    def generated_with(self, drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return `generated` of the text with some drafts after it."""
        tokens, counts = self.generated
        if not drafts:
            return tokens, counts
        counts, new = counts.copy(), Counter[int]()
        for token in drafts:
            if token in self._index:
                counts[self._index[token]] += 1
            else:
                new[token] += 1
        return np.concatenate((tokens, _int64(new))), np.concatenate((counts, _int64(new.values())))

    def seen_with(self, drafts: Sequence[int]) -> np.ndarray:
        """Return `seen` of the text with some drafts after it."""
        new = {token for token in drafts if token not in self._index and token not in self._prompt}
        return np.concatenate((self.seen, _int64(new))) if new else self.seen


class History(NamedTuple):
    """What is before a row's token.

    Attributes:
        counts: tokens of the prompt and generated ones, without drafts.
        generated: the generated tokens, in their order.
        drafts: draft tokens that follow them.
        end_tokens: end-of-text tokens, which `min_tokens` of a sampling holds back.
        mask: which tokens the text's grammar allows, int32 [V / 32], a bit for each; None: all.
    """

    counts: TokenCounts
    generated: Sequence[int]
    drafts: Sequence[int] = ()
    end_tokens: Collection[int] = ()
    mask: np.ndarray | None = None

    @property
    def n_generated(self) -> int:
        """Tokens before the row's that were generated, drafts among them."""
        return len(self.generated) + len(self.drafts)

    def generated_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the different generated tokens, and how often each of them was generated: int64 [N] each."""
        return self.counts.generated_with(self.drafts)

    def seen(self) -> np.ndarray:
        """Return the different tokens of prompt and text, int64 [N]."""
        return self.counts.seen_with(self.drafts)

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the last generated tokens are these."""
        n = len(tokens)
        if not n:
            return True
        last = [*self.generated[-n:], *self.drafts][-n:]
        return last == list(tokens)


def _int64(numbers: Collection[int]) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64, count=len(numbers))
