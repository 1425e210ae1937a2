"""CUDA graphs of steps with prompts: all of a layer but attention, which depends on how the rows are divided.

    embedding
    graph 0      queries and latents of layer 0, and what keys and values of the rows consist of
    attention    of layer 0, launched kernel by kernel
    graph 1      the rest of layer 0, then the same of layer 1
    …
    graph L      the rest of the last layer

Chunks that begin their texts attend to the keys and values that the graphs have computed; for others they are computed
anew, of all positions that they attend to.

Some 30 kernels of a layer take the host longer than a GPU needs for 2,048 rows. Rows are padded to a multiple of 256,
or of 1,024; what fills them is written nowhere. The graphs of all numbers of rows are captured at the start and share
buffers, since they run one after the other. Where there is no memory for them, steps of that number of rows are
computed without a graph; ranks that exchange rows need the same graphs, and do not start without them.

If the experts are spread over ranks, rows that are exchanged may be two micro-batches: while those of one are on their
way, the other's are computed (`octile.nn.interleave`). Attention is not divided.

Shapes: T rows, D model, H heads, X channels of a query, R of a rotary key, V of a value, Y of all heads' keys but their
rotary part, and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.nn.interleave import run_interleaved
from octile.serve.model.attention import Queries
from octile.serve.model.forward import Forward
from octile.serve.model.top_k_keys import IndexQueries
from octile.serve.runner.graph_memory import GraphMemory
from octile.serve.runner.step import Step
from octile.serve.weights.block_weights import MLPWeights

FEW_ROWS, MAX_ROWS = 2048, 8192
FILL_ROWS = 256  # to a multiple of which other steps with prompts are padded
ROWS = FILL_ROWS, 1024  # to multiples of which steps are padded: up to FEW_ROWS, and beyond


class PrefillGraphs:
    """The graphs of a model's forward pass. On a CPU they are what would be captured, for tests.

    Args:
        forward: the forward pass.
        memory: of the graphs; None on a CPU.
        max_rows: rows of the largest graph, at most MAX_ROWS; steps with more are computed without one.
        micro_batches: 1 or 2, of rows that are exchanged with other ranks.

    Raises:
        RuntimeError: a graph cannot be captured, and other ranks, which exchange rows with this one, may have theirs.
    """

    def __init__(self, forward: Forward, memory: GraphMemory | None, max_rows: int, micro_batches: int = 1):
        self._forward, self._memory, self._micro_batches = forward, memory, micro_batches
        self._buffers: _Buffers | None = None  # of the largest graph that there is memory for
        sizes = graph_rows(min(max_rows, MAX_ROWS))
        self._of_size = {size: self._capture(size) for size in reversed(sizes)}

    def hidden(self, step: Step, at_least: int = 0) -> Tensor:
        """Compute `Forward.hidden` of a step.

        Args:
            step: the step.
            at_least: rows, for which the graph has room: ranks that exchange rows have graphs of one size.
        """
        size = padded_rows(max(len(step.tokens), at_least))
        graphs = self._of_size.get(size)
        return self._forward.of_rows(size).hidden(step) if graphs is None else graphs.hidden(step)

    def _capture(self, size: int) -> _Graphs | None:
        """Capture the graphs of a number of rows; None, with a warning: it is not possible.

        Raises:
            RuntimeError: it is not possible, and rows are exchanged: the exchanges would no longer be those of the
                other ranks.
        """
        try:
            tp = self._forward.tp
            rows = tp.n_padded(size)
            if self._buffers is None:
                self._buffers = _Buffers.make(self._forward, rows)
            buffers = self._buffers.first(rows, tp.n_own(rows))
            return _Graphs(self._forward.of_rows(rows), buffers, self._record, self._micro_batches)
        except RuntimeError as error:
            if self._forward.feed_forward.dispatcher.exchanges:
                raise RuntimeError(
                    f"CUDA graphs of steps of {size} rows could not be captured on this rank, and all ranks need them: "
                    f"{error}"
                ) from error
            what = f"steps of {size} rows are computed without CUDA graphs, which could not be captured: {error}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
            return None

    def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph, and return what replays it."""
        return compute if self._memory is None else self._memory.capture(compute)[0]


class _Buffers(NamedTuple):
    """What the graphs of up to so many rows read and write; q has a place for the results of the widest GEMM.

    x has the rows of one rank of a group that shares them; the rest has those of all.
    """

    x_TD: Tensor
    q: Tensor
    kv_TY: Tensor
    rope_TR: Tensor
    o_TV: Tensor
    slots: Tensor
    places: Tensor  # slots, and 0 for rows that are written nowhere
    cos: Tensor
    sin: Tensor
    index_q: Tensor
    index_weights: Tensor

    @classmethod
    def make(cls, forward: Forward, rows: int) -> _Buffers:
        weights, c, heads = forward.weights, forward.weights.config, forward.weights.n_heads
        x_TD = weights.head.new_zeros(forward.tp.n_own(rows), c.hidden_size)
        q = x_TD.new_zeros(rows * max(forward.attention.query_width(block.attention) for block in weights.blocks))
        kv_TY = x_TD.new_zeros(rows, heads * (c.qk_nope_head_dim + c.v_head_dim))
        rope_TR = x_TD.new_zeros(rows, c.qk_rope_head_dim)
        o_TV = x_TD.new_zeros(rows, heads * c.v_head_dim)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=weights.device)
        cos, sin = (t.new_zeros(rows, t.shape[1]) for t in (forward.cos, forward.sin))
        has_index = forward.attention.index is not None
        of_indexer, channels = (c.index_n_heads or 0, c.index_head_dim or 0) if has_index else (0, 0)
        index_q = torch.zeros(rows, of_indexer, channels, dtype=torch.float8_e4m3fn, device=weights.device)
        of_index = index_q, cos.new_zeros(rows, of_indexer)
        return cls(x_TD, q, kv_TY, rope_TR, o_TV, slots, torch.zeros_like(slots), cos, sin, *of_index)

    def first(self, rows: int, own_rows: int) -> _Buffers:
        """Return views of the first rows, of which x has a rank's own ones."""
        first = _Buffers(*(t if t is self.q else t[:rows] for t in self))
        return first._replace(x_TD=self.x_TD[:own_rows])


class _Graphs:
    """The graphs of one number of rows, and the buffers that they read and write, which others may share."""

    def __init__(
        self,
        forward: Forward,
        buffers: _Buffers,
        record: Callable[[Callable[[], None]], Callable[[], None]],
        micro_batches: int,
    ):
        self._forward, self._buffers, self._micro_batches = forward, buffers, micro_batches
        self._queries = dict[int, Queries]()  # of each layer
        buffers.slots.fill_(-1)  # while graphs are captured, nothing is written to the cache
        self._replays = [record(partial(self._between, i)) for i in range(len(forward.weights.blocks) + 1)]

    def hidden(self, step: Step) -> Tensor:
        """Compute what the head reads, [T, D]."""
        forward, buffers, n = self._forward, self._buffers, len(step.tokens)
        step = forward.attention.with_schedule(step)
        n_own = len(buffers.x_TD)
        tokens = step.tokens[forward.tp.rank * n_own :][:n_own]
        torch.index_select(forward.weights.embedding, 0, tokens, out=buffers.x_TD[: len(tokens)])
        for table, rows in ((forward.cos, buffers.cos), (forward.sin, buffers.sin)):
            torch.index_select(table, 0, step.positions, out=rows[:n])
        buffers.slots[:n] = step.slots
        buffers.slots[n:] = -1
        torch.clamp(buffers.slots, min=0, out=buffers.places)
        begins = all(piece.rows == piece.positions for piece in step.prefills)
        own = (buffers.kv_TY, buffers.rope_TR) if begins else None
        self._replays[0]()
        for layer, block in enumerate(forward.weights.blocks):
            queries, out_TV = self._queries[layer].rows(0, n), buffers.o_TV[:n]
            forward.attention.attend(queries, layer, block.attention, step, own, out_TV)
            self._replays[layer + 1]()
        return forward.last_norm(buffers.x_TD, n)

    def _between(self, i: int) -> None:
        """Compute what is between attention of layer i - 1 and of layer i."""
        forward, buffers, blocks = self._forward, self._buffers, self._forward.weights.blocks
        x_TD, slots = buffers.x_TD, buffers.slots
        if i:
            self._after_attention(i - 1)
        if i < len(blocks):
            w, rows, cos_sin = blocks[i].attention, len(slots), (buffers.cos, buffers.sin)
            out_TW = buffers.q[: rows * forward.attention.query_width(w)].view(rows, -1)
            self._queries[i] = self._stored(forward.attention.queries(x_TD, i, blocks[i], slots, cos_sin, out_TW))
            buffers.rope_TR.copy_(forward.attention.naive.decompressed(i, w, buffers.places, buffers.kv_TY)[1])

    def _after_attention(self, layer: int) -> None:
        """Compute the rest of a layer, in as many micro-batches if its experts are spread over ranks."""
        forward, block = self._forward, self._forward.weights.blocks[layer]
        rows = self._buffers.x_TD, self._buffers.o_TV, self._buffers.slots
        size = len(self._buffers.slots)

        def compute(first: int, n: int) -> None:
            x_TD, o_TV, slots = (t.narrow(0, first, n) for t in rows)
            with torch.no_grad():  # also in the thread of a micro-batch
                forward.of_rows(n).after_attention(x_TD, o_TV, layer, block, slots)

        exchanges = forward.feed_forward.dispatcher.exchanges and not isinstance(block.mlp, MLPWeights)
        if self._micro_batches == 1 or not exchanges:
            x_TD, o_TV, slots = rows
            forward.after_attention(x_TD, o_TV, layer, block, slots)
        else:
            run_interleaved(partial(compute, 0, size // 2), partial(compute, size // 2, size - size // 2))

    def _stored(self, queries: Queries) -> Queries:
        """Return queries whose memory outlasts the graph, and is that of all layers."""
        if queries.of_index is None:
            return queries
        of_index = IndexQueries(self._buffers.index_q, self._buffers.index_weights)
        for buffer, values in zip(of_index, queries.of_index, strict=True):
            buffer.copy_(values)
        return Queries(queries.q, of_index)


def graph_rows(max_rows: int) -> list[int]:
    """Return the numbers of rows to which steps of at most max_rows rows are padded."""
    few = range(ROWS[0], padded_rows(min(max_rows, FEW_ROWS)) + 1, ROWS[0])
    return [*few, *range(FEW_ROWS + ROWS[1], padded_rows(max_rows) + 1, ROWS[1])]


def padded_rows(n: int) -> int:
    """Return to how many rows a step of n rows is padded."""
    multiple = ROWS[n > FEW_ROWS]
    return -(-n // multiple) * multiple
