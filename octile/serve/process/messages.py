"""What a process sends to the process of an engine, what that sends back, and the error when one of them has ended.

A request that is to be added is a `Request`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from octile.serve.engine.request import Output
from octile.serve.engine.stats import Stats

SEND_SECONDS = 1.0  # for messages that wait when a sender is closed
CLOSE = None  # what ends the thread of a sender


# to the engine


class Cancel(NamedTuple):
    """End a request; it may have ended."""

    request_id: int


# from the engine


class Stepped(NamedTuple):
    """What a step has added to requests, and `ChangedStats` after it."""

    outputs: Sequence[Output]
    stats: Stats


class Failed(NamedTuple):
    """The engine ends because of an exception."""

    error: Exception


class Drain(NamedTuple):
    """Answer the requests in flight, and end; asked again, end now."""


class ProcessEndedError(RuntimeError):
    """A process has ended, or was killed because it hangs, with its requests."""

    exit_code = 1


class Sender:
    """Sends messages in a thread, so that those of the other process are read however many wait.

    If both processes sent while both pipes are full, neither would go on.

    Args:
        connection: to the other process.
        name: the name of the thread.
    """

    def __init__(self, connection: Connection, name: str):
        self._connection, self._waiting = connection, queue.SimpleQueue[object]()
        self._thread = threading.Thread(target=self._send_all, name=name, daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send a message after those before it, unless the other process has ended; called by any thread."""
        self._waiting.put(message)

    def close(self) -> None:
        """Send what waits, in a second at most, and nothing more."""
        self._waiting.put(CLOSE)
        self._thread.join(SEND_SECONDS)

    def _send_all(self) -> None:
        try:
            while (message := self._waiting.get()) is not CLOSE:
                self._connection.send(message)
        except OSError:
            pass  # the other process has ended
        except TypeError:
            if not self._connection.closed:  # it has no handle if it was closed in the middle of a message
                raise
