"""Several texts in each sequence: which tokens see each other, and which losses count.

A token attends to those of its own text only, and positions count from the beginning of the text. What is predicted
from another text has no loss: not the first token of a text, and not the second one by multi-token prediction, which
reads it from the text before.

Shapes: B batch, S sequence, T = B·S tokens, N texts at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.cross_entropy import IGNORED


class TextStatistics(NamedTuple):
    """What the host knows of the texts of all packed sequences, before it reads some of them.

    Attributes:
        max_texts: the most texts of a sequence, which fixes the shape of borders.
        mean_length: the mean tokens of a text, which chooses attention's kernels.
    """

    max_texts: int
    mean_length: int


class TextBorders(NamedTuple):
    """What attention needs to know of packed texts.

    Attributes:
        cu_seqlens: int32 [N + 1], the first of the T tokens of each text, then T; empty texts fill it up.
        mean_seqlen: the mean tokens of a text that is not empty; None: unknown to the host.
    """

    cu_seqlens: Tensor
    mean_seqlen: int | None


@dataclass(frozen=True)
class PackedTexts:
    """Where the texts of packed sequences begin.

    Attributes:
        is_first_BS: bool [B, S], whether a token is the first of a text. The first of a sequence counts as such.
        statistics: what is known of all texts; None: a sequence may have S texts.
    """

    is_first_BS: Tensor
    statistics: TextStatistics | None = None

    def borders(self) -> TextBorders:
        """Compute what attention needs to know of the texts, on the device, without waiting for it."""
        b, s = self.is_first_BS.shape
        max_texts, mean_length = self.statistics or (s, None)
        n, length = b * min(max_texts, s), b * s
        row_T = torch.arange(length, dtype=torch.int32, device=self.is_first_BS.device)
        start_T = torch.where(self._starts().flatten(), row_T, length).sort().values
        return TextBorders(F.pad(start_T[:n], (0, 1), value=length), mean_length)

    def positions(self) -> Tensor:
        """Return the position of each token in its text, int64 [B, S]."""
        at_S = torch.arange(self.is_first_BS.shape[1], device=self.is_first_BS.device)
        return at_S - torch.where(self._starts(), at_S, 0).cummax(dim=1).values

    def without_last(self) -> PackedTexts:
        """Return the texts of the sequences without their last tokens."""
        return PackedTexts(self.is_first_BS[:, :-1], self.statistics)

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
