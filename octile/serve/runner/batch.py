"""The interface between the engine, which knows requests, and the model runner, which knows tensors.

A step of the engine is one `Batch`: a chunk of tokens for each request that takes part. The runner writes the latents
of the tokens to the chunks' pages, attends from each token to the positions before it, and returns logits.

Shapes: T all tokens of a batch, L all logits that it asks for, V vocabulary, D model.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octile.parallel.gpu_events import wait_for


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
    pages: array[int]
    n_logits: int


class Batch(NamedTuple):
    """The chunks of one forward pass, each of another request, at least one.

    Attributes:
        chosen: tokens that the pass or decode step before has chosen, int64 on the runner's device, whether or not they
            are computed: in a chunk of one token, −1 − i stands for the i-th of them. None: no token is negative.
    """

    chunks: Sequence[Chunk]
    chosen: Tensor | None = None


class Results(NamedTuple):
    """What a forward pass returns, chunk after chunk, on the model's device; valid until the runner's next call.

    Attributes:
        logits: float32 [L, V], at the positions that the chunks' n_logits ask for.
        hidden: [T, D], what the head reads, at all positions: the input of `Runner.draft`.
    """

    logits: Tensor
    hidden: Tensor


class DecodeRequest(NamedTuple):
    """A request of a decode step; see `Runner.decode`.

    Attributes:
        source: its number in the step before, whose tokens it continues; -1: its tokens are given.
        position: position of its last token; of a request with a source that of its first row in the step before.
        end: positions of its text that are computed: nothing is written from here on.
        seed, top_k: fields of its sampling, which `Sampling.joins_decode_steps`.
        n_drafts: the drafts after its last token that are verified, no more than there are and than the step has rows
            for. There are those in `tokens`, or those that the step of its source has made.
        temperature, top_p, min_p: further fields of its sampling.
        tokens: its last token, and the drafts after it; empty if it has a source.
        pages: pages, as in `Chunk`, of all positions before end that the step can reach: with n drafts the n, or if
            more the 2·n - 1, after `position`; with a source 1 + n more.
    """

    source: int
    position: int
    end: int
    seed: int
    top_k: int
    n_drafts: int
    temperature: float
    top_p: float
    min_p: float
    tokens: Sequence[int]
    pages: array[int]


class Decoded(NamedTuple):
    """What a decode step yields for a request.

    Attributes:
        chosen: the token after each of the step's 1 + n rows; those after the first `accepted` + 1 do not count.
        accepted: drafts before the first that is not the chosen token of its position.
        drafts: n for the next step.
        log_prob: log-probability of the chosen token of a request without drafts, before temperature; None: the step
            was not to compute it.
    """

    chosen: list[int]
    accepted: int
    drafts: list[int]
    log_prob: float | None = None


class DecodedTokens:
    """The results of a decode step, which may not be computed yet.

    Args:
        results: int64 [B, 2 + 2·n] in the host's memory: the numbers of `Decoded`.
        ready: recorded after the step, which writes `results`; None: they are there.
        n_drafts: n of the step.
        timeout: seconds after which `wait` waits no longer.
        log_probs: float32 [B] in the host's memory: those of the chosen tokens, without drafts. None: there are none.
        on_device: the last token of each request, int64 [B] on the runner's device, until the next decode step.
    """

    def __init__(
        self,
        results: Tensor,
        ready: torch.cuda.Event | None,
        n_drafts: int,
        timeout: float = math.inf,
        log_probs: Tensor | None = None,
        on_device: Tensor | None = None,
    ):
        self._results, self._ready, self._n_drafts, self._timeout = results, ready, n_drafts, timeout
        self._log_probs, self.on_device = log_probs, on_device

    @property
    def is_computed(self) -> bool:
        """Whether the step has ended."""
        return self._ready is None or self._ready.query()

    def wait(self) -> list[Decoded]:
        """Wait for the results, and return those of each request.

        Raises:
            TimeoutError: the GPU did not compute them in time, because it waits for the GPU of another rank.
        """
        self._wait_for_step(self._timeout)
        n, results = self._n_drafts, self._results.tolist()
        log_probs = [None] * len(results) if self._log_probs is None else self._log_probs.tolist()
        return [
            Decoded(row[: 1 + n], row[1 + n], row[2 + n :], log_prob)
            for row, log_prob in zip(results, log_probs, strict=True)
        ]

    def release_buffer(self, timeout: float) -> None:
        """Wait for the step, and copy its results: a later step writes the same buffers, and records the same event.

        Args:
            timeout: seconds after which it waits no longer.

        Raises:
            TimeoutError: as in `wait`.
        """
        self._wait_for_step(timeout)
        self._results, self._ready = self._results.clone(), None
        if self._log_probs is not None:
            self._log_probs = self._log_probs.clone()

    def _wait_for_step(self, timeout: float) -> None:
        if self._ready is not None:
            wait_for(self._ready, timeout)


class Runner(Protocol):
    """What the engine needs of a model: forward passes over a paged cache.

    Attributes:
        page_size: positions per page.
        n_pages: pages of the cache, numbered from 0.
        max_position: positions of a request at most: the model's context, or what the cache can hold.
        vocab_size: V.
        end_tokens: that end a text by the model's configuration, besides the tokenizer's.
        can_draft: whether the model has a multi-token prediction layer.
        device: where the logits are.
        n_drafts: drafts of each request of a decode step, at most.
        max_ahead: requests of the largest decode step that can be launched before the one before has been computed;
            0: none can.
        runs_ahead: whether `run` returns before its pass is computed, so that the next one can be launched meanwhile.
        expert_tokens: how many tokens each expert of a layer has had in the last steps, by the layer's number; None if
            they are not counted.
    """

    page_size: int
    n_pages: int
    max_position: int
    vocab_size: int
    can_draft: bool
    device: torch.device
    n_drafts: int
    max_ahead: int
    runs_ahead: bool

    @property
    def end_tokens(self) -> Sequence[int]: ...  # noqa: D102

    @property
    def expert_tokens(self) -> Mapping[int, tuple[int, ...]] | None: ...  # noqa: D102

    def run(self, batch: Batch) -> Results:
        """Run the main model over a batch. The positions of chunk and logits are those of the chunk's tokens."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Compute the logits of rows of `Results.hidden`, float32 [T, V]: those that `run` returns for them."""
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

    def decode(
        self,
        requests: Sequence[DecodeRequest],
        n_drafts: int,
        log_probs: bool = False,
        chosen: Tensor | None = None,
    ) -> DecodedTokens:
        """Launch a decode step: each request reads its last token and its drafts, and chooses the tokens after them.

        The results are those of `run`, of the sampler, of `count_accepted` and of the drafter. The call may
        return before they are computed. A request with a source continues what the step before has chosen and
        drafted for it, whether or not the host has collected that.

        Args:
            requests: at least one.
            n_drafts: drafts that the step makes for each request, and of which it verifies as many at most.
            log_probs: whether the log-probabilities of the chosen tokens are computed, too; only if the runner's
                n_drafts is 0.
            chosen: at most max_ahead tokens that a pass has chosen, int64 on the runner's device, whether or not they
                are computed: a source is the number of one of them, and its first row was the one before it. Only if
                the runner's n_drafts is 0. None: a source is a request of the decode step before.
        """
        ...

    def decode_logits(self, requests: Sequence[DecodeRequest], n_drafts: int) -> Tensor:
        """Launch a decode step up to its logits, by which the engine chooses tokens; `decode_chosen` is the next call.

        Only if the runner has drafts and `runs_ahead`.

        Args:
            requests, n_drafts: arguments of `decode`.

        Returns:
            float32 [B · (1 + n), V], of the last token of each request and its drafts, valid until the next call.
        """
        ...

    def decode_chosen(self, chosen: Tensor) -> DecodedTokens:
        """Launch the rest of a decode step, after `decode_logits`: what it accepts of its drafts, and new ones.

        Args:
            chosen: int64 [B · (1 + n)] on the runner's device, whether or not they are computed: the token after each
                row; any one after a row beyond the drafts that are verified.
        """
        ...

    def step_costs(self, n_requests: int, n_drafts: int) -> Sequence[float]:
        """Return how long decode steps with 0, 1, … n_drafts drafts of each request take, relative to one without.

        They are the same each time, and on all ranks that share requests. Only if the model can draft.

        Args:
            n_requests: requests of the steps, at least 1.
            n_drafts: drafts of each at most.
        """
        ...

    def check_weights(self) -> None:
        """Check that `update_weights` can be called now.

        Raises:
            ValueError: the weights cannot be updated, or the new ones cannot be served.
        """
        ...

    def update_weights(self) -> None:
        """Take over new weights; the latents in the pages stay as they are."""
        ...
