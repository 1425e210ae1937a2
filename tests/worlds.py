"""Cases that several ranks check together, in processes that start once for all tests of a file."""

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock

Failures = Sequence[Mapping[str, str]]
Work = Callable[[int, Path], None]

# what most ranks and processes import in the end, and which takes seconds
PRELOADED = (
    "torch._dynamo",
    "octile.checkpoint.distributed",
    "octile.serve.disaggregated.router",
    "octile.serve.http.serve_folder",
    "octile.serve.http.server",
    "octile.serve.http.service",
    "octile.train.command",
    "octile.train.loop",
    "tests.train.strategy.bad_rank",
)


def run_cases(cases: Mapping[str, Callable[[], None]], folder: str, rank: int) -> None:
    """Run all cases as one rank, and write what went wrong in each, also if a later one ends the process."""
    failures = dict.fromkeys(cases, "it was not begun")
    for name, case in cases.items():
        failures[name] = "it did not end"
        _write_failures(failures, folder, rank)
        try:
            case()
            failures[name] = ""
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    _write_failures(failures, folder, rank)


def _write_failures(failures: Mapping[str, str], folder: str, rank: int) -> None:
    partial_file = Path(folder) / f"{rank}.part"
    torch.save(failures, partial_file)
    partial_file.rename(Path(folder) / f"{rank}.pt")


def _read_failures(folder: str | Path, world: int) -> Failures:
    """Return what went wrong in the cases, by rank."""
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def start_ranks(run: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Call run(rank, *arguments) in so many processes, and wait for them."""
    _start(run, arguments, world, join=True)


def begin_ranks(run: Callable[..., None], arguments: tuple[Any, ...], world: int) -> list[BaseProcess]:
    """Call run(rank, *arguments) in so many processes, and return them."""
    return _start(run, arguments, world, join=False).processes


def forked_context() -> BaseContext:
    """The start method of `_start`, for processes that run other functions, and print where this process prints."""
    multiprocessing.set_forkserver_preload([*PRELOADED, "tests.frozen"])
    context = multiprocessing.get_context(_start_method())
    if _start_method() == "forkserver":
        forkserver._forkserver.ensure_running()  # where signals are blocked, what it forks would have them blocked, too

    class Forked(type(context)):  # type: ignore[misc]
        def Process(self, target: Callable[..., None], args: Sequence[Any] = (), **options: Any) -> BaseProcess:
            streams = Connection(os.dup(1), readable=False), Connection(os.dup(2), readable=False)
            return context.Process(target=_run_printing, args=(streams, _children, target, *args), **options)

    return Forked()


_children: Connection | None = None  # receives the numbers of the processes that this one starts


def send_children(connection: Connection) -> None:
    """Have the processes that this one starts from now on send their numbers."""
    global _children
    _children = connection


def _run_printing(
    streams: Sequence[Connection], begun: Connection | None, target: Callable[..., None], *arguments: Any
) -> None:
    """Call a function in a process that prints to two streams, and whose own processes do so, too."""
    print_to(*streams)
    if begun is not None:
        begun.send(os.getpid())
    fork_children()
    target(*arguments)


def fork_children() -> None:
    """Have a process that was forked fork its own, whatever start method it asks for, where there is no GPU."""
    if _start_method() == "forkserver":
        # as is documented, the same server forks them; Python 3.11 would begin another one
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        context = forked_context()
        multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]


def print_to(out: Connection, err: Connection) -> None:
    """Print to two pipes from now on."""
    for number, stream in ((1, out), (2, err)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)  # that from before may be a file's, in which one can seek
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _start_method() -> str:
    return "spawn" if torch.cuda.is_available() else "forkserver"


def _start(run: Callable[..., None], arguments: tuple[Any, ...], world: int, join: bool) -> Any:
    """Start processes.

    They are forked by a server that has imported the module of `run`, so that it is imported once. Where there is a
    GPU each process imports it: one that is forked may not use CUDA if the server has asked for GPUs.
    """
    multiprocessing.set_forkserver_preload([*PRELOADED, run.__module__, "tests.frozen"])
    return mp.start_processes(_run, (run, *arguments), world, join=join, start_method=_start_method())


def _run(rank: int, run: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()  # also what this process has imported
    run(rank, *arguments)


def start_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, start: Callable[[int, str], object]
) -> Callable[[int], Failures]:
    """Return what went wrong in a world of so many ranks. It starts once, also for several workers of pytest.

    Args:
        tmp_path_factory: pytest's.
        name: of the folder, and so of the tests.
        start: start(world, folder) runs the ranks of a world, whose cases end in `run_cases`.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of_world(world: int) -> Failures:
        folder = base / f"{name}-on-{world}"
        with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
            if not folder.exists():
                folder.mkdir()
                patch.setenv("OMP_NUM_THREADS", "1")
                start(world, str(folder))
        return _read_failures(folder, world)

    return of_world


def assert_passed(failures: Failures, name: str) -> None:
    """Fail with what went wrong in a case, on each rank."""
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if of_rank[name]]
    assert not failed, "\n".join(failed)


class Outcomes:
    """What became of functions that ran on a few ranks, all in one process group.

    Args:
        tmp_path_factory: pytest's.
        name: of the folder, and so of the tests.
        works: functions of the rank and the folder, which raise where something is wrong.
        ranks: their number.
        device: "cuda" gives each rank a GPU, and NCCL.
        imports: modules that the functions import, which ranks on the CPU share.
        further: those of the functions that are exhaustive tests; they run in a group of their own, if at all.
    """

    def __init__(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        name: str,
        works: Sequence[Work],
        ranks: int = 2,
        device: str = "cpu",
        imports: Sequence[str] = (),
        further: Collection[Work] = (),
    ):
        def start(is_further: bool, world: int, folder: str) -> None:
            arguments = world, device, tuple(work for work in works if (work in further) == is_further), folder
            if device == "cuda":
                start_ranks(_run_works, arguments, world)
            else:
                start_ranks(_fork_ranks, (_run_works, arguments, world, imports), 1)

        names = name, f"{name}-further"
        self._failures = [start_once(tmp_path_factory, n, partial(start, n != name)) for n in names]
        self._ranks, self._further = ranks, further

    def assert_passed(self, work: Work) -> None:
        """Fail with what the function raised on each rank."""
        assert_passed(self._failures[work in self._further](self._ranks), work.__name__)


def each_work(works: Sequence[Work], further: Collection[Work] = ()) -> pytest.MarkDecorator:
    """Test with each function, of which the further ones are exhaustive."""
    marks = [[pytest.mark.exhaustive] if work in further else [] for work in works]
    parameters = [pytest.param(work, marks=m, id=work.__name__) for work, m in zip(works, marks, strict=True)]
    return pytest.mark.parametrize("work", parameters)


def _fork_ranks(
    _: int, run: Callable[..., None], arguments: tuple[Any, ...], world: int, imports: Sequence[str]
) -> None:
    """Call run(rank, *arguments) in forks of this process, which has imported what they need, once for all."""
    for name in imports:
        import_module(name)
    gc.freeze()
    mp.start_processes(_run, (run, *arguments), world, start_method="fork")


def _run_works(rank: int, world: int, device: str, works: Sequence[Work], folder: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/meeting", timedelta(seconds=60), world, rank)

    def run(work: Work) -> None:
        try:
            work(rank, Path(folder))
        finally:
            dist.barrier()  # all begin the next one together

    run_cases({work.__name__: partial(run, work) for work in works}, folder, rank)
    dist.destroy_process_group()
