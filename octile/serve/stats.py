"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """The state of an engine, and its counts since it was made.

    Attributes:
        waiting, running: requests that wait for pages or for a place in the batch, and those that have them.
        n_pages: pages of the cache.
        used_pages: pages that requests hold now.
        cached_pages: pages that no request holds, whose content a later request with the same prefix can share.
        steps: forward passes of the main model; steps_ahead are those of them that were launched before the tokens of
            the pass before were read.
        requests: requests that were added; finished, canceled and failed are those of them that have ended.
        preemptions: how often a running request was put back to wait because pages ran out.
        prompt_tokens: tokens of the prompts of admitted requests; shared_tokens are those of them whose latents were
            shared with earlier requests and not computed.
        generated_tokens: tokens generated, without end-of-text tokens.
        drafted_tokens, accepted_tokens: draft tokens that were verified, and those of them that were accepted.
        expert_tokens: how many tokens each expert has had in the last `EngineConfig.expert_window` steps, by the number
            of its layer; None if they are not counted. `octile.serve.rebalance_experts` reads them as the rows of its
            load.
    """

    waiting: int = 0
    running: int = 0
    n_pages: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    steps: int = 0
    steps_ahead: int = 0
    requests: int = 0
    finished: int = 0
    canceled: int = 0
    failed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    expert_tokens: Mapping[int, tuple[int, ...]] | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """The share of verified draft tokens that were accepted; None if none was verified."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None
