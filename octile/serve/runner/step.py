"""A step of serving: the rows of one forward pass, and what its prefill chunks attend to.

Shapes: T rows, M pages of a request at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class PrefillPiece(NamedTuple):
    """Chunks whose keys and values are in memory at once.

    Attributes:
        first_row, rows: of all its chunks, in the step.
        first_position, positions: of all its chunks, in the step's context.
        n_read: positions that are read, at least as many: what is beyond only fills GEMMs.
        row_starts, position_starts: int32 [chunks + 1], of each chunk in the piece, and the ends.
        max_rows, max_positions: of a chunk.
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


class Step(NamedTuple):
    """The rows of one forward pass, on the model's device; decode rows come first, then the prefill chunks.

    Attributes:
        tokens, positions: int64 [T].
        slots: int64 [T], where each row's latent is written; negative: nowhere, the row only fills a graph.
        pages: int32 [decode rows, M], of each row's request.
        lengths: int32 [decode rows], positions that each attends to: its own and those before. In a step with prompts
            rows of theirs may follow, with no positions: what they attend to here is overwritten.
        rows_per_text: consecutive decode rows of one request, all of which have as many.
        context: int64, the slots of all positions that prefill chunks attend to, chunk after chunk.
        prefills: the chunks after the decode rows, in pieces.
        max_positions: whose keys and values are in memory at once: a piece has no more, or is one chunk.
        chooses: whether decode rows attend to chosen positions, if the model chooses some; otherwise to all.
        schedule: of the indexer's logits of decode rows (`octile.serve.model.attention.Attention.with_schedule`).
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    pages: Tensor
    lengths: Tensor
    context: Tensor | None
    prefills: Sequence[PrefillPiece]
    max_positions: int = 0
    chooses: bool = True
    schedule: Tensor | None = None
    rows_per_text: int = 1

    @property
    def only_decodes(self) -> bool:
        """Whether all rows attend as decode rows: these may be padded to the rows of a step with prompts, too."""
        return not self.prefills and len(self.lengths) == len(self.tokens)
