"""The engines of all ranks in lockstep: their experts are spread over the ranks (`octile.serve.ranks.experts`).

    ExpertParallelEngine   the steps of this rank's engine, together with those of the others; requests are added to it
    LockstepEngine         on rank 0: the engines of all ranks as one, for a server; its steps are rounds
    follow                 on the other ranks, until rank 0 closes its engine

The ranks agree on each step: whether any has work, whether all can launch a decode step ahead, how many requests or
rows and how many drafts of each a rank has at most, and whether the experts are placed anew.

Ranks of a group that share their requests (`octile.serve.ranks.tensor_parallel`) have engines with the same requests.
They receive the same bits of logits, so that each schedules and chooses what the others do, without a message. That
they have done so is compared before each forward pass and before the first of a step's passes of drafts, since
collectives of different sizes would hang. The passes of drafts have the same rows on all of them, also if one cannot
choose a draft that the others have chosen: then all drop the drafts of that step.

A round sends the commands of rank 0 to all, runs a step of all, and sends their outputs to rank 0. A new request goes
to the rank that has the fewest, or to all ranks of the group that has the fewest, if groups of ranks share their
requests; the first rank of a group then sends its outputs. While nothing runs there is a round every second, so that no
rank waits for longer than its timeout. A rank that ends before is noticed within a second or two.

Shapes: L layers with experts, E experts, P slots of all ranks.
"""

from __future__ import annotations

import math
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from octile.parallel.lost_ranks import LostRanks, send_farewell
from octile.parallel.messages import broadcast_message, gather_messages
from octile.parallel.ranks import Ranks
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Output, Request, Sampling, check_id
from octile.serve.engine.scheduler import Scheduled
from octile.serve.engine.stats import ChangedStats, Stats
from octile.serve.ranks.dynamic_redundancy import TooFewActiveError
from octile.serve.ranks.placement import rebalance_experts
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.routed_shared_experts import with_shared_load


class ExpertParallelEngine:
    """Steps of this rank's engine, together with those of the engines of all ranks.

    Args:
        engine: engine of this rank.
        runner: its runner, of `ExpertParallelWeights`.
        seconds: after which the experts are placed anew, by the tokens that they had on all ranks in the window of
            `ModelRunner(expert_window=…)`, but not before they have all moved; without a window they stay.
        control: the same ranks on their hosts, by gloo, through which they agree on each step; None: they agree through
            the group that has the experts, for which the host waits.
        timeout: seconds for which the host waits for tokens of its GPU, which may wait for that of another rank.

    Attributes:
        engine: engine of this rank; requests are added to it, in a group of ranks to the engines of all, in one order
            and with a seed.

    Raises:
        ValueError: the runner has no ExpertParallelWeights, seconds is negative or NaN, or timeout is not above 0.
    """

    def __init__(
        self,
        engine: Engine,
        runner: ModelRunner,
        seconds: float = 600.0,
        control: dist.ProcessGroup | None = None,
        timeout: float = math.inf,
    ):
        if runner.expert_parallel is None:
            raise ValueError("runner must be of ExpertParallelWeights: its experts are not spread over ranks")
        self.engine, self._weights, self._runner = engine, runner.expert_parallel, runner
        engine.compiles_in_background = False
        if not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, not {seconds}")
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0, not {timeout}")
        runner.timeout = timeout
        self._seconds, self._placed, self._moves = seconds, time.monotonic(), False
        self._checksum = 0  # of what all steps have scheduled and chosen
        self._control = runner.expert_parallel.dispatcher.groups[0] if control is None else control
        self._on_host = torch.device("cpu") if control is not None else runner.device

    def warm_up(self) -> None:
        """Compute a step of each kind on all ranks, so that none waits in a later step for kernels to be compiled.

        All ranks call it before their first step, and leave it together. The state is that of before it.

        Raises:
            TimeoutError: as `step`.
        """
        self._runner.warm_up()
        dist.barrier(self._control)

    def step(self) -> list[Output] | None:
        """Run a step, and move the experts of a layer if they are placed anew. All ranks must call this in turn.

        A rank whose engine has nothing to do takes part with padding. If all ranks can, they launch a decode step
        before the tokens of the last one are collected; its outputs are those of the next step.

        Returns:
            what the step adds to this rank's requests; None if no rank had any.

        Raises:
            TimeoutError: the GPU did not compute a step in time, because it waits for the GPU of another rank.
            RuntimeError: ranks that share their requests have chosen different tokens; all ranks raise it.
        """
        can_place = self._runner.expert_tokens is not None and not self._moves
        wants_place = can_place and time.monotonic() >= self._placed + self._seconds
        engine, steps = self.engine, self.engine.steps
        lacks_draft = self.group_size > 1 and steps.lacks_draft
        own = engine.has_work, wants_place, not engine.can_launch, lacks_draft, steps.n_running, steps.n_drafts
        has_work, is_due, needs_run, drops_drafts, self._runner.min_decode, n_drafts = self._maxima(*own)
        if drops_drafts:
            steps.drop_drafts()
        if is_due:
            self._place()
        outputs: list[Output] | None = None
        if has_work:
            outputs = self._run() if needs_run else self._launch(n_drafts)
        self._moves = self._weights.move_layer()
        return outputs

    @property
    def group_size(self) -> int:
        """How many consecutive ranks share their requests."""
        return self._runner.tp.size

    def close(self) -> None:
        """Free the CUDA graphs; no step follows."""
        self._runner.close()

    def _maxima(self, *own: int) -> list[int]:
        """Return the maxima of numbers of all ranks, which compare their checksums; all ranks call it.

        Raises:
            RuntimeError: as `step`.
        """
        numbers = torch.tensor([*own, *self._own_checksums()], dtype=torch.int32, device=self._on_host)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._control)
        found: list[int] = numbers.tolist()
        self._compare(found[len(own) :])
        return found[: len(own)]

    def _count(self, outputs: Sequence[Output], scheduled: Sequence[Scheduled] = ()) -> None:
        """Count what was chosen, or the chunks that were scheduled, in the checksum of ranks that share requests."""
        if self.group_size > 1:
            counted = array("q", [number for s in scheduled for number in (s.request.id, s.n_tokens)])
            for output in outputs:
                has_ended = output.finish_reason is not None
                counted.extend((output.request_id, has_ended, len(output.tokens), *output.tokens))
            self._checksum = crc32(counted.tobytes(), self._checksum)

    def _own_checksums(self) -> list[int]:
        """For each group of ranks that share their requests, numbers whose maxima differ in sign alone if all agree."""
        n_groups, dispatcher = self._weights.dispatcher.n_ranks // self.group_size, self._weights.dispatcher
        numbers = [-(2**31)] * 2 * n_groups if self.group_size > 1 else []
        if numbers:
            own, first = self._checksum >> 1, 2 * (dispatcher.rank // self.group_size)  # 31 bits
            numbers[first : first + 2] = own, -own
        return numbers

    def _compare(self, checksums: Sequence[int]) -> None:
        """Check what `_own_checksums` has given, after all ranks have taken the maxima."""
        for group, (largest, smallest) in enumerate(zip(checksums[::2], checksums[1::2], strict=True)):
            if largest != -smallest:
                first = group * self.group_size
                ranks = f"ranks {first} to {first + self.group_size - 1}"
                raise RuntimeError(f"{ranks}, which share their requests, have chosen different tokens")

    def _launch(self, n_drafts: int) -> list[Output]:
        n_steps = self._runner.n_steps
        outputs = self.engine.launch(n_drafts)
        if self._runner.n_steps == n_steps:
            self._runner.take_part(n_drafts)
        self._count(outputs)
        return outputs

    def _run(self) -> list[Output]:
        runner, n_steps, n_drafts = self._runner, self._runner.n_steps, self._runner.n_draft_passes
        outputs, scheduled = self.engine.schedule()
        self._count(outputs, scheduled)
        (runner.max_rank_rows,) = self._maxima(sum(s.n_tokens for s in scheduled))
        chosen = self.engine.run(scheduled)
        if runner.n_steps == n_steps:
            runner.take_part()
        self._count(chosen)
        if runner.n_drafts and self.group_size > 1:
            self._maxima()
        self.engine.steps.draft()
        runner.take_part_in_drafts(runner.n_drafts - (runner.n_draft_passes - n_drafts))
        runner.max_rank_rows = 0
        return outputs + chosen

    def _place(self) -> None:
        self._placed = time.monotonic()
        n_layers, n_slots = self._weights.physical_to_logical.shape
        c, n_shared = self._weights.weights.config, self._weights.n_shared
        load_LE = torch.zeros(n_layers, c.n_routed_experts, dtype=torch.int64)
        if self._runner.expert_tokens is not None:
            load_LE = torch.tensor([self._runner.expert_tokens[layer] for layer in self._weights.layers])
        load_LE = load_LE.to(self._runner.device)
        dist.all_reduce(load_LE, group=self._weights.dispatcher.groups[0])
        if load_LE.any():
            groups, nodes = 1 if n_shared else c.n_group, self._weights.num_nodes
            if n_shared:
                load_LE = with_shared_load(load_LE, n_shared, c.num_experts_per_tok)
            wanted_LP = rebalance_experts(
                load_LE,
                n_slots,
                groups,
                nodes,
                self._weights.dispatcher.n_ranks,
                distinct_copies=self._weights.num_active is not None,
            )[0]
            try:
                self._weights.move(wanted_LP)
            except TooFewActiveError as error:  # on all ranks alike
                warnings.warn(f"the experts stay where they are: {error}", RuntimeWarning, stacklevel=3)


class _Added(NamedTuple):
    """A request of rank 0, for the engines of a group of ranks."""

    group: int
    request_id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int

    def request(self) -> Request:
        """Return the request."""
        return Request(self.request_id, self.prompt, self.sampling, self.seed)


class _Commands(NamedTuple):
    """What rank 0 asks of all ranks in a round: requests to add, and the ids of those to cancel."""

    added: Sequence[_Added] = ()
    canceled: Sequence[int] = ()
    stops: bool = False


class _Report(NamedTuple):
    """What a step has added to the requests of a rank, and `ChangedStats` after it."""

    outputs: Sequence[Output]
    stats: Stats


class _Rank:
    """The part of one rank in the rounds.

    Args:
        engine: engine of this rank.
        ranks: all of them.
        control: the group of all ranks, by gloo.
    """

    def __init__(self, engine: ExpertParallelEngine, ranks: Ranks, control: dist.ProcessGroup):
        self._engine, self._ranks, self._control = engine, ranks, control
        self._group, rank_in_group = divmod(ranks.rank, engine.group_size)
        self._is_first = rank_in_group == 0
        stats = engine.engine.stats
        self._stats = ChangedStats(stats if self._is_first else lambda: stats().only_expert_tokens)
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
        outputs = self._engine.step() or []
        report = _Report(outputs if self._is_first else [], self._stats.next())
        return gather_messages(report, _Report, self._control) or []

    def _carry_out(self, commands: _Commands) -> None:
        engine = self._engine.engine
        for request_id in commands.canceled:
            engine.cancel(request_id)
        for added in commands.added:
            if added.group == self._group and added.request_id not in commands.canceled:
                engine.submit(added.request())


class LockstepEngine:
    """The engines of all ranks, on rank 0; implements `octile.serve.process.server.StepEngine`.

    Args:
        engine: engine of this rank; from now on, only this object may use it.
        ranks: all of them; the others call `follow`.
        control: the group of all ranks, by gloo.
        on_lost: argument of `LostRanks`; is called also while a step waits for the rank.
    """

    def __init__(
        self,
        engine: ExpertParallelEngine,
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
        own = self._engine.stats()  # all ranks have caches of the same size
        self._stats = [own.only_expert_tokens if rank % engine.group_size else own for rank in range(ranks.size)]
        self._lost = LostRanks(control, on_lost)

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._group_of)

    def submit(self, request: Request) -> None:
        """Add a request to the rank, or the group of ranks, that has the fewest, of several to the first one.

        Raises:
            ValueError: a request that waits or runs has its id.
        """
        check_id(request, self._group_of)
        group = self._load.index(min(self._load))
        self._load[group] += 1
        self._group_of[request.id] = group
        self._added.append(_Added(group, request.id, tuple(request.prompt), request.sampling, request.seed))

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


def follow(engine: ExpertParallelEngine, ranks: Ranks, control: dist.ProcessGroup) -> None:
    """Run this rank's part of each step of rank 0's `LockstepEngine`, until that is closed.

    Args:
        engine: engine of this rank.
        ranks, control: arguments of `LockstepEngine`.
    """
    rank = _Rank(engine, ranks, control)
    while rank.round(None) is not None:
        pass
    send_farewell(control)
