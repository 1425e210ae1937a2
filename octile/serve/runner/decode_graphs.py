"""CUDA graphs of decode steps for 1, 2, 4, 8, … rows: a step replays the smallest graph that has room for its rows.

A graph reads its rows from buffers on the device, which one copy fills, and a second one where pages have changed. Rows
beyond a step's are padding: they are written nowhere and attend to nothing. A model with indexers has two graphs of
each size: rows attend to chosen positions, or, where none has more than that, to all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octile.serve.model.forward import Forward
from octile.serve.runner.graph_memory import GraphMemory
from octile.serve.runner.step_inputs import DecodeRows, Layout, decode_step


class DecodeGraphs:
    """The captured graphs of one pass, of the main model or of its multi-token prediction layer, and their buffers.

    Args:
        forward: the model's forward pass, on a GPU.
        memory: of the graphs.
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

    def run(self, layout: Layout, hidden_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Replay the graph of a batch of decode rows alone: what the head reads [T, D], and logits [T, V].

        The results are valid until the next graph of the runner is replayed.

        Args:
            layout: of the batch.
            hidden_TD: the hidden states that multi-token prediction reads.
        """
        size = next(size for size in self.sizes if size >= layout.n_decode)
        self.copied.synchronize()  # returns at once unless the step before has not begun: its copies read the buffers
        first, end = self.host.fill(layout.chunks, size)
        self.numbers.copy_(self.host.numbers, non_blocking=True)
        if first < end:
            self.pages[first:end].copy_(self.host.pages[first:end], non_blocking=True)
        self.copied.record(torch.cuda.current_stream(self.numbers.device))  # of the model's GPU
        if self.hidden is not None and hidden_TD is not None:
            self.hidden[: layout.n_decode].copy_(hidden_TD)
        replay, (h_TD, logits) = self.captured[self.forward.attention.chooses(layout.longest)][size]
        replay()
        return h_TD[: layout.n_decode], logits[: layout.n_decode]

    def _forward(self, chooses: bool, size: int) -> tuple[Tensor, Tensor]:
        step = decode_step(self.numbers[:, :size], self.pages[:size], chooses)
        h_TD = self.forward.hidden(step) if self.hidden is None else self.forward.draft(step, self.hidden[:size])
        return h_TD, self.forward.logits(h_TD)


def graph_sizes(max_rows: int) -> list[int]:
    """Return the sizes of the graphs: powers of two below max_rows, and max_rows."""
    sizes = [1]
    while sizes[-1] * 2 < max_rows:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_rows else [*sizes, max_rows]
