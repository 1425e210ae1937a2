"""What was compiled, on disk: one file each, named by what went into it, written beside its place and renamed.

A file holds a checksum and what was built. Nothing needs to survive a power failure: a file that does not match its
checksum is built again.

Sixty-four ranks of a job start at once and want the same kernels. Whoever misses one locks its file, which is empty
until then, looks again, and compiles; the others wait for that lock and find the kernel. The machine code runs with the
user's rights, so a folder that someone else could write to is refused.
"""

import fcntl
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

log = logging.getLogger("octile")
_warned = False


def folder() -> Path:
    """$OCTILE_CACHE_DIR, else $XDG_CACHE_HOME/octile, else ~/.cache/octile."""
    if chosen := os.environ.get("OCTILE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octile"


def fetch(name: str, identity: Sequence[str], build: Callable[[], bytes]) -> bytes:
    """What was built of that identity: from the disk, or built now and stored.

    Where nothing can be stored (a full disk, a folder that is read-only) it is built all the same, and the logger
    `octile` says so, once.

    Args:
        name: of the kernel: its file starts with it.
        identity: everything that decides the result: source, options, compiler, architecture.
        build: compiles it to bytes that need nothing but themselves.

    Raises:
        PermissionError: the folder belongs to another user, or others may write to it.
        Exception: what `build` raises; nothing is stored then.
    """
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    try:
        path = folder() / f"{name}-{key[:32]}.compiled"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _cannot_store(error)
        return build()
    _check_private(path.parent)
    if (stored := _read(path)) is not None:
        return stored

    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(path))
        except OSError as error:
            _cannot_store(error)
            return build()
        if (stored := _read(path)) is not None:  # another process has built it meanwhile
            return stored
        if path.exists() and path.stat().st_size:  # not there: someone has emptied the folder meanwhile
            log.warning("the stored kernel %s is damaged: it is built again", path)
        built = build()
        try:
            _write(path, built)
        except OSError as error:
            _cannot_store(error)
        return built


def _check_private(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"the kernel cache {path} must belong to the user {os.geteuid()} who runs this, not to {found.st_uid}: "
            "set OCTILE_CACHE_DIR to another folder"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"others may write to the kernel cache {path} (mode {stat.filemode(found.st_mode)}): "
            f"chmod 700 {path}, or set OCTILE_CACHE_DIR to another folder"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is created empty. The rename that fills it leaves the waiters an older file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if the process has forked meanwhile
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes | None:
    """What is stored; None where nothing is, or nothing whole."""
    try:
        checksum, _, built = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return built if checksum == _checksum(built) else None


def _write(path: Path, built: bytes) -> None:
    partial = path.with_suffix(".partial")  # only who holds the lock writes it
    try:
        partial.write_bytes(_checksum(built) + b"\n" + built)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _checksum(built: bytes) -> bytes:
    return hashlib.sha256(built).hexdigest().encode()


def _cannot_store(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning("compiled kernels cannot be stored, so each process compiles its own: %s", error)
