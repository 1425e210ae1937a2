"""Compilation of planned kernels by threads, before they are launched.

NVRTC and most of Triton's compiler run without Python's interpreter lock, so that kernels compile on several cores
while the main thread prepares data. A launch waits for a kernel of NVRTC that is being compiled, and compiles one that
no thread has begun (`specialize.load`). Nothing depends on the threads: what was not planned, or fails, is compiled
when it is launched.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

import torch

from octile.kernels.cpu import count_cores
from octile.kernels.planning import PlannedKernel

log = logging.getLogger("octile")
MAX_THREADS = 16
PLAN_SECONDS = 10  # after which a plan is not waited for
EXIT_SECONDS = 5  # the same for the plan, or a kernel that is being compiled, when the process exits


class KernelsAhead:
    """Threads that compile kernels.

    Args:
        plan: returns the kernels; runs in a thread.
        device: the GPU.
        n_threads: how many kernels compile at the same time; half the cores if not given.

    Attributes:
        total, done: the number of kernels; 0 until they are planned.
    """

    def __init__(self, plan: Callable[[], Iterable[PlannedKernel]], device: torch.device, n_threads: int | None = None):
        self.total = self.done = 0
        self._plan, self._device = plan, device
        self._pool = _Pool(n_threads or max(min(count_cores() // 2, MAX_THREADS), 1))
        self._report: Callable[[int, int], None] = lambda done, total: None
        self._counting, self._is_closed = threading.Lock(), False
        self._planner = threading.Thread(target=self._run, name="plan kernels", daemon=True)
        self._planner.start()
        atexit.register(self._end)

    def wait_for_plan(self) -> None:
        """Wait until the kernels are planned, some tenths of a second after the start."""
        self._planner.join(PLAN_SECONDS)

    def report_to(self, report: Callable[[int, int], None]) -> None:
        """Call report(done, total) now and after each kernel, in the thread that compiled it."""
        with self._counting:
            self._report = report
            report(self.done, self.total)

    def close(self) -> None:
        """Begin no further kernel, and report none."""
        self._is_closed = True
        self._pool.clear()
        with self._counting:
            self._report = lambda done, total: None

    def _end(self) -> None:
        """Wait for what runs in a thread when the process exits, mostly for less than a second.

        A process may crash if it exits while torch or a compiler runs in another thread.
        """
        self.close()
        self._planner.join(EXIT_SECONDS)
        self._pool.join(EXIT_SECONDS)

    def _run(self) -> None:
        try:
            kernels = list(self._plan())
            self.total = len(kernels)
            for kernel in kernels:
                kernel.compile_ahead(self._pool, self._device).add_done_callback(self._count)
            if self._is_closed:
                self._pool.clear()
            self._pool.start()
        except Exception:  # the step compiles its kernels without a plan, too, and raises its own errors
            log.debug("kernels are not compiled ahead", exc_info=True)

    def _count(self, _: Future[Any]) -> None:
        with self._counting:
            self.done += 1
            self._report(self.done, self.total)


class _Pool(Executor):
    """An executor whose threads do not keep the process from exiting; they begin at `start` with what was submitted."""

    def __init__(self, n_threads: int) -> None:
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"compile kernels {i}", daemon=True) for i in range(n_threads)
        ]

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Append a task, as `Executor.submit` does."""
        future: Future[Any] = Future()
        self._tasks.append((future, lambda: function(*args, **kwargs)))
        return future

    def start(self) -> None:
        """Start the threads, which end after the last task."""
        for thread in self._threads:
            thread.start()

    def clear(self) -> None:
        """Cancel the tasks that have not begun."""
        with suppress(IndexError):
            while True:
                self._tasks.popleft()[0].cancel()

    def join(self, seconds: float) -> None:
        """Wait for tasks that have begun, for so many seconds."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(end - time.monotonic(), 0))

    def _work(self) -> None:
        while True:
            try:
                future, task = self._tasks.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except Exception as error:
                    future.set_exception(error)
