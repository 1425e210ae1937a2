"""The rows of a batch, laid out for one forward pass.

Decode rows come first: the rows of chunks that attend in the absorbed form, a row for each token. A step of decode rows
alone can be padded to a size, for a CUDA graph, or to whole blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from octile.ops.latent_cache import PAGE
from octile.serve.batch import Chunk
from octile.serve.forward import PrefillChunk, Step

MAX_DECODE_TOKENS = 8  # of a chunk that attends in the absorbed form: a token, or some drafts to be verified
BLOCK_ROWS = 16  # in batch-invariant mode a CPU computes whole blocks of rows


@dataclass(frozen=True)
class Layout:
    """In which order the rows of a batch's chunks are computed.

    Attributes:
        decode, prefill: the numbers of the chunks of each kind, in the batch's order.
        n_decode: decode rows.
    """

    chunks: Sequence[Chunk]
    decode: Sequence[int]
    prefill: Sequence[int]
    n_decode: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], absorbed_only: bool) -> Layout:
        """Divide chunks by the form of attention; absorbed_only: all of them are decode rows."""
        sizes = [len(chunk.tokens) for chunk in chunks]
        decode = [i for i, size in enumerate(sizes) if absorbed_only or size <= MAX_DECODE_TOKENS]
        prefill = [] if len(decode) == len(chunks) else [i for i in range(len(chunks)) if i not in set(decode)]
        return cls(chunks, decode, prefill, sum(sizes[i] for i in decode))

    def rows(self) -> list[int] | None:
        """Return the row of each token in the batch's order; None where this is the order of the rows."""
        order = [*self.decode, *self.prefill]
        if order == sorted(order):
            return None
        starts = dict(zip(order, accumulate((len(self.chunks[i].tokens) for i in order), initial=0), strict=False))
        return [starts[i] + j for i, chunk in enumerate(self.chunks) for j in range(len(chunk.tokens))]

    def logit_rows(self) -> list[int] | None:
        """Return the rows, in the batch's order of tokens, whose logits are wanted; None: all."""
        sizes = [len(chunk.tokens) for chunk in self.chunks]
        if all(chunk.n_logits == size for chunk, size in zip(self.chunks, sizes, strict=True)):
            return None
        ends = accumulate(sizes)
        return [row for chunk, end in zip(self.chunks, ends, strict=True) for row in range(end - chunk.n_logits, end)]


class DecodeRows:
    """Host buffers of decode rows: tokens, positions, slots, lengths and pages, written anew for each step.

    Attributes:
        numbers: int64 [4, max_rows]: tokens, positions, slots and lengths.
        pages: int32 [max_rows, M]; a row whose pages are those of the step before is not written.

    Args:
        max_rows: at most so many rows.
        max_pages: M, pages of a text at most.
        pinned: whether a GPU copies from the buffers.
    """

    def __init__(self, max_rows: int, max_pages: int, pinned: bool):
        self.numbers = torch.zeros(4, max_rows, dtype=torch.int64, pin_memory=pinned)
        self.pages = torch.zeros(max_rows, max_pages, dtype=torch.int32, pin_memory=pinned)
        self._numbers, self._pages = self.numbers.numpy(), self.pages.numpy()
        self._written: list[object] = [None] * max_rows

    def fill(self, chunks: Sequence[Chunk], rows: int) -> tuple[int, int]:
        """Write the rows of chunks and padding up to `rows` rows.

        Returns:
            the first and the end of the rows whose pages have changed.
        """
        tokens, positions, slots = list[int](), list[int](), list[int]()
        first, end = rows, 0
        for chunk in chunks:
            pages, start = chunk.pages, chunk.start
            for position, token in enumerate(chunk.tokens, start):
                row = len(tokens)
                tokens.append(token)
                positions.append(position)
                slots.append(pages[position // PAGE] * PAGE + position % PAGE)
                if self._written[row] != pages:
                    of_text = np.frombuffer(pages, np.int32)[: self._pages.shape[1]]
                    self._pages[row, : len(of_text)] = of_text
                    self._written[row] = pages[:]
                    first, end = min(first, row), row + 1
        n = len(tokens)
        numbers = self._numbers
        numbers[0, :n], numbers[1, :n], numbers[2, :n] = tokens, positions, slots
        np.add(numbers[1, :n], 1, out=numbers[3, :n])
        numbers[:, n:rows] = ((0,), (0,), (-1,), (0,))  # padding: written nowhere, attends to nothing
        return first, end


def decode_step(numbers: Tensor, pages: Tensor) -> Step:
    """Make a step of decode rows alone, of numbers [4, T] and pages [T, M] as of `DecodeRows`."""
    tokens, positions, slots, lengths = numbers.unbind()
    return Step(tokens, positions, slots, pages, lengths.to(torch.int32), ())


def mixed_step(layout: Layout, block_rows: int, device: torch.device) -> Step:
    """Make a step of any chunks, on a device; decode rows alone are padded to a multiple of block_rows."""
    of_decode = [layout.chunks[i] for i in layout.decode]
    n_rows = -(-layout.n_decode // block_rows) * block_rows
    rows = DecodeRows(n_rows, max((len(chunk.pages) for chunk in of_decode), default=0), pinned=False)
    rows.fill(of_decode, n_rows)
    step = decode_step(rows.numbers.to(device), rows.pages.to(device))
    if not layout.prefill:
        return step
    tokens, positions, slots, prefills = [step.tokens], [step.positions], [step.slots], []
    start = n_rows
    for i in layout.prefill:
        chunk = layout.chunks[i]
        end = chunk.start + len(chunk.tokens)
        position = torch.arange(end)
        page = torch.frombuffer(chunk.pages, dtype=torch.int32)[: -(-end // PAGE)].long()
        of_chunk = (page[position // PAGE] * PAGE + position % PAGE).to(device)
        tokens.append(torch.tensor(chunk.tokens).to(device))
        positions.append(position[chunk.start :].to(device))
        slots.append(of_chunk[chunk.start :])
        prefills.append(PrefillChunk(slice(start, start + len(chunk.tokens)), of_chunk))
        start += len(chunk.tokens)
    return step._replace(
        tokens=torch.cat(tokens), positions=torch.cat(positions), slots=torch.cat(slots), prefills=tuple(prefills)
    )
