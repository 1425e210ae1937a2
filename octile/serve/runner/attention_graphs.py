"""CUDA graphs of what attention computes in a step with prompts, but for attention from the prompts' rows.

    decode rows    attend to their pages in the absorbed form: graphs of 1, 2, 4, 8, … rows
    positions      of texts that a step continues: what their keys and values consist of, computed of the cached latents

Each kind has a graph a layer, between those of `octile.serve.runner.graphs.PrefillGraphs`. Some ten kernels of a layer
would take the host longer, one by one, than a GPU computes on a step of 2,048 rows. Attention from the prompts' rows
remains: it depends on how these are divided into chunks.

Shapes: T rows, L positions, M pages of a text at most, H heads, X channels of a query, R of a rotary key, V of a value,
Y of all heads' keys but their rotary part, and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.ops.latent_cache import PAGE
from octile.serve.model.attention import Queries
from octile.serve.model.forward import Forward
from octile.serve.runner.step import Step, padded_size

Replays = Sequence[Callable[[], None]]  # one of each layer
Record = Callable[[Callable[[], None]], Callable[[], None]]  # what captures a graph, and returns what replays it


class Attended(NamedTuple):
    """The memory that attention reads and writes in all graphs of a step.

    Attributes:
        queries: the queries of all rows, of each layer, [T, H, X].
        kv_LY, rope_LR: what keys and values of positions consist of.
        o_TV: results.
    """

    queries: Sequence[Tensor]
    kv_LY: Tensor
    rope_LR: Tensor
    o_TV: Tensor


class AttentionGraphs:
    """The graphs of decode rows and of positions.

    Args:
        forward: the model's forward pass.
        attended: the memory of attention.
        record: captures a graph.
        decode_rows: numbers of decode rows that have graphs.
        positions: numbers of positions that have graphs.

    Attributes:
        max_positions: the largest of them.
    """

    def __init__(
        self, forward: Forward, attended: Attended, record: Record, decode_rows: Sequence[int], positions: Sequence[int]
    ):
        self._forward, self._attended = forward, attended
        device, max_pages = attended.o_TV.device, -(-len(forward.cos) // PAGE)
        most = max(decode_rows, default=0)
        self._pages = torch.zeros(most, max_pages, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)  # none, while graphs are captured
        self.max_positions = max(positions, default=0)
        self._slots = torch.zeros(self.max_positions, dtype=torch.int64, device=device)
        self._of_rows = self._captured(self._attend, record, decode_rows)
        self._of_positions = self._captured(self._decompress, record, positions)

    def for_decode_rows(self, step: Step) -> Replays | None:
        """Return what lets the decode rows of a step attend, until the next step; None: no graph has their number."""
        n = len(step.lengths)
        if n in self._of_rows:
            self._lengths[:n] = step.lengths
            pages = step.pages[:, : self._pages.shape[1]]
            self._pages[:n, : pages.shape[1]] = pages
        return self._of_rows.get(n)

    def for_positions(self, step: Step) -> Replays | None:
        """Return what computes the keys and values of a step's only piece, until the next step; None: nothing does."""
        if len(step.prefills) != 1:
            return None
        piece = step.prefills[0]
        if self._forward.attention.is_piece_sparse(piece):
            return None
        size = next((size for size in sorted(self._of_positions) if size >= piece.positions), None)
        if size is None:
            return None
        assert step.context is not None
        self._slots[: piece.positions] = step.context.narrow(0, piece.first_position, piece.positions)
        self._slots[piece.positions : size] = 0
        return self._of_positions[size]

    def _captured(
        self, compute: Callable[[int, int], None], record: Record, sizes: Sequence[int]
    ) -> Mapping[int, Replays]:
        """Capture all layers of each size, the largest first, whose memory the others use, too."""
        layers = range(len(self._forward.weights.blocks))
        return {size: [record(partial(compute, layer, size)) for layer in layers] for size in sorted(sizes)[::-1]}

    def _attend(self, layer: int, size: int) -> None:
        """Attend from the first rows to their pages."""
        attention, w = self._forward.attention, self._forward.weights.blocks[layer].attention
        nothing = self._slots[:0]  # attention reads neither tokens nor positions nor slots
        step = Step(nothing, nothing, nothing, self._pages[:size], self._lengths[:size], None, ())
        queries = Queries(self._attended.queries[layer][:size], None)
        attention.attend_from_decode_rows(queries, layer, w, step, self._attended.o_TV[:size])

    def _decompress(self, layer: int, size: int) -> None:
        """Compute what keys and values of the first positions consist of."""
        naive, w = self._forward.attention.naive, self._forward.weights.blocks[layer].attention
        _, rope_LR = naive.decompressed(layer, w, self._slots[:size], self._attended.kv_LY[:size])
        self._attended.rope_LR[:size] = rope_LR


def decode_sizes(max_rows: int) -> list[int]:
    """Return the numbers of decode rows, as `mixed_step` pads them, of a step that decodes at most max_rows."""
    return [1 << i for i in range(padded_size(max_rows).bit_length())] if max_rows else []
