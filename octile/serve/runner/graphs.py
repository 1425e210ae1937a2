"""CUDA graphs of a model runner: those of decode steps, those of steps with prompts, and the memory that they share.

Shapes: T rows, L positions, D model, H heads, X channels of a query, R of a rotary key, V of a value, Y of all heads'
keys but their rotary part, and values.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.nn.interleave import run_interleaved
from octile.serve.model.attention import Attention, Queries
from octile.serve.model.forward import Forward
from octile.serve.model.top_k_keys import IndexQueries
from octile.serve.runner.attention_graphs import Attended, AttentionGraphs, decode_sizes
from octile.serve.runner.step import DecodeRows, Layout, Step, decode_step, with_chosen
from octile.serve.weights.block_weights import AttentionWeights, MLPWeights

T = TypeVar("T")

FEW_ROWS, MAX_ROWS = 2048, 8192  # of steps with prompts
POSITIONS = 4096  # or as many as a step has rows: those of texts that a step continues have graphs up to so many
FILL_ROWS = 256  # to a multiple of which other steps with prompts are padded
ROWS = FILL_ROWS, 1024  # to multiples of which steps are padded: up to FEW_ROWS, and beyond


class GraphMemory:
    """A memory pool and a stream that all graphs of a runner share.

    The stream goes before those of branches, the shared experts': the others' rows are waited for, by other GPUs, too.

    Graphs run one after the other, so what one computes on its way lies where another's does. A result that is held
    after the capture has memory of its own among the results, but a later replay of another graph may overwrite it:
    it is read, or copied, before.

    Args:
        device: the model's GPU.
    """

    def __init__(self, device: torch.device):
        gc.collect()  # a graph of another runner that ended while one is captured would end the capture
        torch.cuda.empty_cache()
        self.device = device
        self._stream, self._pool = torch.cuda.Stream(device, -1), torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Compute once, to compile and choose kernels, then capture it; return what replays it, and its result.

        A graph runs on the current stream. Other threads may use the GPU meanwhile. A kernel may start before the
        previous one has ended, so none may write a weight (`overlapping_launches`).

        Raises:
            RuntimeError: it cannot be captured, or there is no memory for it.
        """
        with torch.no_grad(), torch.cuda.device(self.device), self._on_stream(), overlapping_launches():
            compute()
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
            except BaseException:
                # torch refuses further captures in the pool of one that has failed
                self._pool = torch.cuda.graph_pool_handle()
                raise
        return graph.replay, result

    def capture_sizes(self, sizes: Sequence[int], step: Callable[[int], T]) -> dict[int, tuple[Callable[[], None], T]]:
        """Capture a step of each size, the largest first, whose memory the others use, too."""
        return {size: self.capture(partial(step, size)) for size in sorted(sizes, reverse=True)}

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Make the stream current; it and the stream that was wait for each other, also after an error."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


class DecodeGraphs:
    """The graphs of decode steps, of one pass: of the main model or of its multi-token prediction layer.

    There is one for 1, 2, 4, 8, … rows: a step replays the smallest that has room for its rows. It reads them from
    buffers on the device, which one copy fills, and a second one where pages have changed. Rows beyond a step's are
    padding: they are written nowhere and attend to nothing. A model with indexers has two graphs of each size: rows
    attend to top-k positions, or, where none has more than that, to all.

    Args:
        forward: the model's forward pass, on a GPU.
        memory: memory of the graphs.
        max_rows: rows of the largest graph.
        max_pages: pages of a text at most.
        drafts: whether the pass is that of multi-token prediction, which reads hidden states.
    """

    def __init__(self, forward: Forward, memory: GraphMemory, max_rows: int, max_pages: int, drafts: bool = False):
        self.forward, self.max_rows = forward, max_rows
        self.sizes = graph_sizes(max_rows)
        self.host = DecodeRows(max_rows, max_pages, pinned=True)
        weights = forward.weights
        self.numbers = torch.zeros(4, max_rows, dtype=torch.int64, device=weights.device)
        self.numbers[2].fill_(-1)  # while graphs are captured, nothing is written to the cache
        self.pages = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=weights.device)
        self.hidden: Tensor | None = None
        if drafts:
            self.hidden = weights.head.new_zeros(max_rows, weights.config.hidden_size)
        self.copied = torch.cuda.Event()
        ways = (False, True) if forward.attention.index is not None else (False,)
        self.captured = {way: memory.capture_sizes(self.sizes, partial(self._forward, way)) for way in ways}

    def run(
        self, layout: Layout, hidden_TD: Tensor | None = None, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Replay the graph of a batch of decode rows alone: what the head reads [T, D], and logits [T, V].

        The results are valid until the next graph of the runner is replayed.

        Args:
            layout: layout of the batch.
            hidden_TD: the hidden states that multi-token prediction reads.
            chosen: field of `Batch`.
        """
        size = next(size for size in self.sizes if size >= layout.n_decode)
        self.copied.synchronize()  # returns at once unless the step before has not begun: its copies read the buffers
        first, end = self.host.fill(layout.chunks, size)
        self.numbers.copy_(self.host.numbers, non_blocking=True)
        if first < end:
            self.pages[first:end].copy_(self.host.pages[first:end], non_blocking=True)
        self.copied.record(torch.cuda.current_stream(self.numbers.device))  # of the model's GPU
        if chosen is not None:
            tokens_T = self.numbers[0, : layout.n_decode]
            tokens_T.copy_(with_chosen(tokens_T, chosen))
        if self.hidden is not None and hidden_TD is not None:
            self.hidden[: layout.n_decode].copy_(hidden_TD)
        replay, (h_TD, logits) = self.captured[self.forward.attention.is_sparse(layout.longest)][size]
        replay()
        return h_TD[: layout.n_decode], logits[: layout.n_decode]

    def _forward(self, is_sparse: bool, size: int) -> tuple[Tensor, Tensor]:
        step = decode_step(self.numbers[:, :size], self.pages[:size], is_sparse)
        h_TD = self.forward.hidden(step) if self.hidden is None else self.forward.draft(step, self.hidden[:size])
        return h_TD, self.forward.logits(h_TD)


def graph_sizes(max_rows: int) -> list[int]:
    """Return the sizes of the graphs: powers of two below max_rows, and max_rows."""
    sizes = [1]
    while sizes[-1] * 2 < max_rows:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_rows else [*sizes, max_rows]


class PrefillGraphs:
    """The graphs of steps with prompts: all of a layer but attention, which depends on how the rows are divided.

        embedding
        graph 0      queries and latents of layer 0, and what keys and values of the rows consist of, if they are read
        attention    of layer 0: from decode rows by a graph of its own, from prompts kernel by kernel
        graph 1      the rest of layer 0, then the same of layer 1
        …
        graph L      the rest of the last layer

    Chunks that begin their texts attend to the keys and values that the graphs have computed; for others they are
    computed anew, of all positions that they attend to. One more graph a layer does so for a piece of at most POSITIONS
    (`AttentionGraphs`). In batch-invariant mode chunks attend to latents instead, and attention is launched kernel by
    kernel.

    Some 30 kernels of a layer take the host longer than a GPU needs for 2,048 rows. Rows are padded to a multiple of
    256, or of 1,024; what fills them is written nowhere. The graphs of all numbers of rows are captured at the start
    and share buffers, since they run one after the other. Where there is no memory for them, steps of that number of
    rows are computed without a graph; ranks that exchange rows need the same graphs, and do not start without them.

    If the experts are spread over ranks, rows that are exchanged may be two micro-batches: while those of one are on
    their way, the other's are computed (`octile.nn.interleave`). Attention is not divided. On a CPU the graphs are what
    would be captured, for tests.

    Args:
        forward: the forward pass.
        memory: memory of the graphs; None on a CPU.
        max_rows: rows of the largest graph, at most MAX_ROWS; steps with more are computed without one.
        micro_batches: 1 or 2, of rows that are exchanged with other ranks.
        max_decode_rows: decode rows of a step at most; with more, they attend kernel by kernel.

    Raises:
        RuntimeError: a graph cannot be captured, and other ranks, which exchange rows with this one, may have theirs.
    """

    def __init__(
        self,
        forward: Forward,
        memory: GraphMemory | None,
        max_rows: int,
        micro_batches: int = 1,
        max_decode_rows: int = 0,
    ):
        self._forward, self._memory, self._micro_batches = forward, memory, micro_batches
        self._buffers: _Buffers | None = None  # of the largest graph that there is memory for
        sizes = graph_rows(min(max_rows, MAX_ROWS))
        self._graphs = {size: self._capture(size) for size in reversed(sizes)}
        self._attention = self._capture_attention(max_decode_rows)

    @property
    def has_all(self) -> bool:
        """Whether there was memory for the graphs of all numbers of rows."""
        return all(self._graphs.values())

    def without_attention(self) -> PrefillGraphs:
        """Return these without the graphs of attention, as where a step has more rows than graphs have."""
        other = copy(self)
        other._attention = None
        return other

    @property
    def max_positions(self) -> int:
        """Up to so many positions of texts that a step continues have graphs for their keys and values."""
        return 0 if self._attention is None else self._attention.max_positions

    def hidden(self, step: Step, at_least: int = 0) -> Tensor:
        """Compute `Forward.hidden` of a step.

        Args:
            step: the step.
            at_least: rows, for which the graph has room: ranks that exchange rows have graphs of one size.
        """
        size = padded_rows(max(len(step.tokens), at_least))
        graphs = self._graphs.get(size)
        return self._forward.for_rows(size).hidden(step) if graphs is None else graphs.hidden(step, self._attention)

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
            return _Graphs(self._forward.for_rows(rows), buffers, self._record, self._micro_batches)
        except RuntimeError as error:
            self._warn(f"steps of {size} rows", error)
            return None

    def _capture_attention(self, max_decode_rows: int) -> AttentionGraphs | None:
        """Capture the graphs of attention; None: this mode has none, or, with a warning, they cannot be captured.

        Raises:
            RuntimeError: as `_capture`.
        """
        forward, buffers = self._forward, self._buffers
        if buffers is None or forward.gemms.batch_invariant or not any(self._graphs.values()):
            return None
        attention, n_rows = forward.attention, len(buffers.o_TV)
        has_top_k = attention.index is not None  # whose decode rows attend as the lengths of texts say
        rows = [] if has_top_k else [n for n in decode_sizes(max_decode_rows) if n <= n_rows]
        queries = [buffers.queries(attention, block.attention, n_rows) for block in forward.weights.blocks]
        attended = Attended(queries, buffers.kv_LY, buffers.rope_LR, buffers.o_TV)
        try:
            return AttentionGraphs(forward, attended, self._record, rows, graph_rows(len(buffers.kv_LY)))
        except RuntimeError as error:
            self._warn("attention's decode rows and cached positions of steps with prompts", error)
            return None

    def _warn(self, what: str, error: RuntimeError) -> None:
        """Say what is computed without CUDA graphs.

        Raises:
            RuntimeError: rows are exchanged, and steps of other ranks, which may have theirs, would differ.
        """
        if self._forward.feed_forward.is_expert_parallel:
            why = f"CUDA graphs of {what} could not be captured on this rank, and all ranks need them: {error}"
            raise RuntimeError(why) from error
        what = f"{what} are computed without CUDA graphs, which could not be captured: {error}"
        warnings.warn(what, RuntimeWarning, stacklevel=3)

    def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph, and return what replays it."""
        return compute if self._memory is None else self._memory.capture(compute)[0]


class _Buffers(NamedTuple):
    """What the graphs of up to so many rows read and write; q has the capacity for the results of the widest GEMM.

    x has the rows of one rank of a group that shares them; the rest has those of all. kv and rope have as many rows, or
    more positions of texts that a step continues.
    """

    x_TD: Tensor
    q: Tensor
    kv_LY: Tensor
    rope_LR: Tensor
    o_TV: Tensor
    slots: Tensor
    read_slots: Tensor  # slots, and 0 for rows that are written nowhere
    cos: Tensor
    sin: Tensor
    index_q: Tensor
    index_weights: Tensor

    @classmethod
    def make(cls, forward: Forward, rows: int) -> _Buffers:
        weights, c, heads = forward.weights, forward.weights.config, forward.weights.n_heads
        x_TD = weights.head.new_zeros(forward.tp.n_own(rows), c.hidden_size)
        q = x_TD.new_zeros(rows * max(forward.attention.query_width(block.attention) for block in weights.blocks))
        n_positions = padded_rows(max(rows, min(POSITIONS, len(forward.cos))))
        n_positions = 0 if forward.gemms.batch_invariant else n_positions
        kv_LY = x_TD.new_zeros(n_positions, heads * (c.qk_nope_head_dim + c.v_head_dim))
        rope_LR = x_TD.new_zeros(n_positions, c.qk_rope_head_dim)
        o_TV = x_TD.new_zeros(rows, heads * c.v_head_dim)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=weights.device)
        cos, sin = (t.new_zeros(rows, t.shape[1]) for t in (forward.cos, forward.sin))
        has_index = forward.attention.index is not None
        index_heads, channels = (c.index_n_heads or 0, c.index_head_dim or 0) if has_index else (0, 0)
        index_q = torch.zeros(rows, index_heads, channels, dtype=torch.float8_e4m3fn, device=weights.device)
        index = index_q, cos.new_zeros(rows, index_heads)
        return cls(x_TD, q, kv_LY, rope_LR, o_TV, slots, torch.zeros_like(slots), cos, sin, *index)

    def first(self, rows: int, own_rows: int) -> _Buffers:
        """Return views of the first rows, of which x has a rank's own ones."""
        whole = "q", "kv_LY", "rope_LR"
        first = _Buffers(*(t if name in whole else t[:rows] for name, t in self._asdict().items()))
        return first._replace(x_TD=self.x_TD[:own_rows])

    def projected(self, attention: Attention, w: AttentionWeights, n: int) -> Tensor:
        """Return the memory for what a GEMM computes of n rows: their queries, and what else its weight gives."""
        width = attention.query_width(w)
        return self.q[: n * width].view(n, width)

    def queries(self, attention: Attention, w: AttentionWeights, n: int) -> Tensor:
        """Return the queries of n rows, [n, H, X]."""
        n_heads, width = attention.n_heads, attention.config.qk_head_dim
        return self.projected(attention, w, n)[:, : n_heads * width].unflatten(-1, (n_heads, width))

    def kv(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        """Return what the keys and values of n rows or positions consist of."""
        return self.kv_LY.narrow(0, first, n), self.rope_LR.narrow(0, first, n)


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

    def hidden(self, step: Step, attention: AttentionGraphs | None) -> Tensor:
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
        torch.clamp(buffers.slots, min=0, out=buffers.read_slots)
        attend = None if attention is None else attention.for_decode_rows(step)
        decompress = kv = None
        if all(piece.rows == piece.positions for piece in step.prefills):
            kv = [buffers.kv(piece.first_row, piece.rows) for piece in step.prefills]
        elif attention is not None and (decompress := attention.for_positions(step)) is not None:
            kv = [buffers.kv(0, piece.positions) for piece in step.prefills]
        self._replays[0]()
        for layer, block in enumerate(forward.weights.blocks):
            queries, out_TV, w = self._queries[layer].rows(0, n), buffers.o_TV[:n], block.attention
            if attend is not None:
                attend[layer]()
            elif len(step.lengths):
                forward.attention.attend_from_decode_rows(queries, layer, w, step, out_TV)
            if decompress is not None:
                decompress[layer]()
            forward.attention.attend_from_prompts(queries, layer, w, step, kv, out_TV)
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
            out_TW = buffers.projected(forward.attention, w, rows)
            self._queries[i] = self._stored(forward.attention.queries(x_TD, i, blocks[i], slots, cos_sin, out_TW))
            if not forward.gemms.batch_invariant:  # where chunks attend to latents alone
                kv_TY, rope_TR = buffers.kv(0, rows)
                rope_TR.copy_(forward.attention.naive.decompressed(i, w, buffers.read_slots, kv_TY)[1])

    def _after_attention(self, layer: int) -> None:
        """Compute the rest of a layer, in as many micro-batches if its experts are spread over ranks."""
        forward, block = self._forward, self._forward.weights.blocks[layer]
        rows = self._buffers.x_TD, self._buffers.o_TV, self._buffers.slots
        size = len(self._buffers.slots)

        def compute(first: int, n: int) -> None:
            x_TD, o_TV, slots = (t.narrow(0, first, n) for t in rows)
            with torch.no_grad():  # also in the thread of a micro-batch
                o = forward.gemms.rows_for(o_TV, block.attention.o)
                forward.for_rows(n).after_attention(x_TD, o, layer, block, slots)

        exchanges = forward.feed_forward.is_expert_parallel and not isinstance(block.mlp, MLPWeights)
        if self._micro_batches == 1 or not exchanges:
            x_TD, o_TV, slots = rows
            forward.after_attention(x_TD, forward.gemms.rows_for(o_TV, block.attention.o), layer, block, slots)
        else:
            run_interleaved(partial(compute, 0, size // 2), partial(compute, size // 2, size - size // 2))

    def _stored(self, queries: Queries) -> Queries:
        """Return queries whose memory outlasts the graph, and is that of all layers."""
        if queries.index_queries is None:
            return queries
        index = IndexQueries(self._buffers.index_q, self._buffers.index_weights)
        for buffer, values in zip(index, queries.index_queries, strict=True):
            buffer.copy_(values)
        return Queries(queries.q, index)


def graph_rows(max_rows: int) -> list[int]:
    """Return the numbers of rows to which steps of at most max_rows rows are padded."""
    few = range(ROWS[0], padded_rows(min(max_rows, FEW_ROWS)) + 1, ROWS[0])
    return [*few, *range(FEW_ROWS + ROWS[1], padded_rows(max_rows) + 1, ROWS[1])]


def padded_rows(n: int) -> int:
    """Return to how many rows a step of n rows is padded."""
    multiple = ROWS[n > FEW_ROWS]
    return -(-n // multiple) * multiple
