"""Speculative decoding: the multi-token prediction layer drafts tokens, and the model verifies them in one pass.

    draft    the layer reads the hidden state of position t and the token at t + 1, and predicts the token at t + 2; for
             further drafts it reads its own hidden state instead of the model's
    verify   the next forward pass reads the last token and its drafts, and chooses the token after each of them; drafts
             are accepted before the first that is not the chosen token, and the choice after them is kept, too

A token is chosen from the model's logits with the noise of its position alone (`sampler.py`), so drafts change how many
passes a text takes, and nothing else: greedy and sampled texts are the same with and without them. A draft is sampled
with the noise of its position, too. With d, the total variation distance of the two distributions, it is accepted
with a probability of at least (1 − d) / (1 + d) and of 1 − d at most.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192), which accepts
with probability 1 − d, but a text then depends on its drafts; Daliri et al., Coupling without Communication and
Drafter-Invariant Speculative Decoding (arXiv 2408.07978); multi-token prediction: DeepSeek-V3 (arXiv 2412.19437) §2.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from octile.ops.sample_tokens import NOT_A_NUMBER
from octile.serve.engine.request import Request
from octile.serve.engine.sampler import Row, choose_each
from octile.serve.engine.scheduler import Scheduler
from octile.serve.runner.batch import Batch, Chunk, Runner


class Computed(NamedTuple):
    """What the last forward pass computed for a request that goes on.

    Attributes:
        request: the request, with the tokens that the pass has chosen.
        start: the first position.
        n_tokens: positions whose tokens are the request's, without drafts that were not accepted.
        row: the first position's row of the pass's hidden states.
    """

    request: Request
    start: int
    n_tokens: int
    row: int


def count_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the drafts before the first that is not the chosen token of its position."""
    return next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))


def check_can_draft(n_drafts: int, can_draft: bool, name: str = "n_drafts") -> None:
    """Raise ValueError if drafts are wanted of a model that has no multi-token prediction layer."""
    if n_drafts and not can_draft:
        raise ValueError(
            f"{name} must be 0, not {n_drafts}: the model has no multi-token prediction layer, "
            "which octile train --model.num-nextn-predict-layers 1 gives it"
        )


def usable_drafts(drafts: list[int], request: Request) -> list[int]:
    """Return a request's first drafts: those before logits without a token, and one less than tokens are wanted."""
    n_chosen = next((i for i, draft in enumerate(drafts) if draft < 0), len(drafts))
    return drafts[: min(n_chosen, request.n_remaining - 1)]


def draft_limit(request: Request) -> int:
    """Return how many drafts a request gets at most: its count, and one less than tokens are wanted."""
    assert request.draft_count is not None  # the engine drafts
    return min(request.draft_count.count, request.n_remaining - 1)


class Drafter:
    """Drafts the tokens after a forward pass, as many for each request as its `draft_count` says.

    The layer reads all tokens, also of requests without drafts: later drafts attend to their latents.

    Ranks that share their requests must agree on the rows of all passes. So a request of which a draft cannot be chosen
    stays in the passes after it, and has the drafts before it.

    Attributes:
        lacks_draft: whether an exception, which other ranks may not have had, was raised instead of a draft.

    Args:
        runner: the model.
        scheduler: allocates pages for the positions of drafts.
        end_tokens: end-of-text tokens.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, end_tokens: Collection[int]):
        self._runner, self._scheduler, self._end_tokens = runner, scheduler, end_tokens
        self.lacks_draft = False

    def draft(self, computed: Sequence[Computed], hidden_TD: Tensor) -> None:
        """Run the layer over what a pass has computed, and set the drafts of requests whose tokens it has all computed.

        Args:
            computed: a part of the pass's requests.
            hidden_TD: the pass's hidden states.
        """
        chunks: list[Chunk] = []
        rows: list[int] = []
        drafting: list[tuple[Request, int]] = []  # and the row of its last position
        for request, start, n_tokens, row in computed:
            end = start + n_tokens
            wants_draft = end + 1 == len(request.tokens) and draft_limit(request) > 0
            chunks.append(Chunk(request.tokens[start + 1 : end + 1], start, request.pages, int(wants_draft)))
            rows += range(row, row + n_tokens)
            if wants_draft:
                drafting.append((request, len(rows) - 1))
        if not chunks:
            return
        results = self._runner.draft(Batch(chunks), _rows(hidden_TD, rows))
        lacking = set[int]()  # requests of which a draft could not be chosen
        for n in count(1):
            if not drafting:
                return
            draft_rows = [
                Row(
                    request.sampling,
                    request.seed,
                    len(request.tokens) + n - 1,
                    request.histories(self._end_tokens, request.drafts)[-1],
                )
                for request, _ in drafting
            ]
            drafts = choose_each(results.logits, draft_rows)
            goes_on: list[tuple[Request, int, int]] = []
            for (request, row), draft in zip(drafting, drafts, strict=True):
                if isinstance(draft, Exception):
                    warnings.warn(f"a draft cannot be chosen: {draft!r}", RuntimeWarning, stacklevel=2)
                    self.lacks_draft, draft = True, NOT_A_NUMBER
                if draft < 0:
                    lacking.add(request.id)
                    draft = 0
                if request.id not in lacking:
                    request.drafts.append(draft)
                # one more token than drafts is chosen, and the next draft is computed at the last one's position
                if n < draft_limit(request) and self._scheduler.extend(request, len(request.tokens) + n):
                    goes_on.append((request, row, draft))
            if not goes_on:
                return
            chunks = [Chunk([draft], len(request.tokens) + n - 2, request.pages, 1) for request, _, draft in goes_on]
            rows = [row for _, row, _ in goes_on]
            results = self._runner.draft(Batch(chunks), _rows(results.hidden, rows))
            drafting = [(request, row) for row, (request, *_) in enumerate(goes_on)]


def _rows(hidden_TD: Tensor, rows: list[int]) -> Tensor:
    return hidden_TD if rows == list(range(len(hidden_TD))) else hidden_TD[torch.tensor(rows, device=hidden_TD.device)]
