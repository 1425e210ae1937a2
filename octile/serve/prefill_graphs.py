"""CUDA graphs of steps with prompts: all of a layer but attention, which depends on how the rows are divided.

    embedding
    graph 0      queries and latents of layer 0
    attention    of layer 0, launched kernel by kernel
    graph 1      the rest of layer 0, then queries and latents of layer 1
    …
    graph L      the rest of the last layer

Some 30 kernels of a layer take the host longer than a GPU needs for 2,048 rows. Rows are padded to a multiple of 256,
or of 1,024; what fills them is written nowhere. The graphs of a number of rows are captured when it is first used, in
that step. They run one after the other, so all numbers of rows up to FEW_ROWS share buffers, and so do those beyond.
Where there is no memory for them, steps of that number of rows are computed without a graph.

Shapes: T rows, D model, H heads, X channels of a query, V of a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.serve.forward import Forward, Step

FEW_ROWS, MAX_ROWS = 2048, 8192
ROWS = 256, 1024  # to multiples of which steps are padded: up to FEW_ROWS, and beyond


class PrefillGraphs:
    """The graphs of a model's forward pass. On a CPU they are what would be captured, for tests.

    Args:
        forward: the forward pass.
    """

    def __init__(self, forward: Forward):
        self._forward = forward
        self._of_size: dict[int, _Graphs | None] = {}  # None: they could not be captured
        self._buffers: dict[int, _Buffers] = {}  # of so many rows
        device = forward.weights.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def hidden(self, step: Step) -> Tensor:
        """Compute `Forward.hidden` of a step of at most MAX_ROWS rows."""
        size = padded_rows(len(step.tokens))
        if size not in self._of_size:
            self._of_size[size] = self._capture(size)
        graphs = self._of_size[size]
        return self._forward.hidden(step) if graphs is None else graphs.hidden(step)

    def _capture(self, size: int) -> _Graphs | None:
        """Capture the graphs of a number of rows; None, with a warning: it is not possible."""
        rows = MAX_ROWS if size > FEW_ROWS else FEW_ROWS
        try:
            if rows not in self._buffers:
                self._buffers[rows] = _Buffers.make(self._forward, rows)
            return _Graphs(self._forward, self._buffers[rows].first(size), self._record)
        except RuntimeError as error:
            what = f"steps of {size} rows are computed without CUDA graphs, which could not be captured: {error}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
            return None

    def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph, and return what replays it."""
        if self._stream is None:
            return compute
        current = torch.cuda.current_stream(self._stream.device)  # of the model's GPU
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                compute()  # compiles and chooses kernels
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    compute()
                finally:
                    graph.capture_end()
        finally:
            current.wait_stream(self._stream)
        return graph.replay


class _Buffers(NamedTuple):
    """What the graphs of up to so many rows read and write."""

    x_TD: Tensor
    q_THX: Tensor
    o_TV: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def make(cls, forward: Forward, rows: int) -> _Buffers:
        weights, c = forward.weights, forward.weights.config
        x_TD = weights.head.new_zeros(rows, c.hidden_size)
        q_THX = x_TD.new_zeros(rows, c.num_attention_heads, c.qk_head_dim)
        o_TV = x_TD.new_zeros(rows, c.num_attention_heads * c.v_head_dim)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=weights.device)
        return cls(x_TD, q_THX, o_TV, slots, *(t.new_zeros(rows, t.shape[1]) for t in (forward.cos, forward.sin)))

    def first(self, rows: int) -> _Buffers:
        """Return views of the first rows."""
        return _Buffers(*(t[:rows] for t in self))


class _Graphs:
    """The graphs of one number of rows, and the buffers that they read and write, which others may share."""

    def __init__(self, forward: Forward, buffers: _Buffers, record: Callable[[Callable[[], None]], Callable[[], None]]):
        self._forward = forward
        self._x_TD, self._q_THX, self._o_TV, self._slots, *self._cos_sin = buffers
        self._slots.fill_(-1)  # while graphs are captured, nothing is written to the cache
        self._replays = [record(partial(self._between, i)) for i in range(len(forward.weights.blocks) + 1)]

    def hidden(self, step: Step) -> Tensor:
        """Compute what the head reads, [T, D]."""
        forward, n = self._forward, len(step.tokens)
        torch.index_select(forward.weights.embedding, 0, step.tokens, out=self._x_TD[:n])
        for table, rows in zip((forward.cos, forward.sin), self._cos_sin, strict=True):
            torch.index_select(table, 0, step.positions, out=rows[:n])
        self._slots[:n] = step.slots
        self._slots[n:] = -1
        self._replays[0]()
        for layer, block in enumerate(forward.weights.blocks):
            self._o_TV[:n] = forward.attend(self._q_THX[:n], layer, block.attention, step)
            self._replays[layer + 1]()
        return forward.last_norm(self._x_TD[:n])

    def _between(self, i: int) -> None:
        """Compute what is between attention of layer i - 1 and of layer i."""
        forward, blocks = self._forward, self._forward.weights.blocks
        if i:
            self._x_TD.copy_(forward.after_attention(self._x_TD, self._o_TV, i - 1, blocks[i - 1], self._slots))
        if i < len(blocks):
            cos, sin = self._cos_sin
            self._q_THX.copy_(forward.queries(self._x_TD, i, blocks[i], self._slots, (cos, sin)))


def padded_rows(n: int) -> int:
    """Return to how many rows a step of n rows is padded."""
    multiple = ROWS[n > FEW_ROWS]
    return -(-n // multiple) * multiple
