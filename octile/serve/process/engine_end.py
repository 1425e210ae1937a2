"""The end of a pipe at which an engine is stepped; at the other end is `octile.serve.process.connection.PipeEngine`."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from octile.parallel.messages import as_sent, sent_by_name
from octile.parallel.ranks import explain
from octile.serve.engine.request import Output
from octile.serve.engine.stats import ChangedStats
from octile.serve.process.async_engine import StepEngine
from octile.serve.process.commands import Commands
from octile.serve.process.messages import Add, Cancel, Failed, ProcessEndedError, Stepped
from octile.serve.process.sent_requests import SentRequests

sent_by_name(ProcessEndedError)


class EngineEnd:
    """Steps an engine for the process at the other end of a pipe, until that closes it.

    Args:
        engine: from now on, only this object may use it.
        connection: of the pipe.

    Attributes:
        failure: the exception that ended the engine, None while it works.
    """

    def __init__(self, engine: StepEngine, connection: Connection):
        self.failure: Exception | None = None
        self._engine, self._connection = engine, connection
        self._commands = Commands(engine.idle_seconds, engine.wake)
        self._stats = ChangedStats(engine.stats)
        self._requests = SentRequests()
        self._sending, self._failing = threading.Lock(), threading.Lock()
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Step until the other process has ended, or `stop` is called."""
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        try:
            while self._commands.carry_out(lambda: self._requests, lambda: self._send_step([])):
                self._send_step(self._engine.step())
        except Exception as error:
            self.fail(error)
        self._has_ended.set()

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

    def _carry_out(self, command: Add | Cancel) -> None:
        if isinstance(command, Add):
            self._requests.add(command.request_id, self._engine.add(command.prompt, command.sampling))
        elif (request := self._requests.pop(command.request_id)) is not None:  # it has not ended
            self._engine.cancel(request.id)

    def _send_step(self, outputs: list[Output]) -> None:
        self.send(Stepped(self._requests.renumber(outputs), self._stats.next()))
