"""Which tokens a text has so far: what penalties and forbidden words depend on.

Shapes: none; lists of tokens on the host, of one request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np


class TokenCounts:
    """The tokens of a prompt, and how often each token was generated since.

    Args:
        prompt: the tokens of the prompt.

    Attributes:
        prompt: its different tokens, int64, in ascending order.
        generated: how often each token was generated.
    """

    def __init__(self, prompt: Sequence[int]):
        self.prompt = np.unique(np.asarray(prompt, dtype=np.int64))
        self.generated = Counter[int]()
        self._read = len(prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """Count the generated tokens of a text that were not counted yet; tokens: the prompt and those."""
        self.generated.update(tokens[self._read :])
        self._read = len(tokens)


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
        counts = self.counts.generated + Counter(self.drafts) if self.drafts else self.counts.generated
        return _int64(counts.keys(), len(counts)), _int64(counts.values(), len(counts))

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the last generated tokens are these."""
        n = len(tokens)
        if not n:
            return True
        last = [*self.generated[-n:], *self.drafts][-n:]
        return last == list(tokens)


def _int64(numbers: Iterable[int], n: int) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64, count=n)
