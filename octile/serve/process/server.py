"""The process that steps an engine for the process at the other end of a pipe, where `EngineClient` is.

One thread alone touches the engine: what others ask of it are commands that it carries out between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

from octile.parallel.messages import as_sent, sent_by_name
from octile.parallel.ranks import explain
from octile.serve.engine.request import Output, Request
from octile.serve.engine.stats import ChangedStats, Stats
from octile.serve.process.messages import Cancel, CancelUpdate, Failed, ProcessEndedError, Stepped, UpdateWeights
from octile.serve.process.updates import WeightsUpdates

STOP_SECONDS = 60.0  # for the step that runs; one that hangs does not keep the process

sent_by_name(ProcessEndedError)


class StepEngine(Protocol):
    """What `EngineServer` needs of an engine: one of this process, of all ranks, or of other processes.

    Attributes:
        idle_seconds: after which it must be stepped though nothing runs; None: it need not.
    """

    idle_seconds: float | None

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        ...

    def submit(self, request: Request) -> None:
        """Add a request.

        Raises:
            ValueError: a request that waits or runs has its id.
        """
        ...

    def cancel(self, request_id: int) -> bool:
        """End a request and free its pages; say whether it was there."""
        ...

    def step(self) -> list[Output]:
        """Run one forward pass."""
        ...

    def stats(self) -> Stats:
        """Count."""
        ...

    def wake(self) -> None:
        """Have a step that waits for others return soon; called by any thread."""
        ...

    def close(self) -> None:
        """End what still runs; nothing is called afterwards."""
        ...


class Commands:
    """Commands that one thread carries out between two steps of an engine.

    Args:
        idle_seconds: seconds after which the engine must be stepped though nothing runs; None: it need not.
        wake: has a step that waits for others return soon.
    """

    def __init__(self, idle_seconds: float | None, wake: Callable[[], None]):
        self._idle_seconds, self._wake_engine = idle_seconds, wake
        self._wake = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_stopping = False

    def add(self, command: Callable[[], object]) -> None:
        """Add a command; called by any thread."""
        with self._wake:
            self._waiting.append(command)
            self._wake.notify()
        self._wake_engine()

    def stop(self) -> None:
        """Have the thread end once it has carried out what was added before; called by any thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._wake_engine()

    def carry_out(self, is_running: Callable[[], object], rest: Callable[[], object]) -> bool:
        """Carry out commands until there is something to step.

        Args:
            is_running: whether a request runs; only commands and steps of this thread change it.
            rest: is called after commands that leave nothing to step.

        Returns:
            whether there is something to step; otherwise the thread is to end.
        """
        while True:
            with self._wake:
                has_waited = not self._wake.wait_for(
                    lambda: self._waiting or is_running() or self._is_stopping, self._idle_seconds
                )
                commands = [self._waiting.popleft() for _ in range(len(self._waiting))]
                is_stopping = self._is_stopping
            for command in commands:
                command()
            if is_stopping:
                return False
            if is_running() or has_waited:
                return True
            rest()


class EngineServer:
    """Steps an engine for the process at the other end of a pipe, until that closes it.

    Args:
        engine: from now on, only this object may use it.
        connection: to the other process.
        updates: updates of its weights; None: the other process asks for none.

    Attributes:
        failure: the exception that ended the engine, None while it works.
    """

    def __init__(self, engine: StepEngine, connection: Connection, updates: WeightsUpdates | None = None):
        self.failure: Exception | None = None
        self._engine, self._connection, self._updates = engine, connection, updates
        self._commands = Commands(engine.idle_seconds, engine.wake)
        self._stats = ChangedStats(engine.stats)
        self._sending, self._failing = threading.Lock(), threading.Lock()
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Step until the other process has ended, or `stop` is called."""
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        try:
            while self._commands.carry_out(self._has_work, lambda: self._send_step([])):
                self._step()
        except Exception as error:
            self.fail(error)
        self._has_ended.set()

    def _has_work(self) -> bool:
        return self._engine.has_work or (self._updates is not None and self._updates.is_due)

    def _step(self) -> None:
        if self._updates is not None and self._updates.is_due:
            outputs, updated = self._updates.write()
            self._send_step(outputs)
            self.send(updated)
        else:
            self._send_step(self._engine.step())

    def fail(self, error: Exception) -> None:
        """End requests with an error, unless one has done so before; called by any thread."""
        with self._failing:
            if self.failure is None:
                self.failure = explain(error)
                self.send(Failed(as_sent(self.failure)))
        self._has_ended.set()

    def wait(self, seconds: float) -> None:
        """Wait, for so long at most, until `run` has ended or `fail` was called."""
        self._has_ended.wait(seconds)

    def stop(self) -> None:
        """Have `run` return after its step; called by any thread."""
        self._commands.stop()

    def send(self, message: object) -> None:
        """Send a message to the other process, unless it has ended; called by any thread."""
        with self._sending, suppress(OSError):
            self._connection.send(message)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._commands.add(partial(self._carry_out, self._connection.recv()))
        self.stop()

    def _carry_out(self, command: list[Request] | Cancel | UpdateWeights | CancelUpdate) -> None:
        if isinstance(command, Cancel):
            self._engine.cancel(command.request_id)
        elif isinstance(command, UpdateWeights):
            assert self._updates is not None  # the other process knows that there are none
            self._updates.begin(command, self._commands.add, self.send)
        elif isinstance(command, CancelUpdate):
            assert self._updates is not None
            self._updates.cancel()
        else:
            for request in command:
                self._engine.submit(request)

    def _send_step(self, outputs: list[Output]) -> None:
        self.send(Stepped(outputs, self._stats.next()))
