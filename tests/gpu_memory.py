"""The memory of a GPU, shared by the processes of a test session: a test that needs much of it waits until it is free.

What a test needs is written to a file while it runs. Another one begins when the GPU has as much free memory as it
needs and as all those need that have begun: they may not have allocated it yet.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock

POLL = 0.2  # seconds


class SharedMemory:
    """What the tests of a session need.

    Args:
        file: where the processes of the session write it, each under its number.
        free_bytes: returns the free memory of the GPU.
    """

    def __init__(self, file: Path, free_bytes: Callable[[], int]):
        self._file, self._free_bytes = file, free_bytes
        self._lock = FileLock(file.with_suffix(".lock"))

    @contextmanager
    def holding(self, needed: int, seconds: float) -> Iterator[bool]:
        """Wait until so many bytes are free; yield whether they are.

        Args:
            needed: bytes.
            seconds: for how long it waits at most. Then the context begins all the same.
        """
        deadline = time.monotonic() + seconds
        while not (is_free := self._take(needed, force=False)) and time.monotonic() < deadline:
            time.sleep(POLL)
        if not is_free:
            self._take(needed, force=True)
        try:
            yield is_free
        finally:
            with self._lock:
                self._write({number: size for number, size in self._read().items() if number != os.getpid()})

    def _take(self, needed: int, force: bool) -> bool:
        with self._lock:
            others = {number: size for number, size in self._read().items() if psutil.pid_exists(number)}
            if not force and needed + sum(others.values()) > self._free_bytes():
                return False
            self._write({**others, os.getpid(): needed})
            return True

    def _read(self) -> dict[int, int]:
        if not self._file.exists():
            return {}
        return {int(number): size for number, size in json.loads(self._file.read_text()).items()}

    def _write(self, sizes: dict[int, int]) -> None:
        self._file.write_text(json.dumps(sizes))
