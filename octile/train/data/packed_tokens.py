"""Packed sequences of texts: how they are stored, and how a batch of them is read.

A text lies in one sequence. The rest of a sequence is padding, a text without a loss. Each token has a mark:
`FIRST` if it begins a text, plus `LOSS` if it is to be predicted.

Shapes: T tokens, B sequences of S tokens each, N texts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octile.nn.packed_texts import PackedTexts, TextStatistics
from octile.ops.cross_entropy import IGNORED

FIRST, LOSS = 1, 2  # marks of a token


class PackedTokens:
    """Tokens and their marks, which may be memory-mapped.

    Args:
        tokens: [T] of any integer dtype, whole sequences one after the other.
        marks: uint8 [T].
        sequence_length: S, which divides T.

    Raises:
        ValueError: the sizes do not fit together.
    """

    ndim = 1

    def __init__(self, tokens: npt.NDArray[np.unsignedinteger], marks: npt.NDArray[np.uint8], sequence_length: int):
        if tokens.shape != marks.shape or len(tokens) % sequence_length:
            raise ValueError(
                f"tokens {list(tokens.shape)} and marks {list(marks.shape)} must be whole sequences of "
                f"{sequence_length} tokens"
            )
        self.tokens, self.marks, self.sequence_length = tokens, marks, sequence_length
        self.shape = tokens.shape

    def __len__(self) -> int:
        return len(self.tokens)

    def sequences(self, number_B: npt.NDArray[np.int64], pin: bool = False) -> Tensor:
        """Read sequences by their numbers: int64 [B, S, 2], the token and its mark; in pinned memory if asked for."""
        batch_BS2 = torch.empty(len(number_B), self.sequence_length, 2, dtype=torch.int64, pin_memory=pin)
        for i, values in enumerate((self.tokens, self.marks)):
            batch_BS2.numpy()[..., i] = values.reshape(-1, self.sequence_length)[number_B]
        return batch_BS2


def is_packed(batch: Tensor) -> bool:
    """Whether a batch is one of packed sequences, [B, S, 2], and not of plain text, [B, S]."""
    return batch.dim() == 3


def tokens_of(batch: Tensor) -> Tensor:
    """The tokens of a batch, int64 [B, S]."""
    return batch[..., 0] if is_packed(batch) else batch


def unpacked(batch: Tensor, statistics: TextStatistics | None = None) -> tuple[Tensor, Tensor, PackedTexts]:
    """Split a batch of packed sequences, [B, S, 2].

    Args:
        batch: the batch.
        statistics: as in `PackedTexts`.

    Returns:
        tokens and labels, int64 [B, S], and where the texts begin.
    """
    tokens_BS, marks_BS = batch.unbind(-1)
    labels_BS = tokens_BS.masked_fill(marks_BS & LOSS == 0, IGNORED)
    return tokens_BS, labels_BS, PackedTexts(marks_BS & FIRST != 0, statistics)


def count_labels(batch: Tensor) -> Tensor:
    """The labels of the next tokens and of those after them in a batch of packed sequences, float32 [2]."""
    _, labels_BS, texts = unpacked(batch)
    return texts.count_labels(labels_BS)


def best_fit(lengths: Sequence[int], sequence_length: int) -> list[list[int]]:
    """Distribute texts over sequences: the longest first, each to the fullest sequence in which it fits.

    Args:
        lengths: the tokens of each text, from 1 to sequence_length.
        sequence_length: S.

    Returns:
        the numbers of the texts in each sequence.

    Source: best-fit decreasing; on language models: Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv
    2404.10830).
    """
    sequences: list[list[int]] = []
    with_free: dict[int, list[int]] = {}  # sequences by their free tokens
    sizes: list[int] = []  # the keys, sorted
    for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(sizes, lengths[text])
        if at == len(sizes):
            free, sequence = sequence_length, len(sequences)
            sequences.append([])
        else:
            free = sizes[at]
            sequence = with_free[free].pop()
            if not with_free[free]:
                del with_free[free], sizes[at]
        sequences[sequence].append(text)
        left = free - lengths[text]
        if left:
            if left not in with_free:
                insort(sizes, left)
            with_free.setdefault(left, []).append(sequence)
    return sequences
