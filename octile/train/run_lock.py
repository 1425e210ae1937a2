"""One process at a time writes a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octile.extras import require

LOCK = ".lock"
DATA = "data"


def is_left(folder: Path) -> bool:
    """Whether work in a folder came as far as its data and no further, and nobody goes on with it."""
    names = {path.name for path in folder.iterdir()}
    if DATA not in names or not names <= {LOCK, DATA}:  # an empty one is another's who just begins
        return False
    require("filelock", extra="train")
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / LOCK, timeout=0):
            return True
    except Timeout:
        return False


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if it is not there, until the end or until the process dies.

    Nothing but the lock and empty folders in it at the end mean that nothing came of the work: then it is removed.

    Raises:
        FileExistsError: another process holds it.
        NotADirectoryError, PermissionError, FileNotFoundError: it cannot be made.
    """
    require("filelock", extra="train")
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (NotADirectoryError, PermissionError, FileNotFoundError) as error:
        raise type(error)(f"out {str(folder)!r} cannot be made: {error.strerror}") from None
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FileExistsError(f"out {str(folder)!r} is in use by another octile process") from None
    try:
        yield
    finally:
        lock.release()
        left = [path for path in folder.iterdir() if path.name != LOCK]
        if all(path.is_dir() and not any(path.iterdir()) for path in left):
            for path in left:
                path.rmdir()
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
