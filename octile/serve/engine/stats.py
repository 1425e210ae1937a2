"""What an engine counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import is_

ExpertTokens = Mapping[int, tuple[int, ...]]  # tokens of each expert by the number of its layer


@dataclass(frozen=True)
class Stats:
    """The state of an engine, and its counts since it was made.

    Attributes:
        waiting, running: requests that wait for pages or for a slot in the batch, and those that have them.
        n_pages: pages of the cache.
        used_pages: pages that requests hold now.
        cached_pages: pages that no request holds, whose content a later request with the same prefix can share.
        steps: forward passes of the main model; steps_ahead are those of them that were launched before the tokens of
            the pass before were collected.
        requests: requests that were added; finished, canceled and failed are those of them that have ended.
        preemptions: how often a running request was preempted because pages ran out.
        prompt_tokens: tokens of the prompts of admitted requests; shared_tokens are those of them whose latents were
            shared with earlier requests and not computed.
        generated_tokens: tokens generated, without end-of-text tokens.
        drafted_tokens, accepted_tokens: draft tokens that were verified, and those of them that were accepted.
        expert_tokens: how many tokens each expert has had in the last `EngineConfig.expert_window` steps, by the number
            of its layer; None if they are not counted. `octile.serve.rebalance_experts` reads them as the rows of its
            load.
        weights_version: how often the weights were updated; see `Engine.update_weights`.
        silent_seconds: for which one of several processes has not answered, though it was asked; 0 if all have.
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
    expert_tokens: ExpertTokens | None = None
    weights_version: int = 0
    silent_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """The share of verified draft tokens that were accepted; None if none was verified."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @classmethod
    def of_ranks(cls, stats: Sequence[Stats]) -> Stats:
        """Add the counts of ranks that step together; of steps and of updates, take the most that a rank has had.

        Of ranks that share their requests one gives all counts, and the others those of `only_expert_tokens`.
        """
        largest = {name: max(getattr(s, name) for s in stats) for name in ("steps", "steps_ahead", "weights_version")}
        counts = [f.name for f in fields(cls) if f.name not in (*largest, "expert_tokens")]
        rank_tokens = [s.expert_tokens for s in stats if s.expert_tokens is not None]
        tokens = ExpertTokensOfRanks(rank_tokens) if rank_tokens else None
        return cls(**{name: sum(getattr(s, name) for s in stats) for name in counts}, **largest, expert_tokens=tokens)

    @property
    def only_expert_tokens(self) -> Stats:
        """The tokens of experts alone, which a rank has counted of its own rows."""
        return Stats(expert_tokens=self.expert_tokens)

    def after(self, before: Stats) -> Stats:
        """Return these counts, with the experts' tokens of those before if `ChangedStats` has left them out."""
        return self if self.expert_tokens is not None else replace(self, expert_tokens=before.expert_tokens)


class ChangedStats:
    """The counts of an engine after each step, for another process: the experts' tokens only if they have changed.

    Those of a large model are tens of KB, and change eight times in a window. `Stats.after` adds them again.

    Args:
        stats: returns the counts of the engine.
    """

    def __init__(self, stats: Callable[[], Stats]):
        self._stats = stats
        self._sent: Sequence[ExpertTokens | None] = [None]

    def next(self) -> Stats:
        """Return the counts to send now."""
        stats = self._stats()
        tokens = stats.expert_tokens
        rank_tokens = tokens.rank_tokens if isinstance(tokens, ExpertTokensOfRanks) else [tokens]
        if len(rank_tokens) == len(self._sent) and all(map(is_, rank_tokens, self._sent)):
            return replace(stats, expert_tokens=None)
        self._sent = rank_tokens
        return stats


class ExpertTokensOfRanks(ExpertTokens):
    """How many tokens each expert has had on several ranks together, which is computed when it is read.

    Attributes:
        rank_tokens: the tokens of each expert by layer, of at least one rank.
    """

    def __init__(self, rank_tokens: Sequence[ExpertTokens]):
        self.rank_tokens = rank_tokens

    def __getitem__(self, layer: int) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(tokens[layer] for tokens in self.rank_tokens), strict=True)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.rank_tokens[0])

    def __len__(self) -> int:
        return len(self.rank_tokens[0])
