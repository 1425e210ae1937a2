"""A step of serving: a checked batch as the rows of one forward pass, laid out, and what its prefill chunks attend to.

Decode rows come first: the rows of chunks that attend in the absorbed form, a row for each token. A step of decode rows
alone can be padded to a size, for a CUDA graph, or to whole blocks of rows. Where prompts attend in the absorbed form,
their rows follow those of other chunks and are padded, so that a GPU's thread block has rows of one text.

Prefill chunks attend in pieces, whose keys and values are in memory at once. A step has a limited number of tokens, but
chunks with few tokens may attend to many positions each: those that share a long beginning. One chunk of a very long
text attends to its positions in parts (`octile.serve.model.attention`).

Shapes: T rows, M pages of a request at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octile.ops.absorbed_attention import ROWS
from octile.ops.latent_cache import PAGE
from octile.serve.engine.config import MAX_DRAFTS
from octile.serve.runner.batch import Batch, Chunk
from octile.serve.send import send

MAX_DECODE_TOKENS = 1 + MAX_DRAFTS  # of a chunk that attends in the absorbed form: a token, and drafts to be verified
CONTEXT_POSITIONS = 2**14  # whose keys and values are in memory at once: more only if the step has more tokens
BLOCK_ROWS = 16  # in batch-invariant mode a CPU computes whole blocks of rows


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
        n_chosen = 0 if batch.chosen is None else len(batch.chosen)
        for i, chunk in enumerate(chunks):
            pages = chunk.pages
            why = self._why_not(chunk, n_chosen) or (None if checked[i] == pages else self._why_not_pages(pages))
            if why is not None:
                raise ValueError(f"chunk {i} {why}")
            if checked[i] != pages:
                checked[i] = pages[:]

    def _why_not(self, chunk: Chunk, n_chosen: int) -> str | None:
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
        few = size <= MAX_DECODE_TOKENS  # of which numpy finds the least more slowly
        least, most = (min(tokens), max(tokens)) if few else _range(np.array(tokens))
        lowest = -n_chosen if size == 1 else 0
        if least < lowest or most >= self._vocab_size:
            return f"must have tokens from {lowest} to {self._vocab_size - 1}, not {least} to {most}"
        return None

    def _why_not_pages(self, pages: array[int]) -> str | None:
        """Return why the cache does not have all pages; None: it has."""
        if min(pages) < 0 or max(pages) >= self._n_pages:
            return f"must have pages from 0 to {self._n_pages - 1}, not {list(pages)}"
        return None


def _range(values: np.ndarray) -> tuple[int, int]:
    return int(values.min()), int(values.max())


class PrefillPiece(NamedTuple):
    """Chunks whose keys and values are in memory at once.

    Attributes:
        first_row, rows: rows of all its chunks, in the step.
        first_position, positions: positions of all its chunks, in the step's context.
        n_read: positions that are read, at least as many: what is beyond only fills GEMMs.
        row_starts, position_starts: int32 [chunks + 1], of each chunk in the piece, and the ends.
        max_rows, max_positions: rows and positions of a chunk at most.
    """

    first_row: int
    rows: int
    first_position: int
    positions: int
    n_read: int
    row_starts: Tensor
    position_starts: Tensor
    max_rows: int
    max_positions: int


class TopKPositions:
    """The top-k positions of the last indexer before a layer: those of layers that share them (GLM-5.2).

    Attributes:
        decode: int32 [decode rows, K], positions in each row's text; −1 where there are no more.
        chunks: first row of a prefill chunk → slots of its rows, int32 [S, K]; −1 where there are no more.
    """

    def __init__(self) -> None:
        self.decode: Tensor | None = None
        self.chunks = dict[int, Tensor]()


class Step(NamedTuple):
    """The rows of one forward pass, on the model's device; decode rows come first, then the prefill chunks.

    Attributes:
        tokens, positions: int64 [T].
        slots: int64 [T], where each row's latent is written; negative: nowhere, the row only fills a graph.
        pages: int32 [decode rows, M], of each row's request.
        lengths: int32 [decode rows], positions that each attends to: its own and those before. In a step with prompts
            rows of theirs may follow, with no positions: what they attend to here is overwritten.
        first_text, rows_per_text: the first decode row of those that belong to texts of so many consecutive rows each,
            and that number; rows before it stand alone.
        context: int64, the slots of all positions that prefill chunks attend to, chunk after chunk.
        prefills: the chunks after the decode rows, in pieces.
        max_positions: whose keys and values are in memory at once: a piece has no more, or is one chunk.
        is_sparse: whether decode rows attend to the top-k positions of an indexer; otherwise to all.
        schedule: schedule of the indexer's logits of decode rows
            (`octile.serve.model.attention.Attention.with_schedule`).
        top_k: the top-k positions of an indexer, for the layers after it; None: no layer of the model shares them.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    pages: Tensor
    lengths: Tensor
    context: Tensor | None
    prefills: Sequence[PrefillPiece]
    max_positions: int = 0
    is_sparse: bool = True
    schedule: Tensor | None = None
    top_k: TopKPositions | None = None
    first_text: int = 0
    rows_per_text: int = 1

    @property
    def only_decodes(self) -> bool:
        """Whether all rows attend as decode rows: these may be padded to the rows of a step with prompts, too."""
        return not self.prefills and len(self.lengths) == len(self.tokens)


@dataclass(frozen=True)
class Layout:
    """In which order the rows of a batch's chunks are computed.

    Attributes:
        decode: the numbers of the chunks that are decoded, in the batch's order, except that those in texts are last.
        prefill: those of the others.
        n_decode: decode rows, without padding.
        texts: those of the decoded chunks that have whole thread blocks of `ROWS` rows.
    """

    chunks: Sequence[Chunk]
    decode: Sequence[int]
    prefill: Sequence[int]
    n_decode: int
    texts: Sequence[int] = ()

    @classmethod
    def of(cls, chunks: Sequence[Chunk], absorbed_only: bool, shares_blocks: bool = False) -> Layout:
        """Divide chunks by the form of attention.

        Args:
            chunks: those of a batch.
            absorbed_only: whether all of them are decode rows.
            shares_blocks: whether decode rows of long chunks have whole thread blocks.
        """
        sizes = [len(chunk.tokens) for chunk in chunks]
        decode = [i for i, size in enumerate(sizes) if absorbed_only or size <= MAX_DECODE_TOKENS]
        prefill = [] if len(decode) == len(chunks) else sorted(set(range(len(chunks))) - set(decode))
        n_decode, texts = sum(sizes[i] for i in decode), list[int]()
        if shares_blocks:
            texts = [i for i in decode if sizes[i] > MAX_DECODE_TOKENS]
            decode = [*(i for i in decode if sizes[i] <= MAX_DECODE_TOKENS), *texts]
        return cls(chunks, decode, prefill, n_decode, texts)

    @property
    def alone(self) -> Sequence[int]:
        """The decoded chunks whose rows stand alone."""
        return self.decode[: len(self.decode) - len(self.texts)]

    @property
    def first_text(self) -> int:
        """The first row of texts that have whole thread blocks; 0 if there is none."""
        return _in_blocks(sum(len(self.chunks[i].tokens) for i in self.alone)) if self.texts else 0

    @property
    def n_rows(self) -> int:
        """Decode rows with those that fill thread blocks."""
        if not self.texts:
            return self.n_decode
        return self.first_text + sum(_in_blocks(len(self.chunks[i].tokens)) for i in self.texts)

    @property
    def longest(self) -> int:
        """The positions that the decode row with the most attends to; 0 if there is none."""
        decoding = (self.chunks[i] for i in self.decode)
        return max((chunk.start + len(chunk.tokens) for chunk in decoding), default=0)

    def rows(self) -> list[int] | None:
        """Return the row of each token in the batch's order; None where this is the order of the rows."""
        order = [*self.decode, *self.prefill]
        if order == sorted(order) and not self.texts:
            return None
        alone, texts = [*self.alone, *self.prefill], self.texts
        starts = dict(zip(alone, accumulate((len(self.chunks[i].tokens) for i in alone), initial=0), strict=False))
        blocks = (_in_blocks(len(self.chunks[i].tokens)) for i in texts)
        starts |= zip(texts, accumulate(blocks, initial=self.first_text), strict=False)
        rows = [starts[i] + j for i, chunk in enumerate(self.chunks) for j in range(len(chunk.tokens))]
        return None if rows == list(range(len(rows))) else rows

    def logit_rows(self) -> list[int] | None:
        """Return the rows, in the batch's order of tokens, whose logits are wanted; None: all."""
        sizes = [len(chunk.tokens) for chunk in self.chunks]
        if all(chunk.n_logits == size for chunk, size in zip(self.chunks, sizes, strict=True)):
            return None
        ends = accumulate(sizes)
        return [row for chunk, end in zip(self.chunks, ends, strict=True) for row in range(end - chunk.n_logits, end)]


class PageTable:
    """The pages of a step's rows, in a host buffer; a row whose pages are those of the step before is not written.

    Attributes:
        host: int32 [rows, M].

    Args:
        rows: at most so many.
        max_pages: M, pages of a text at most.
        pinned: whether a GPU copies from the buffer.
    """

    def __init__(self, rows: int, max_pages: int, pinned: bool):
        self.host = torch.zeros(rows, max_pages, dtype=torch.int32, pin_memory=pinned)
        self._pages = self.host.numpy()
        self._written: list[object] = [None] * rows

    def write(self, row: int, pages: array[int]) -> bool:
        """Write the pages of a row; return whether they have changed."""
        if self._written[row] == pages:
            return False
        row_pages = np.frombuffer(pages, np.int32)[: self._pages.shape[1]]
        self._pages[row, : len(row_pages)] = row_pages
        self._written[row] = pages[:]
        return True

    def write_rows(self, first: int, n: int, pages: np.ndarray) -> None:
        """Write the pages of n rows, whichever were there."""
        pages = pages[: self._pages.shape[1]]
        self._pages[first : first + n, : len(pages)] = pages
        self._written[first : first + n] = [None] * n


class DecodeRows:
    """Host buffers of decode rows: tokens, positions, slots, lengths and pages, written anew for each step.

    Attributes:
        numbers: int64 [4, max_rows]: tokens, positions, slots and lengths.
        pages: int32 [max_rows, M].

    Args:
        max_rows, max_pages, pinned: arguments of `PageTable`.
    """

    def __init__(self, max_rows: int, max_pages: int, pinned: bool):
        self.numbers = torch.zeros(4, max_rows, dtype=torch.int64, pin_memory=pinned)
        self._numbers, self._table = self.numbers.numpy(), PageTable(max_rows, max_pages, pinned)
        self.pages = self._table.host

    def fill_texts(self, chunks: Sequence[Chunk], first: int) -> None:
        """Write the rows of chunks that have whole thread blocks, from row `first` on; padding is there."""
        for chunk in chunks:
            n = len(chunk.tokens)
            pages, positions = np.frombuffer(chunk.pages, np.int32), np.arange(chunk.start, chunk.start + n)
            numbers = self._numbers[:, first : first + n]
            numbers[0], numbers[1], numbers[3] = chunk.tokens, positions, positions + 1
            numbers[2] = pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
            self._table.write_rows(first, n, pages)
            first += _in_blocks(n)

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
                if self._table.write(row, pages):
                    first, end = min(first, row), row + 1
        n = len(tokens)
        numbers = self._numbers
        numbers[0, :n], numbers[1, :n], numbers[2, :n] = tokens, positions, slots
        np.add(numbers[1, :n], 1, out=numbers[3, :n])
        numbers[:, n:rows] = ((0,), (0,), (-1,), (0,))  # padding: written nowhere, attends to nothing
        return first, end


def decode_step(numbers: Tensor, pages: Tensor, is_sparse: bool) -> Step:
    """Make a step of decode rows alone, of numbers [4, T] and pages [T, M] of `DecodeRows`; is_sparse as in `Step`."""
    tokens, positions, slots, lengths = numbers.unbind()
    return Step(tokens, positions, slots, pages, lengths.to(torch.int32), None, (), is_sparse=is_sparse)


def mixed_step(
    layout: Layout,
    block_rows: int,
    device: torch.device,
    max_together: int | None = None,
    is_sparse: bool = True,
    fill: int = 1,
    chosen: Tensor | None = None,
) -> Step:
    """Make a step of any chunks, on a device.

    Args:
        layout: the chunks.
        block_rows: decode rows alone are padded to a multiple of it.
        device: device of the step.
        max_together: a chunk with more positions has a piece of its own; None: none has.
        is_sparse: field of `Step`.
        fill: rows of steps with prompts, and positions that are read together, are padded to a multiple of it. Rows
            that attend as decode rows are padded to a power of two, but no further than to that multiple. So GEMMs have
            few sizes, and few numbers of rows have kernels. The first of a size takes the host some milliseconds, or
            seconds if a kernel is compiled for it. 1: none is padded.
        chosen: field of `Batch`.
    """
    decoding, alone = ([layout.chunks[i] for i in numbers] for numbers in (layout.decode, layout.alone))
    n_rows = n_attend = -(-layout.n_rows // block_rows) * block_rows
    chunks = [layout.chunks[i] for i in layout.prefill]
    n_new = sum(len(chunk.tokens) for chunk in chunks)
    n_filled = -(-(n_rows + n_new) // fill) * fill
    if n_rows and fill > 1:  # in a step with prompts their first rows, whose results are written after these
        n_attend = min(padded_size(n_rows), n_filled)
    rows = DecodeRows(n_attend, max((len(chunk.pages) for chunk in decoding), default=0), pinned=False)
    rows.fill(alone, n_attend)
    rows.fill_texts([layout.chunks[i] for i in layout.texts], layout.first_text)
    step = decode_step(send(rows.numbers, device), send(rows.pages, device), is_sparse)
    if chosen is not None:
        step = step._replace(tokens=with_chosen(step.tokens, chosen))
    if layout.texts:
        step = step._replace(first_text=layout.first_text, rows_per_text=ROWS)
    if not chunks:
        return step
    contexts = [_slots(chunk) for chunk in chunks]
    new = np.zeros((3, n_filled - n_rows), np.int64)
    new[2, n_new:] = -1
    first = 0
    for chunk, slots in zip(chunks, contexts, strict=True):
        end = first + len(chunk.tokens)
        new[0, first:end] = chunk.tokens
        new[1, first:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        new[2, first:end] = slots[chunk.start :]
        first = end
    decode_rows = torch.stack(step[:3])[:, :n_rows]
    tokens_T, positions_T, slots_T = torch.cat((decode_rows, send(torch.from_numpy(new), device)), dim=1).unbind()
    max_positions = max(CONTEXT_POSITIONS, len(tokens_T))
    return step._replace(
        tokens=tokens_T,
        positions=positions_T,
        slots=slots_T,
        context=send(torch.from_numpy(np.concatenate((*contexts, np.zeros(fill - 1, np.int64)))), device),
        prefills=_pieces(chunks, n_rows, max_positions, max_together, fill, device),
        max_positions=max_positions,
    )


def with_chosen(tokens_T: Tensor, chosen: Tensor) -> Tensor:
    """Return tokens where −1 − i stands for the i-th of the chosen ones; for one that is none, any token."""
    i_T = (-1 - tokens_T).clamp(min=0)
    return torch.where(tokens_T < 0, chosen.clamp(min=0)[i_T], tokens_T)


def _in_blocks(n: int) -> int:
    """Return the rows of the thread blocks that have n rows."""
    return -(-n // ROWS) * ROWS


def padded_size(n: int) -> int:
    """Return the power of two to which n rows are padded."""
    return 1 << max(n - 1, 0).bit_length()


def _slots(chunk: Chunk) -> np.ndarray:
    """Return the slots of all positions up to a chunk's last one, int64 [L]."""
    length = chunk.start + len(chunk.tokens)
    pages = np.frombuffer(chunk.pages, np.int32)[: -(-length // PAGE)].astype(np.int64)
    return np.add.outer(pages * PAGE, np.arange(PAGE)).ravel()[:length]


def _pieces(
    chunks: Sequence[Chunk],
    first_row: int,
    n_positions: int,
    max_together: int | None,
    fill: int,
    device: torch.device,
) -> list[PrefillPiece]:
    """Divide chunks into pieces of at most n_positions positions, or of one chunk; the first row is first_row."""
    pieces, first_position = list[PrefillPiece](), 0
    chunk_sizes = [(len(chunk.tokens), chunk.start + len(chunk.tokens)) for chunk in chunks]
    for sizes in _divided(chunk_sizes, n_positions, n_positions if max_together is None else max_together):
        n_starts = len(sizes) + 1
        starts = np.zeros((2, -(-n_starts // 4) * 4), dtype=np.int32)  # aligned, for which Triton compiles a kernel
        np.cumsum(np.array(sizes).T, axis=1, out=starts[:, 1:n_starts])
        rows, positions = starts[:, n_starts - 1].tolist()
        row_starts, position_starts = send(torch.from_numpy(starts), device)[:, :n_starts].unbind()
        most = max(size[0] for size in sizes), max(size[1] for size in sizes)
        n_read = -(-positions // fill) * fill
        spans = first_row, rows, first_position, positions, n_read
        pieces.append(PrefillPiece(*spans, row_starts, position_starts, *most))
        first_row, first_position = first_row + rows, first_position + positions
    return pieces


def _divided(sizes: Sequence[tuple[int, int]], n_positions: int, max_together: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (rows, positions) of the chunks of each piece."""
    piece, left = list[tuple[int, int]](), n_positions
    for rows, positions in sizes:
        is_alone = positions > max_together
        if piece and (is_alone or positions > left):
            yield piece
            piece, left = [], n_positions
        piece.append((rows, positions))
        left = 0 if is_alone else left - positions
    yield piece
