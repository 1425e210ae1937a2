"""One process at a time writes a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if it is not there, until the end or until the process dies.

    Nothing but the lock in it at the end means that nothing came of the work: then it is removed.

    Raises:
        FileExistsError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FileExistsError(f"out {str(folder)!r} is in use by another octile process") from None
    try:
        yield
    finally:
        lock.release()
        if {path.name for path in folder.iterdir()} <= {LOCK}:
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
