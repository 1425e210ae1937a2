"""The interface between the engine, which knows requests, and the model runner, which knows tensors.

A step of the engine is one `Batch`: a chunk of tokens for each request that takes part. The runner writes the latents
of the tokens to the chunks' pages, attends from each token to the positions before it, and returns logits.

Shapes: T all tokens of a batch, L all logits that it asks for, V vocabulary, D model.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """The tokens of one request in one forward pass; a request has at most one chunk in a batch.

    Attributes:
        tokens: S ≥ 1 tokens. In `Runner.run` those at the positions start … start + S − 1; in `Runner.draft` those one
            position later.
        start: the position of the first row. The latents of the positions before it are in the pages.
        pages: array("i") of page numbers: the page of position p is pages[p // page_size]. It has the pages of
            the positions 0 … start + S − 1, and may have more. Full pages before start may be shared with other
            requests: the runner writes only positions from start on.
        n_logits: logits are wanted at the last n_logits of the S positions; 0 for the chunks of a prompt but the last.
    """

    tokens: Sequence[int]
    start: int
    pages: "array[int]"
    n_logits: int


class Batch(NamedTuple):
    """The chunks of one forward pass, each of another request, at least one."""

    chunks: Sequence[Chunk]


class Results(NamedTuple):
    """What a forward pass returns, chunk after chunk, on the model's device; valid until the runner's next call.

    Attributes:
        logits: float32 [L, V], at the positions that the chunks' n_logits ask for.
        hidden: [T, D], what the head reads, at all positions: the input of `Runner.draft`.
    """

    logits: Tensor
    hidden: Tensor


class Runner(Protocol):
    """What the engine needs of a model: forward passes over a paged cache.

    Attributes:
        page_size: positions per page.
        n_pages: pages of the cache, numbered from 0.
        max_position: positions that the model can read, its context.
        vocab_size: V.
        can_draft: whether the model has a multi-token prediction layer.
        device: where the logits are.
    """

    page_size: int
    n_pages: int
    max_position: int
    vocab_size: int
    can_draft: bool
    device: torch.device

    def run(self, batch: Batch) -> Results:
        """Run the main model over a batch. The positions of chunk and logits are those of the chunk's tokens."""
        ...

    def draft(self, batch: Batch, hidden_TD: Tensor) -> Results:
        """Run the multi-token prediction layer over a batch.

        Row i of a chunk has the position start + i, reads the hidden state of that position and the token at the next
        one, tokens[i], and predicts the token after it. The layer's latents have a page of their own under the
        same page number.

        Args:
            batch: chunks whose tokens are shifted by one: tokens[i] is the token at start + i + 1.
            hidden_TD: [T, D], rows of `Results.hidden`: of `run`, or of `draft` for the draft after a draft.

        Returns:
            logits [L, V] of the tokens after the chunks' last n_logits tokens; hidden [T, D], what the head reads here.
        """
        ...
