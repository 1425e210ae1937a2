"""What wakes a thread that waits for files, from any other thread."""

from __future__ import annotations

import socket
from contextlib import suppress


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
