"""The HTTP server in a process of its own: the engine's steps and the event loop share no interpreter lock."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from octile.serve.http import worker
from octile.serve.http.worker import Listening, Start
from octile.serve.process.messages import Drain, Failed, ProcessEndedError
from octile.serve.process.server import STOP_SECONDS, EngineServer, StepEngine
from octile.serve.process.signals import start_without_signals
from octile.serve.process.updates import WeightsUpdates

SIGNALS = signal.SIGINT, signal.SIGTERM


class HttpProcess:
    """The process of the HTTP server, which imports its packages while the engine is loaded.

    Args:
        bound: the socket.

    Attributes:
        pid: number of the process.
        engine_failure: the exception that has ended the engine, None while it works.
    """

    def __init__(self, bound: socket.socket):
        self.engine_failure: Exception | None = None
        self._server: EngineServer | None = None
        self._error: Exception | None = None  # of `fail`
        self._failing = threading.Lock()
        context = multiprocessing.get_context("spawn")  # a forked one would have this one's threads and GPU
        self._connection, other = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=worker.answer, args=(other, bound), name="HTTP process", daemon=True
        )
        # a signal that arrives when the process has started is raised here, before anyone could close it
        self._at_exit = Finalize(None, self._close, exitpriority=10)
        start_without_signals(self._process)  # `serve` has it drain
        other.close()
        assert self._process.pid is not None  # it has started
        self.pid = self._process.pid

    def listen(self, start: Start) -> None:
        """Have the process listen at its address.

        Args:
            start: what is served.

        Raises:
            ValueError: another server listens there, or the files for TLS have changed.
            ProcessEndedError: the process has ended.
        """
        with suppress(OSError):  # it has ended
            self._connection.send(start)
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Listening)

    def serve(self, engine: StepEngine, announcement: str, updates: WeightsUpdates | None = None) -> list[int]:
        """Step an engine for the requests of the process, until Ctrl-C or SIGTERM, and return these signals.

        Args:
            engine: from now on, only this object may use it.
            announcement: is printed as soon as a signal has the server drain.
            updates: updates of the engine's weights; None: `Start` has no key for them.

        Raises:
            Exception: what has ended the engine.
            ProcessEndedError: the process has ended without being asked to.
        """
        server = EngineServer(engine, self._connection, updates)
        with self._failing:
            self._server, error = server, self._error
        if error is not None:
            server.fail(error)
        stepping = threading.Thread(target=server.run, name="engine", daemon=True)
        received: list[int] = []
        with _signals() as woken:
            print(announcement, flush=True)
            stepping.start()
            while self._process.sentinel not in wait([self._process.sentinel, woken]):
                for number in woken.recv(64):
                    if number in SIGNALS:
                        received.append(number)
                        server.send(Drain())
        self._process.join()
        server.stop()
        server.wait(STOP_SECONDS)
        if server.failure is not None:
            self.engine_failure = server.failure
            raise server.failure
        if self._process.exitcode or not received:
            raise self._ended()
        return received

    def fail(self, error: Exception) -> None:
        """Have `serve` raise an error, also while the engine hangs in a step; called by any thread, also before it."""
        with self._failing:
            self._error, server = self._error or error, self._server
        if server is not None:
            server.fail(error)

    def close(self) -> None:
        """End the process, unless it has ended."""
        self._at_exit()

    def _ended(self) -> ProcessEndedError:
        self._process.join()
        return ProcessEndedError(f"the HTTP process has ended with exit status {self._process.exitcode}")

    def _close(self) -> None:
        self._connection.close()
        if self._process.pid is not None:  # it has started
            self._process.kill()
            self._process.join()


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Context manager in which the numbers of signals that come can be read from a socket, and nothing else happens."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    fd = signal.set_wakeup_fd(waker.fileno())  # before the handlers, which lose a signal that is not written there
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        woken.close()
        waker.close()
