"""A trainer in a process of its own, which runs steps when it is asked to.

The process stays alive between requests, so that kernels are compiled once and trainers can be measured interleaved.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from octile.bench.kernel_time import recorded_kernels
from octile.train.step.kernel_records import KernelRecord, idle_share

STOP_SECONDS = 5.0  # for a process to end; then it is killed


@dataclass(frozen=True)
class Steps:
    """A request: run this many training steps, and if `profiled`, record their kernels."""

    count: int
    profiled: bool = False


@dataclass(frozen=True)
class Measured:
    """The answer to a request.

    Attributes:
        seconds: from the first step until the GPU has ended the last one.
        peak_bytes: the largest number of bytes that torch has reserved on the GPU since the process began.
        idle: the share of the time between the first and the last kernel in which the GPU idles, if it was profiled.
        setting: what the trainer chose itself, in words.
    """

    seconds: float
    peak_bytes: int
    idle: float | None
    setting: str


class Stopped(Exception):
    """The measurement is over."""


class Requests:
    """The requests that reach a trainer.

    Args:
        connection: where further requests come from and answers go to.
        first: the first request.

    Attributes:
        setting: what the trainer chose itself, in words; part of every answer.
    """

    def __init__(self, connection: Connection, first: Steps):
        self.setting = ""
        self._steps = self._answer(connection, first)

    def before_step(self) -> None:
        """Wait until a step is requested. A trainer calls this before each of its steps.

        Raises:
            Stopped: no further step is needed.
        """
        next(self._steps)

    def _answer(self, connection: Connection, request: Steps) -> Iterator[None]:
        """Answer requests. Each item stands for a step that the caller runs before it takes the next item."""
        while True:
            _synchronize()
            recording: AbstractContextManager[list[KernelRecord]]
            recording = recorded_kernels() if request.profiled else nullcontext([])
            with recording as kernels:
                start = time.perf_counter()
                for _ in range(request.count):
                    yield
                _synchronize()
                seconds = time.perf_counter() - start
            idle = idle_share(kernels) if kernels else None
            peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
            connection.send((True, Measured(seconds, peak, idle, self.setting)))
            request = _receive(connection)


class Worker:
    """A process that runs a trainer.

    Args:
        run: run(requests, *arguments) trains until `Requests.before_step` raises. It is defined in a module, which the
            process imports at once, and it is called at the first request.
        arguments: can be pickled.
    """

    def __init__(self, run: Callable[..., None], *arguments: object):
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_run, args=(other, run, arguments))
        self._process.start()
        other.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def request(self, steps: Steps) -> None:
        """Ask for steps, without waiting for them."""
        with suppress(OSError):  # it has failed; `answer` says why
            self._connection.send(steps)

    def answer(self, seconds: float) -> Measured:
        """Wait for the answer to a request.

        Raises:
            TimeoutError: there is none within these seconds.
            RuntimeError: the trainer raised an exception, whose message this one has, or its process died.
        """
        if not self._connection.poll(max(seconds, 0.0)):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        try:
            worked, result = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(STOP_SECONDS)
            raise RuntimeError(f"its process died with exit code {self._process.exitcode}") from None
        if not worked:
            raise RuntimeError(result)
        return result

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_SECONDS)


def _receive(connection: Connection) -> Steps:
    try:
        return connection.recv()
    except EOFError:
        raise Stopped from None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _run(connection: Connection, run: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the table goes to stdout alone
    try:
        run(Requests(connection, _receive(connection)), *arguments)
    except Stopped:
        pass
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {' '.join(str(error).split())}"))
