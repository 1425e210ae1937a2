"""An engine in another process, at the other end of a pipe, where `EngineEnd` steps it."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from octile.serve.engine.request import Output, Request, Sampling, check_prompt, make_request
from octile.serve.engine.stats import Stats
from octile.serve.process.commands import Waker
from octile.serve.process.messages import Add, Cancel, Drain, Failed, ProcessEndedError, Stepped

MAX_STEPS = 16  # whose outputs a step returns together, if they have come meanwhile


class PipeEngine:
    """An engine in another process; implements `octile.serve.process.async_engine.StepEngine`.

    Args:
        connection: to the process of the engine.
        vocab_size: of the model.
        max_position: positions of a request at most.
        stats: of the engine, before its first step.

    Attributes:
        idle_seconds: after which a step waits though nothing runs, so that it notices when the process has ended.
        on_drain: is called when that process asks this one to end.
        has_ended: whether that process has ended without giving a reason.
    """

    idle_seconds: float | None = 0.0

    def __init__(self, connection: Connection, vocab_size: int, max_position: int, stats: Stats):
        self.on_drain: Callable[[], object] = lambda: None
        self.has_ended = False
        self._connection, self._stats = connection, stats
        self._vocab_size, self._max_position = vocab_size, max_position
        self._n_requests = 0
        self._waker = Waker()
        self._messages, self._anything = select.poll(), select.poll()
        self._messages.register(connection, select.POLLIN)
        for file in (connection, self._waker):
            self._anything.register(file, select.POLLIN)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise ValueError if the model cannot continue a request; any thread may call it."""
        check_prompt(prompt, sampling, self._vocab_size, self._max_position)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Send a request, which `check` has accepted."""
        request = make_request(self._n_requests, prompt, sampling)
        self._n_requests += 1
        self._send(Add(request.id, request.prompt, request.sampling))
        return request

    def cancel(self, request_id: int) -> bool:
        """End a request before the engine's next step."""
        self._send(Cancel(request_id))
        return True

    def step(self) -> list[Output]:
        """Wait for steps of the engine, or for `wake`, and return what is new about the requests.

        Raises:
            Exception: what has ended the engine.
            ProcessEndedError: its process has ended.
        """
        outputs: list[Output] = []
        ready = [file for file, _ in self._anything.poll()]
        if self._waker.fileno() in ready:
            self._waker.clear()
        for _ in range(MAX_STEPS):
            if not self._messages.poll(0):
                break
            self._take(self._receive(), outputs)
        return outputs

    def wake(self) -> None:
        """Have a step that waits return; called by any thread."""
        self._waker.wake()

    def stats(self) -> Stats:
        """Return the engine's counts after the last step that was received."""
        return self._stats

    def close(self) -> None:
        """Close the pipe, which has the other process end the engine."""
        self._connection.close()
        self._waker.close()

    def _take(self, message: object, outputs: list[Output]) -> None:
        if isinstance(message, Stepped):
            self._stats = message.stats.after(self._stats)
            outputs += message.outputs
        elif isinstance(message, Failed):
            raise message.error
        elif isinstance(message, Drain):
            self.on_drain()
        else:
            raise TypeError(f"the process of the engine has sent {message!r}")

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.has_ended = True
            raise ProcessEndedError("the process of the engine has ended") from None

    def _send(self, command: Add | Cancel) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next step says that it has ended
            self._connection.send(command)
