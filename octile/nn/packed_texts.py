"""Several texts in each sequence: which tokens see each other, and which losses count.

A token attends to those of its own text only, and positions count from the beginning of the text. What is predicted
from another text has no loss: not the first token of a text, and not the second one by multi-token prediction, which
reads it from the text before.

Shapes: B batch, S sequence, T = B·S tokens, N texts at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.cross_entropy import IGNORED


@dataclass(frozen=True)
class PackedTexts:
    """Where the texts of packed sequences begin.

    Attributes:
        is_first_BS: bool [B, S], whether a token is the first of a text. The first of a sequence counts as such.
        max_texts: the most texts of a sequence, which fixes the shape of `borders`; S if not given.
    """

    is_first_BS: Tensor
    max_texts: int | None = None

    def borders(self) -> Tensor:
        """Compute what attention needs to know of the texts, on the device, without waiting for it.

        Returns:
            int32 [N + 1], the first of the T tokens of each text, then T; empty texts fill it up.
        """
        b, s = self.is_first_BS.shape
        n, length = b * min(self.max_texts or s, s), b * s
        row_T = torch.arange(length, dtype=torch.int32, device=self.is_first_BS.device)
        start_T = torch.where(self._starts().flatten(), row_T, length).sort().values
        return F.pad(start_T[:n], (0, 1), value=length)

    def positions(self) -> Tensor:
        """Return the position of each token in its text, int64 [B, S]."""
        at_S = torch.arange(self.is_first_BS.shape[1], device=self.is_first_BS.device)
        return at_S - torch.where(self._starts(), at_S, 0).cummax(dim=1).values

    def without_last(self) -> PackedTexts:
        """Return the texts of the sequences without their last tokens."""
        return PackedTexts(self.is_first_BS[:, :-1], self.max_texts)

    def next_labels(self, labels_BS: Tensor) -> Tensor:
        """Return the labels of the next tokens, [B, S − 1]; −100 where that is another text's."""
        return labels_BS[:, 1:].masked_fill(self.is_first_BS[:, 1:], IGNORED)

    def second_labels(self, labels_BS: Tensor) -> Tensor:
        """Return the labels of the tokens after the next ones, [B, S − 2]; −100 where that is another text's."""
        return self.next_labels(labels_BS)[:, 1:].masked_fill(self.is_first_BS[:, 1:-1], IGNORED)

    def count_labels(self, labels_BS: Tensor) -> Tensor:
        """Return the numbers of labels of the next tokens and of those after them, float32 [2]."""
        labels = self.next_labels(labels_BS), self.second_labels(labels_BS)
        return torch.stack([(each != IGNORED).sum() for each in labels]).float()

    def _starts(self) -> Tensor:
        first_S = torch.arange(self.is_first_BS.shape[1], device=self.is_first_BS.device) == 0
        return self.is_first_BS | first_S
