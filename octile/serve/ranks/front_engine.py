"""The engines of all ranks as one: rank 0 hands requests to ranks, and collects what they generate.

    rank 0        FrontEngine(engine, ranks, control), the engine of a server; its steps are rounds
    other ranks   follow(engine, ranks, control), until rank 0 closes its engine

A round sends the commands of rank 0 to all, runs a step of all (`SpreadEngine`), and sends their outputs to rank 0. A
new request goes to the rank that has the fewest, or to all ranks of the group that has the fewest, if groups of ranks
share their requests; the first rank of a group then sends its outputs. While nothing runs there is a round every
second, so that no rank waits for longer than its timeout. A rank that ends before is noticed within a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from octile.parallel.lost_ranks import LostRanks, send_farewell
from octile.parallel.messages import broadcast_message, gather_messages
from octile.parallel.ranks import Ranks
from octile.serve.engine.request import Output, Request, Sampling, make_request
from octile.serve.engine.stats import ChangedStats, Stats
from octile.serve.process.sent_requests import SentRequests
from octile.serve.ranks.engine import SpreadEngine


class _Added(NamedTuple):
    """A request, with its number at rank 0, for the engines of a group of ranks."""

    group: int
    number: int
    prompt: tuple[int, ...]
    sampling: Sampling


class _Commands(NamedTuple):
    """What rank 0 asks of all ranks in a round. Canceled requests are named by their numbers at rank 0."""

    added: Sequence[_Added] = ()
    canceled: Sequence[int] = ()
    stops: bool = False


class _Report(NamedTuple):
    """What a step has added to the requests of a rank, by their numbers at rank 0, and `ChangedStats` after it."""

    outputs: Sequence[Output]
    stats: Stats


class _Rank:
    """The part of one rank in the rounds.

    Args:
        engine: of this rank.
        ranks: all of them.
        control: the group of all ranks, by gloo.
    """

    def __init__(self, engine: SpreadEngine, ranks: Ranks, control: dist.ProcessGroup):
        self._engine, self._ranks, self._control = engine, ranks, control
        self._group, place = divmod(ranks.rank, engine.group_size)
        self._is_first = place == 0  # of its group
        stats = engine.engine.stats
        self._stats = ChangedStats(stats if self._is_first else lambda: stats().of_experts_only)
        self._requests = SentRequests()
        self._rounds = 0

    def round(self, commands: _Commands | None) -> list[_Report] | None:
        """Take part in a round, on rank 0 with its commands; return all reports on rank 0, and None at the end."""
        self._rounds += 1
        self._ranks.at(f"round {self._rounds}")
        received = broadcast_message(commands, _Commands, self._control)
        if received.stops:
            self._engine.close()
            return None
        self._carry_out(received)
        outputs = self._requests.renumber(self._engine.step() or ())
        report = _Report(outputs if self._is_first else [], self._stats.next())
        return gather_messages(report, _Report, self._control) or []

    def _carry_out(self, commands: _Commands) -> None:
        engine = self._engine.engine
        for number in commands.canceled:
            request = self._requests.pop(number)
            if request is not None:
                engine.cancel(request.id)
        for added in commands.added:
            if added.group == self._group and added.number not in commands.canceled:
                self._requests.add(added.number, engine.add(added.prompt, added.sampling))


class FrontEngine:
    """The engines of all ranks, on rank 0; implements `octile.serve.process.async_engine.StepEngine`.

    Args:
        engine: of this rank; from now on, only this object may use it.
        ranks: all of them; the others call `follow`.
        control: the group of all ranks, by gloo.
        on_lost: as of `LostRanks`; is called also while a step waits for the rank.
    """

    def __init__(
        self,
        engine: SpreadEngine,
        ranks: Ranks,
        control: dist.ProcessGroup,
        on_lost: Callable[[Exception], object],
    ):
        # the others wait for a round no longer than their timeout
        self.idle_seconds: float | None = min(1.0, ranks.timeout.total_seconds() / 2)
        self._engine, self._rank, self._timeout = engine.engine, _Rank(engine, ranks, control), ranks.timeout
        self._group_of: dict[int, int] = {}  # of the requests that have not ended
        self._load = [0] * (ranks.size // engine.group_size)  # how many of them each group of ranks has
        self._added: list[_Added] = []
        self._canceled: list[int] = []
        self._n_requests = 0
        own = self._engine.stats()  # all ranks have caches of the same size
        self._stats = [own.of_experts_only if rank % engine.group_size else own for rank in range(ranks.size)]
        self._lost = LostRanks(control, on_lost)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse a request that the model cannot continue; any thread may call it.

        Raises:
            ValueError: as `Engine.check`.
        """
        self._engine.check(prompt, sampling)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Add a request to the rank, or the group of ranks, that has the fewest, of several to the first one.

        Raises:
            ValueError: as `check`.
        """
        self.check(prompt, sampling)
        request = make_request(self._n_requests, prompt, sampling)
        self._n_requests += 1
        group = self._load.index(min(self._load))
        self._load[group] += 1
        self._group_of[request.id] = group
        self._added.append(_Added(group, request.id, tuple(prompt), request.sampling))
        return request

    def cancel(self, request_id: int) -> bool:
        """End a request in the next step; no output follows. Say whether it was there: it may have ended."""
        group = self._group_of.pop(request_id, None)
        if group is not None:
            self._load[group] -= 1
            self._canceled.append(request_id)
        return group is not None

    def step(self) -> list[Output]:
        """Run a step of all ranks."""
        commands, self._added, self._canceled = _Commands(self._added, self._canceled), [], []
        reports = self._rank.round(commands)
        assert reports is not None  # it does not stop
        self._stats = [report.stats.after(before) for report, before in zip(reports, self._stats, strict=True)]
        outputs = [output for report in reports for output in report.outputs if output.request_id in self._group_of]
        for output in outputs:
            if output.finish_reason is not None:
                self._load[self._group_of.pop(output.request_id)] -= 1
        return outputs

    def stats(self) -> Stats:
        """Return the state and the counts of all ranks together, after the last step."""
        return Stats.of_ranks(self._stats)

    def wake(self) -> None:
        """Do nothing: a step waits for other ranks only as long as they need for theirs."""

    def close(self) -> None:
        """Have the other ranks leave `follow`, and wait until they have.

        Raises:
            TimeoutError: one has not done so within the timeout of the ranks.
        """
        self._rank.round(_Commands(stops=True))
        self._lost.close(self._timeout)


def follow(engine: SpreadEngine, ranks: Ranks, control: dist.ProcessGroup) -> None:
    """Run this rank's part of each step of rank 0's `FrontEngine`, until that is closed.

    Args:
        engine: of this rank.
        ranks, control: as of `FrontEngine`.
    """
    rank = _Rank(engine, ranks, control)
    while rank.round(None) is not None:
        pass
    send_farewell(control)
