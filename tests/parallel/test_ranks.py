"""Tests of what ranks send through a store, with threads as ranks; train/strategy/test_torchrun.py starts processes."""

import gc
import os
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from octile.parallel import ranks as module
from octile.parallel.messages import MessageError, as_sent, encode, outcome_of
from octile.parallel.ranks import (
    Ranks,
    RanksError,
    RanksTimeoutError,
    explain,
    failure_before,
    join,
    leave,
    reported_failure,
)
from octile.signals import Stopped, Terminated
from tests.worlds import start_ranks


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """Two ranks that share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(module, "PATIENCE", timedelta(seconds=0.05))
    monkeypatch.setattr(module, "NOTICE", timedelta(seconds=0.05))
    return [Ranks(rank, 2, store, timedelta(seconds=7)) for rank in range(2)]


def on_both(two: list[Ranks], work) -> list:
    """The results or exceptions of a function of a rank, called on both at the same time."""

    def call(ranks: Ranks):
        try:
            return work(ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, two))


def become(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Let this process be a rank that has joined the others."""
    monkeypatch.setenv("RANK", str(ranks.rank))
    monkeypatch.setattr(module, "_joined", ranks)


def test_rank_0_works_and_all_get_its_results_in_order(two):
    assert (
        on_both(two, lambda r: [r.from_first(lambda n=n: (r.rank, n), tuple[int, int]) for n in range(3)])
        == [[(0, 0), (0, 1), (0, 2)]] * 2
    )


def test_a_result_that_cannot_be_sent_stays_on_rank_0(two):
    first, other = on_both(two, lambda r: r.from_first_only(lambda: (n for n in "ab")))
    assert list(first) == ["a", "b"]
    assert other is None


def test_an_exception_of_rank_0_is_raised_on_all(two):
    def fail() -> None:
        raise FileNotFoundError(2, "No such file", "there")

    for error in on_both(two, lambda r: r.from_first(fail)):
        assert isinstance(error, FileNotFoundError)
        assert (error.filename, error.strerror) == ("there", "No such file")


def test_an_exception_that_cannot_be_sent_is_described(two):
    def stop() -> None:
        raise Stopped("stopped after step 3", 15)

    own, other = on_both(two, lambda r: r.from_first(stop))
    assert isinstance(own, Stopped)
    assert str(other) == "Stopped: stopped after step 3"


FOREIGN = {  # what another process has set first, and what rank 1 says of it
    "a pickle": (pickle.dumps(("here", None)), "must be a message of type .*, but b'"),
    "another type": (encode((7, None), outcome_of(int)), r"str \| None is needed, not 7"),
    "an exception that is none": (b'[[null], [[false], [["os.system", ["true"], []]]]]', "'os.system' is no"),
}


@pytest.mark.parametrize(("foreign", "what"), FOREIGN.values(), ids=FOREIGN)
def test_a_key_that_another_process_has_set_first_ends_both(two, foreign: bytes, what: str):
    two[0].store.set("exchange/0", foreign)
    first, other = on_both(two, lambda r: r.from_first(lambda: "here", str))
    for error in (first, other):
        assert isinstance(error, MessageError)
    assert str(first).startswith("key exchange/0 of torchrun's store must be set by rank 0, but ")
    assert re.search(f"^key exchange/0 of torchrun's store .*{what}", str(other))


class Attack:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def be_attacked(process: int, port: int, folder: str) -> None:
    """Be one of two ranks that torchrun has started or, first, a foreign process that sets a key before rank 0 does."""
    store, texts = dist.TCPStore("127.0.0.1", port, is_master=False), [Path(folder, str(rank)) for rank in range(2)]
    if process == 2:
        attack = pickle.dumps((Attack(Path(folder, "ran")), None))
        dist.PrefixStore("octile", dist.PrefixStore("start 0", store)).set("exchange/0", attack)
        return store.set("attacked", "")
    store.wait(["attacked"])
    os.environ |= {"RANK": str(process), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = join(torch.device("cpu"), 60)

    def work() -> str:
        store.wait(["read"])  # by the other rank
        return "here"

    try:
        text = ranks.from_first(work, str)
    except MessageError as error:
        text = str(error)
    texts[process].write_text(text)
    store.set("read", "")
    leave()


def test_a_pickle_of_a_foreign_process_runs_no_code_and_ends_both_ranks(tmp_path: Path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_ranks(be_attacked, (store.port, str(tmp_path)), 3)
    assert not (tmp_path / "ran").exists()
    first, other = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert re.search(r"^key exchange/0 of torchrun's store must be set by rank 0, but b'\\x80\\x04.* lies there", first)
    assert re.search(
        r"^key exchange/0 of torchrun's store must be a message of type .*, but b'\\x80\\x04.* came", other
    )


def test_a_result_of_another_type_than_is_said_is_an_error_on_both(two):
    for error in on_both(two, lambda r: r.from_first(lambda: 7, str)):
        assert isinstance(error, TypeError)
        assert str(error) == "str | None is needed, not 7"


def test_a_position_that_another_process_has_set_is_one_short_line(two, monkeypatch):
    become(monkeypatch, two[0])
    two[1].store.set(f"{module.POSITION}/1", b"step 1\n\x1b[2J\xff" + b"x" * 10**6)
    text = str(explain(RanksTimeoutError("timed out")))
    assert "last seen: rank 1 at step 1\N{REPLACEMENT CHARACTER}" in text
    assert text.isprintable()
    assert len(text) < 500


def test_one_process_sends_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = join(torch.device("cpu"), 1)
    assert (alone.rank, alone.size, alone.is_first) == (0, 1, True)
    assert alone.from_first(lambda: "own", str) == "own"
    assert alone.gather(3, int) == [3]
    alone.agree("anything", "here")
    alone.at("step 1")


WAITED, LOST = "waited 7 s for the other ranks", "lost the connection to another rank, which has ended"
CONNECTION_ERRORS = [  # class, text, what is said of this rank, what is quoted
    (
        RuntimeError,
        "[/a/tcp/buffer.cc:78] Timed out waiting 7000ms for recv",
        WAITED,
        "Timed out waiting 7000ms for recv",
    ),
    (RuntimeError, "Application timeout caused pair closure", WAITED, "Application timeout caused pair closure"),
    (RuntimeError, "[/a/pair.cc:53] Read error: Broken pipe. This is typically", LOST, "Read error: Broken pipe"),
    (RuntimeError, "Connection closed by peer [127.0.0.1]:43", LOST, "Connection closed by peer [127.0.0.1]:43"),
    (dist.DistStoreError, "wait timeout after 7000ms, keys: /1", WAITED, "wait timeout after 7000ms, keys: /1"),
    (dist.DistNetworkError, "failed to recv, got 0 bytes", LOST, "failed to recv, got 0 bytes"),
    (dist.DistBackendError, "remote process exited or\nncclRemoteError", LOST, "remote process exited or"),
    (dist.DistBackendError, "ncclInternalError\nConnection closed by remote peer", LOST, "ncclInternalError"),
    (dist.DistBackendError, "ncclInternalError\nsocketConnect: No route to host", LOST, "ncclInternalError"),
    (dist.DistBackendError, "ncclInternalError\nConnect failed: Connection refused", LOST, "ncclInternalError"),
    (dist.DistBackendError, "", LOST, "DistBackendError"),
    *(
        (RuntimeError, f"[/a/tcp/pair.cc:78] {text}", what, text)
        for text, what in {
            "Read error [10.0.0.2]:3923: Connection timed out": LOST,
            "writev [10.0.0.2]:3923: No route to host": LOST,
            "connect [10.0.0.2]:3923: Connection refused": LOST,
            "Connect timeout [10.0.0.2]:3923": WAITED,
            "Read timeout [10.0.0.2]:3923": WAITED,
            "Write timeout [10.0.0.2]:3923": WAITED,
            "timed out connecting: SO_ERROR": WAITED,
            "Operation timed out!": WAITED,
        }.items()
    ),
]


@pytest.mark.parametrize(("kind", "text", "what", "why"), CONNECTION_ERRORS)
def test_an_error_of_the_connection_says_where_the_ranks_are_and_why(two, monkeypatch, kind, text, what, why):
    become(monkeypatch, two[0])
    two[0].at("step 4: sum of the gradients")
    two[1].at("step 4")
    explained = explain(kind(text))
    assert isinstance(explained, RanksError)
    assert str(explained) == f"rank 0 {what}, at step 4: sum of the gradients; last seen: rank 1 at step 4 ({why})"


def test_a_timeout_of_a_rank_says_where_the_ranks_are(two, monkeypatch):
    become(monkeypatch, two[0])
    explained = explain(RanksTimeoutError("timed out after 7 s for the GPU to finish a step"))
    assert str(explained) == f"rank 0 {WAITED}, at its start; last seen: rank 1 at its start"


def test_a_rank_whose_connection_was_closed_by_one_that_has_waited_too_long_says_so(two, monkeypatch):
    become(monkeypatch, two[1])
    explain(RuntimeError("Timed out waiting 7000ms for recv operation to complete"))
    become(monkeypatch, two[0])
    assert str(explain(RuntimeError("Connection closed by peer [10.0.0.2]:3923"))).startswith(
        "rank 0 lost the connection to another rank, which has waited 7 s for one that does not answer, at its start"
    )


def test_a_connection_that_is_lost_together_with_the_store_is_explained(two, monkeypatch):
    def fail(keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")

    become(monkeypatch, two[1])
    two[1].at("step 4")
    monkeypatch.setattr(two[1], "store", SimpleNamespace(check=fail))
    assert str(explain(RuntimeError("Connection closed by peer"))) == (
        "rank 1 lost the connection to another rank, which has ended, at step 4 (Connection closed by peer)"
    )


def test_a_signal_interrupts_a_rank_that_waits_for_rank_0(two, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise Terminated

    monkeypatch.setattr(module.time, "sleep", interrupted)
    with pytest.raises(Terminated):
        two[1].from_first(lambda: None)


def raised_while(*errors: BaseException) -> BaseException:
    """The last of some exceptions, each of which was raised while the one before was handled."""
    for before, after in pairwise(errors):
        after.__context__ = before
    return errors[-1]


def test_a_signal_while_a_lost_connection_ends_a_rank_does_not_hide_it(two, monkeypatch):
    become(monkeypatch, two[1])
    lost = RuntimeError("Connection closed by peer")
    assert failure_before(raised_while(lost, ValueError("closed"), Terminated())) is lost
    assert failure_before(raised_while(ValueError("closed"), Terminated())) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes cannot be multiplied"),
        RuntimeError("Distributed package doesn't have NCCL built in"),
        RuntimeError("the queue has a timeout"),
        TimeoutError("s3://bucket/run cannot be reached: no answer within 12 s"),
        TimeoutError(110, "Connection timed out", "weights.safetensors"),
        dist.DistBackendError(
            "NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"
        ),
        dist.DistBackendError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"),
        dist.DistBackendError(
            "NCCL error: unhandled cuda error\nCuda failure 702 'the launch timed out and was terminated'"
        ),
        RuntimeError("Caught ReadTimeout in a worker: https://host: Read timed out. (read timeout=10)"),
    ],
    ids=str,
)
def test_another_error_is_not_explained(two, monkeypatch, error):
    become(monkeypatch, two[0])
    assert explain(error) is error


def test_a_timeout_of_a_rank_arrives_at_another_one_as_such():
    assert isinstance(as_sent(RanksTimeoutError("timed out")), RanksTimeoutError)


def test_a_failure_of_all_ranks_is_reported_by_rank_0(two, monkeypatch):
    become(monkeypatch, two[0])
    assert reported_failure("seed must be the same") == (0, "seed must be the same")
    become(monkeypatch, two[1])
    assert reported_failure("seed must be the same") == (0, "seed must be the same")


def test_a_failure_of_one_rank_is_reported_by_it_and_by_no_other(two, monkeypatch):
    become(monkeypatch, two[1])
    assert reported_failure("the disk is full") == (1, "the disk is full")
    become(monkeypatch, two[0])
    assert reported_failure("lost the connection") == (1, "the disk is full")


def test_a_rank_waits_longer_for_rank_0_if_that_has_announced_its_report(two, monkeypatch):
    become(monkeypatch, two[1])
    two[0].announce_failure()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reported_failure, "the loss is nan")
        assert not waiting.done()
        two[0].store.compare_set(module.FAILURE, "", "0 the loss is nan")
        assert waiting.result() == (0, "the loss is nan")


def test_torchruns_report_has_the_line_of_the_rank_that_prints_it_for_all_ranks(two, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "end", lambda code: None)
    failures = {}
    for ranks, message in ((two[1], "the disk is full"), (two[0], "lost the connection")):
        become(monkeypatch, ranks)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{ranks.rank}.json"))
        module.fail(message, 1)
        failures[ranks.rank] = ProcessFailure(
            ranks.rank, 7, exitcode=1, error_file=str(tmp_path / f"{ranks.rank}.json")
        )
    report = str(ChildFailedError("octile", failures))
    assert report.count("  traceback : octile: rank 1: the disk is full\n") == 2
    assert capsys.readouterr().err == "octile: rank 1: the disk is full\n"


def test_a_failure_of_a_foreign_process_is_quoted_in_one_short_line(two, monkeypatch):
    two[0].store.set(module.FAILURE, "1 \x1b[2J" + 1000 * "line\n")
    become(monkeypatch, two[0])
    rank, cause = reported_failure("the disk is full")
    assert rank == 1
    assert "\x1b" not in cause
    assert "\n" not in cause
    assert len(cause) < 400


@pytest.fixture
def ended(two, monkeypatch) -> list[int]:
    """The exit codes of this process, rank 0 of two, which ends at once when it waits for the other one."""
    codes: list[int] = []
    become(monkeypatch, two[0])
    monkeypatch.setattr(module, "_is_failing", False)
    monkeypatch.setattr(module, "POLL", 0.0)
    monkeypatch.setattr(module, "GRACE", 0.0)
    monkeypatch.setattr(module, "end", codes.append)
    two[0].at("step 4")
    two[0].begin("sum of the losses")
    two[1].at("step 3")
    return codes


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("TIMEOUT", "waited 7 s for the other ranks"),
        ("COMM_ERROR", "lost the connection to another rank, which has ended"),
    ],
)
def test_a_gpu_that_waits_for_another_rank_ends_the_process_with_a_line(two, ended, capfd, error, what):
    errors = iter([set(), {error}])
    module._watchdog(two[0], lambda: next(errors))
    assert ended == [1]
    assert capfd.readouterr().err == (
        f"octile: rank 0 {what}, at step 4: sum of the losses; last seen: rank 1 at step 3\n"
    )


def test_a_rank_that_reports_its_failure_itself_is_not_ended_before(two, ended, capfd):
    assert reported_failure("the disk is full") == (0, "the disk is full")
    module._watchdog(two[0], lambda: {"TIMEOUT"})
    assert ended == []
    assert capfd.readouterr().err == ""


def test_a_watchdog_that_cannot_ask_for_errors_says_so_once(two, ended):
    def errors() -> set[str]:
        raise AttributeError("get_error")

    with pytest.warns(UserWarning, match=r"a hang will not be noticed .*: AttributeError\('get_error'\)"):
        module._watchdog(two[0], errors)
    assert ended == []


def test_groups_that_are_being_destroyed_are_not_asked_for_errors(two, ended, monkeypatch, recwarn):
    def errors() -> set[str]:
        monkeypatch.setattr(module, "_joined", None)
        raise RuntimeError("the group is destroyed")

    module._watchdog(two[0], errors)
    assert ended == []
    assert not recwarn.list


def test_the_watchdog_ends_with_the_process_group(two, ended, monkeypatch):
    monkeypatch.setattr(module, "_joined", None)
    module._watchdog(two[0], set)
    assert ended == []


def test_what_is_only_in_cycles_is_freed_before_the_process_group(monkeypatch: pytest.MonkeyPatch):
    """NCCL waits forever for communicators whose collectives a CUDA graph has."""

    class Step:
        def __init__(self) -> None:
            self.graph = self

    left: list[bool] = []
    monkeypatch.setattr(module, "_joined", Ranks.alone())
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(step() is not None))
    gc.disable()
    try:
        step = weakref.ref(Step())
        leave()
    finally:
        gc.enable()
    assert left == [False]
