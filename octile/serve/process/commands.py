"""Commands of other threads for the thread that steps an engine, and what wakes a thread that waits for files."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Commands:
    """Commands that one thread carries out between two steps of an engine.

    Args:
        idle_seconds: of the engine, after which it must be stepped though nothing runs; None: it need not.
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


class Waker:
    """A file that is ready to be read since `wake` was called, until `clear`."""

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the file ready; called by any thread."""
        with suppress(BlockingIOError):  # it is ready
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the file not ready, which it must be."""
        self._reader.recv(4096)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
        self._reader.close()
