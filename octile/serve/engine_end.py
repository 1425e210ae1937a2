"""The end of a pipe at which an engine is stepped; at the other end is `octile.serve.pipe_engine.PipeEngine`."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from octile.parallel.ranks import as_sent, explain
from octile.serve.async_engine import StepEngine
from octile.serve.commands import Commands
from octile.serve.messages import Add, Cancel, Failed, Stepped
from octile.serve.request import Output
from octile.serve.stats import ChangedStats


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
        self._requests: dict[int, int] = {}  # the engine's number of a request by that of the other process
        self._numbers: dict[int, int] = {}  # and the other way round
        self._sending, self._failing = threading.Lock(), threading.Lock()

    def run(self) -> None:
        """Step until the other process has ended, or `stop` is called."""
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        try:
            while self._commands.carry_out(lambda: self._numbers, lambda: self._send_step([])):
                self._send_step(self._engine.step())
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End requests with an error, unless one has done so before; called by any thread."""
        with self._failing:
            if self.failure is None:
                self.failure = explain(error)
                self.send(Failed(as_sent(self.failure)))

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
            own = self._engine.add(command.prompt, command.sampling).id
            self._requests[command.request_id], self._numbers[own] = own, command.request_id
        elif command.request_id in self._requests:  # it has not ended
            own = self._requests.pop(command.request_id)
            del self._numbers[own]
            self._engine.cancel(own)

    def _send_step(self, outputs: list[Output]) -> None:
        own = [output for output in outputs if output.request_id in self._numbers]
        self.send(Stepped([self._renumbered(output) for output in own], self._stats.next()))

    def _renumbered(self, output: Output) -> Output:
        """Return an output with the other process's number; a request that has ended is forgotten."""
        request_id = self._numbers[output.request_id]
        if output.finish_reason is not None:
            del self._numbers[output.request_id], self._requests[request_id]
        return output._replace(request_id=request_id)
