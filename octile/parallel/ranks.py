"""The ranks of a run that torchrun started: who they are, what they agree on, and how all of them end.

    join           make the process group; NCCL on GPUs, gloo on a CPU
    from_first     rank 0 works, for any time, and all ranks get the result or the exception
    from_all       all ranks work, and all get the results of all, or the exception of one
    gather         all ranks get the values of all
    at, begin      tell the others where this rank is, and what it does there, which messages about a lost rank quote
    fail           print a failure, on one of the ranks, and end the process

A host that waits for its GPU, which waits for another rank, raises nothing: a thread ends the process then.

Results of rank 0 and positions go through torchrun's key-value store, which outlives the ranks, not through the process
group. Its port asks nobody who they are: what lies in the store is text or one of `octile.parallel.messages`.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from octile.gpu_failure import is_gpu_failure
from octile.parallel.experts import check_agreement
from octile.parallel.messages import (
    MessageError,
    all_gather_encoded,
    all_gather_messages,
    decode,
    encode,
    outcome_of,
    sent_by_name,
    shown,
)
from octile.torchrun import count_ranks, own_rank
from octile.validation import quoted

T = TypeVar("T")

FOREVER = timedelta(days=365)  # for work of rank 0 whose time nobody knows, such as preparing the data
PATIENCE = timedelta(seconds=3)  # for rank 0 to report the failure that another rank has, too
MAX_PATIENCE = timedelta(seconds=60)  # if it has announced one
POLL, GRACE = 1.0, 3.0  # seconds between two looks at NCCL, and for the failing rank to report what they find itself
FIRST_PAUSE, MAX_PAUSE = 0.001, 0.2  # seconds between two looks for a key of the store: the first, and the longest
NOTICE = timedelta(seconds=1)  # for a rank that has waited too long to say so, after it has closed its connections
FAILURE, FAILING, POSITION, GAVE_UP = "failure", "failing", "position", "gave up"  # keys of the store
# what errors say, in lower case: of gloo, whose class is RuntimeError, that another rank does not answer or has ended
GLOO = (
    "timed out waiting",
    "timed out connecting",
    "operation timed out",
    "application timeout",
    "connect timeout [",  # the address of the other rank follows; a client of HTTP says "read timeout=10"
    "read timeout [",
    "write timeout [",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection timed out",
    "no route to host",
    "broken pipe",
)
# of NCCL and of torchrun's store the same, and what NCCL says of its use on this rank
WAITED = ("timed out", "timing out", "timeout")
LOST = (
    "connection closed", "connection reset", "connection refused", "connection timed out", "no route to host",
    "broken pipe", "remote process exit", "ncclremoteerror",
)  # fmt: skip
MISUSE = (
    "invalid usage", "ncclinvalidusage", "invalid argument", "ncclinvalidargument", "unhandled cuda error",
    "ncclunhandledcudaerror", "internal error", "ncclinternalerror", "out of memory",
)  # fmt: skip
SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\] ")  # before gloo's messages
# torch warns each rank that a pipeline's sends wait for each other, which they must: both ranks run them in one order
SEND_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


class Ranks:
    """The ranks of a run; `alone()` is the only rank of a run without torchrun.

    Attributes:
        rank, size: number of this rank, from 0, and of all ranks.
        store: what `torch.distributed` calls a store; None without other ranks.
        timeout: after which a rank that waits for another one gives up.
        position: where this rank is, the argument of the last `at`.
        operation: what it does there, the argument of the last `begin`; empty if nothing has begun.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None, timeout: timedelta):
        self.rank, self.size, self.store, self.timeout = rank, size, store, timeout
        self.position, self.operation = "its start", ""
        self._exchanges = 0

    @classmethod
    def alone(cls) -> Ranks:
        """A single rank, for which nothing is sent."""
        return cls(0, 1, None, FOREVER)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def at(self, position: str) -> None:
        """Tell the others where this rank is: "step 3"."""
        self.position = position
        self.begin("")

    def begin(self, operation: str) -> None:
        """Tell the others what this rank does where it is: "sum of the gradients".

        It sends the store some bytes, and waits for no answer: 3 to 12 µs on one host. Many hosts were not measured.
        """
        self.operation = operation
        if self.store is not None:
            self.store.set(f"{POSITION}/{self.rank}", self.seen)

    @property
    def seen(self) -> str:
        """Where this rank is, and what it does: "step 3: sum of the gradients"."""
        return f"{self.position}: {self.operation}" if self.operation else self.position

    def from_first(self, work: Callable[[], T], kind: Any = None) -> T:
        """Let rank 0 work, and return its result on all ranks, or raise its exception. The others wait for any time.

        All ranks must call this in the same order.

        Args:
            work: what rank 0 does.
            kind: the type of its result, one of `octile.parallel.messages`; None: it has none.

        Raises:
            MessageError: what lies in the store is not what rank 0 has sent.
        """
        if self.store is None:
            return work()
        outcome, key, self._exchanges = outcome_of(kind), f"exchange/{self._exchanges}", self._exchanges + 1
        if not self.is_first:
            wait_for(self.store, key, FOREVER)
            result, failure = decode(self.store.get(key), outcome, f"key {key} of torchrun's store")
            if failure is not None:
                raise failure
            return result
        try:
            result = work()
            message = encode((result, None), outcome)
        except Exception as error:
            self._send(key, encode((None, error), outcome))
            raise
        self._send(key, message)
        return result

    def _send(self, key: str, message: bytes) -> None:
        assert self.store is not None
        if (found := self.store.compare_set(key, "", message.decode())) != message:
            raise MessageError(
                f"key {key} of torchrun's store must be set by rank 0, but {quoted(found)} lies there already, which a "
                "process that is no rank of this run may have sent"
            )

    def from_first_only(self, work: Callable[[], T]) -> T | None:
        """Let rank 0 work, and return its result there and None elsewhere, or raise its exception on all ranks."""
        result: list[T] = []
        self.from_first(lambda: result.append(work()))  # which returns None
        return result[0] if result else None

    def agree(self, what: str, own: str) -> None:
        """Raise ValueError on all ranks unless all have the same description of `what`."""
        if self.store is not None:
            check_agreement(what, own, [world()])

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; return it."""
        if self.store is not None:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the maximum over all ranks, in place; return it."""
        if self.store is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def gather(self, own: T, kind: Any) -> list[T]:
        """Return the values of all ranks, in their order, on all ranks.

        Args:
            own: the value of this rank.
            kind: the type of the values, one of `octile.parallel.messages`.
        """
        return [own] if self.store is None else all_gather_messages(own, kind, world())

    def from_all(self, work: Callable[[], T], kind: Any = None) -> list[T]:
        """Let all ranks work, and return all results on all ranks, in their order, or raise the first exception.

        Args:
            work: what this rank does.
            kind: the type of its result, one of `octile.parallel.messages`; None: it has none.
        """
        return gather_results(None if self.store is None else world(), work, kind)

    def announce_failure(self) -> None:
        """Tell the others that this rank ends with a failure, which it reports as soon as its work is saved."""
        if self.store is not None:
            self.store.set(f"{FAILING}/{self.rank}", "")

    def positions(self) -> str:
        """Say where the other ranks were last seen."""
        assert self.store is not None
        seen = []
        for rank in range(self.size):
            if rank != self.rank:
                key = f"{POSITION}/{rank}"
                where = shown(self.store.get(key).decode(errors="replace")) if self.store.check([key]) else "its start"
                seen.append(f"rank {rank} at {where}")
        return ", ".join(seen)


_joined: Ranks | None = None
_is_failing = False  # whether this rank reports a failure


def will_restart() -> bool:
    """Whether torchrun starts the ranks again if one of them fails now."""
    most, so_far = (int(os.environ.get(f"TORCHELASTIC_{what}") or 0) for what in ("MAX_RESTARTS", "RESTART_COUNT"))
    return so_far < most


def join(device: torch.device, timeout: float) -> Ranks:
    """Join the other ranks that torchrun started; without them, return the only rank.

    Args:
        device: device of this rank; its type chooses the backend.
        timeout: seconds after which a rank that waits for another one gives up.
    """
    global _joined
    if count_ranks() == 1:
        return Ranks.alone()
    limit = timedelta(seconds=timeout)
    store, rank, size = _rendezvous(limit)
    _joined = ranks = Ranks(rank, size, dist.PrefixStore("octile", store), limit)
    on_gpu = device.type == "cuda"
    os.environ.setdefault(SEND_WARNING, "false")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=device if on_gpu else None,
        pg_options=_nccl_options() if on_gpu else None,
    )
    if on_gpu:
        threading.Thread(target=_watchdog, args=(ranks, lambda: _nccl_errors(device)), daemon=True).start()
    return ranks


def _watchdog(ranks: Ranks, errors: Callable[[], set[str]]) -> None:
    """End this process when NCCL has waited too long for another rank, or has lost it, while the ranks are joined.

    torch's own thread writes this to its log, and ends the process minutes later.

    Args:
        ranks: that have joined.
        errors: returns the names of NCCL's errors.
    """
    found: set[str] = set()
    while _joined is ranks and not found:
        time.sleep(POLL)
        try:
            found = errors()
        except Exception as failure:
            if _joined is ranks:  # otherwise the groups are being destroyed
                warnings.warn(f"a hang will not be noticed while a host waits for its GPU: {failure!r}", stacklevel=1)
            return
    time.sleep(GRACE)
    if _joined is ranks and not _is_failing:  # no handler of SIGTERM runs while the main thread waits for the GPU
        fail(_describe(ranks, has_waited="TIMEOUT" in found), RanksError.exit_code)


def _nccl_errors(device: torch.device) -> set[str]:
    """The errors of all groups' communicators that torch has noticed: TIMEOUT, COMM_ERROR, REMOTE_ERROR."""
    groups = [group for group, (backend, _) in [*dist.distributed_c10d._world.pg_map.items()] if "nccl" in backend]
    return {group._get_backend(device).get_error().name for group in groups} - {"SUCCESS"}


def _nccl_options() -> Any:
    """Options by which collectives that overlap with GEMMs get SMs as soon as some are free.

    GEMMs take all SMs, one after the other. A collective's blocks, for which the other ranks wait, come first.
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def leave() -> None:
    """Leave the process group, at the end of a run in which nothing failed."""
    global _joined
    if _joined is not None:
        _joined = None  # no thread asks the groups for errors any more
        gc.collect()  # NCCL destroys no communicator whose collectives a graph has, and trainers are in cycles
        dist.destroy_process_group()


def explain(error: Exception) -> Exception:
    """Say which rank waited where, if an error is one of the connection to another rank; else return the error.

    What gloo, NCCL or the store said is at the end of the message, its first sentence.
    """
    if _joined is None or not _is_of_connection(error):
        return error
    if isinstance(error, RanksTimeoutError):
        return RanksError(_describe(_joined, has_waited=True))
    has_waited = _has(WAITED, error) and not _has(LOST, error)  # "Connection timed out": TCP's own time, of a lost host
    sentence = re.split(r"\.?(?:\n|$)|\.\s", SOURCE_LINE.sub("", str(error)), maxsplit=1)[0]
    return RanksError(f"{_describe(_joined, has_waited)} ({shown(sentence) or type(error).__name__})")


def _describe(ranks: Ranks, has_waited: bool) -> str:
    """Say that this rank has waited too long for the others, or has lost one, and where all are.

    A rank that has waited too long closes its connections, as one that has ended does; the store says which it was.
    """
    assert ranks.store is not None
    what, waited = "lost the connection to another rank, which has", f"waited {ranks.timeout.total_seconds():g} s for"
    with suppress(dist.DistError):  # the store may be gone, with the host that had it
        if has_waited:
            ranks.store.set(GAVE_UP, "")
        elif wait_for(ranks.store, GAVE_UP, NOTICE):
            return f"rank {ranks.rank} {what} {waited} one that does not answer{where_ranks_are()}"
    what = f"{waited} the other ranks" if has_waited else f"{what} ended"
    return f"rank {ranks.rank} {what}{where_ranks_are()}"


def failure_before(interrupt: KeyboardInterrupt) -> Exception | None:
    """Return the error of the connection to another rank that ends this rank already when a signal arrives, if any.

    torchrun sends SIGTERM to the other ranks when one has ended, which their collectives notice at the same time.

    Args:
        interrupt: what the signal has raised.
    """
    before = interrupt.__context__
    while _joined is not None and before is not None:
        if isinstance(before, Exception) and (isinstance(before, RanksError) or _is_of_connection(before)):
            return before
        before = before.__context__
    return None


def where_ranks_are() -> str:
    """Say where this rank is, and where the others were last seen; nothing before they have met.

    Only where this rank is if the store is gone, with the host that had it.
    """
    if _joined is None:
        return ""
    try:
        return f", at {_joined.seen}; last seen: {_joined.positions()}"
    except dist.DistError:
        return f", at {_joined.seen}"


@sent_by_name
class RanksError(Exception):
    """Another rank hangs or has ended."""

    exit_code = 1


@sent_by_name
class RanksTimeoutError(TimeoutError):
    """This rank has waited too long for another one, or for its GPU, which waits for another rank's."""


def fail(message: str, code: int) -> NoReturn:
    """Print the failure that ends this rank, if no other rank prints one, and end the process."""
    rank, cause = reported_failure(message)
    names = not rank or cause.startswith(f"rank {rank} ")
    line = f"octile: {'' if names else f'rank {rank}: '}{cause}"
    if (rank, cause) == (own_rank(), message):
        sys.stderr.write(f"{line}\n")  # in one: others write, too
    _write_for_torchrun(line)
    end(code)


def reported_failure(message: str) -> tuple[int, str]:
    """Return the failure that is printed for all ranks, and the rank that prints it.

    It is that of the first rank to ask, rank 0 before the others: the same failure on all ranks is printed by rank 0,
    and a rank that fails because another one has failed is silent.

    Args:
        message: the failure that ends this rank.
    """
    global _is_failing
    _is_failing, rank = True, own_rank()
    try:
        store = _joined.store if _joined is not None else dist.PrefixStore("octile", _rendezvous(PATIENCE)[0])
        assert store is not None
        if rank:
            wait_for(store, FAILURE, MAX_PATIENCE if store.check([f"{FAILING}/0"]) else PATIENCE)
        first, _, cause = store.compare_set(FAILURE, "", f"{rank} {message}").decode().partition(" ")
        return int(first), message if cause == message else shown(cause)
    except Exception:  # without torchrun's store nobody knows what the others have printed
        return rank, message


def _write_for_torchrun(line: str) -> None:
    """Have torchrun quote a line in its report of the ranks that have failed, below a traceback of its own.

    The format of the file is that of `torch.distributed.elastic.multiprocessing.errors`.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"timestamp": str(int(time.time())), "py_callstack": line}
        with suppress(OSError):  # the report lacks the line then, which is printed already
            Path(f"{path}.new").write_text(json.dumps({"message": {"message": line, "extraInfo": details}}), "utf-8")
            os.replace(f"{path}.new", path)  # torchrun may read it at any time


def end(code: int) -> NoReturn:
    """End the process after a failure, without waiting for collectives that the other ranks will not join."""
    if _joined is None:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """torchrun's store, this rank and their number. The store may hold the keys of a start before a restart."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # several agents count their own restarts, and make a new store
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, rank, size


def _is_of_connection(error: Exception) -> bool:
    """Whether gloo, NCCL or the store raised it because another rank does not answer.

    A timeout of a file system or of an object store is a `TimeoutError` of Python, and has nothing to do with ranks;
    nor has that of a kernel, which an error of NCCL may quote.
    """
    if is_gpu_failure(error):
        return False
    if isinstance(error, dist.DistError):
        return _has(WAITED + LOST, error) or not _has(MISUSE, error)
    return isinstance(error, RanksTimeoutError) or (isinstance(error, RuntimeError) and _has(GLOO, error))


def _has(words: Collection[str], error: Exception) -> bool:
    message = str(error).lower()
    return any(word in message for word in words)


def wait_for(store: dist.Store, key: str, limit: timedelta) -> bool:
    """Wait until a store has a key, and return whether it has it within a time.

    No handler of a signal runs while torch's own `wait` blocks, and torch logs it if that takes too long.
    """
    latest, pause = time.monotonic() + limit.total_seconds(), FIRST_PAUSE
    while not store.check([key]):
        if time.monotonic() > latest:
            return False
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)
    return True


def gather_results(group: dist.ProcessGroup | None, work: Callable[[], T], kind: Any = None) -> list[T]:
    """Call a function on all ranks of a group, and return the results of all to all.

    Args:
        group: the ranks; None: the only process.
        work: what this rank does.
        kind: the type of its result, one of `octile.parallel.messages`; None: it has none.

    Raises:
        Exception: what it raised on the first rank on which it raised something; all ranks raise it.
    """
    outcomes = gather_outcomes(group, work, kind)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]  # type: ignore[misc]


def gather_outcomes(
    group: dist.ProcessGroup | None, work: Callable[[], T], kind: Any = None
) -> list[tuple[T | None, Exception | None]]:
    """Do what `gather_results` does, but return the exceptions: of each rank its result or what it raised."""
    outcome = outcome_of(kind)
    try:
        result = work()
        if group is None:
            return [(result, None)]
        own = encode((result, None), outcome)
    except Exception as error:
        if group is None:
            return [(None, error)]
        own = encode((None, error), outcome)
    return all_gather_encoded(own, outcome, group)


def world() -> dist.ProcessGroup:
    """The process group of all ranks, once it is initialized."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
