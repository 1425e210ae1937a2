"""Disk cache: compiled kernels, a file per kernel, named by a hash of its source, options and compiler.

A file holds a checksum and the compiled kernel; it is written under another name and renamed. A file that does not
match its checksum, for example after a power failure, is built again.

The 64 ranks of a job start at once and want the same kernels. A process that does not find one acquires the lock of its
file, looks again, and compiles; the others wait for the lock and then find the kernel. The machine code runs with the
user's rights, so a folder that someone else could write to is refused.

`find_or_build` does the same for what others cache in this folder, such as token stores.
"""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from octile.extras import require

T = TypeVar("T")

log = logging.getLogger("octile")
_warned = False


def folder() -> Path:
    """Return the folder: $OCTILE_CACHE_DIR, else $XDG_CACHE_HOME/octile, else ~/.cache/octile."""
    if chosen := os.environ.get("OCTILE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octile"


def fetch(name: str, identity: Sequence[str], build: Callable[[], bytes]) -> bytes:
    """Return a compiled kernel from the disk, or build and store it.

    If it cannot be stored (a full disk, a read-only folder), the logger `octile` warns once.

    Args:
        name: name of the kernel; its file starts with it.
        identity: everything that decides on the result: source, options, compiler, architecture.
        build: compiles the kernel to bytes that need nothing else.

    Raises:
        PermissionError: the folder belongs to another user, or others may write to it.
        ImportError: filelock is not installed.
        Exception: what `build` raises; nothing is stored then.
    """
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    try:
        path = folder() / f"{name}-{key[:32]}.compiled"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _cannot_store(error)
        return build()
    check_private(path.parent)
    return find_or_build(
        path, "kernel", lambda: _read(path), build, lambda built: _write(path, built), _cannot_store, extra="cuda"
    )


def find_or_build(
    path: Path,
    what: str,
    read: Callable[[], T | None],
    build: Callable[[], T],
    write: Callable[[T], None],
    cannot_store: Callable[[Exception], None],
    wait: Callable[[], None] = lambda: None,
    *,
    extra: str,
) -> T:
    """Return an entry of the cache, or build and store it. Of several processes that want one at once, one builds it.

    Args:
        path: path of the entry; its folder exists.
        what: the name of an entry, for the warning that this one is damaged.
        read: returns the entry; None if there is none, or it is damaged.
        build: makes it.
        write: stores it, under another name first. Only one process at a time calls it.
        cannot_store: called with an OSError of the lock or of `write`, after which the entry is not stored.
        wait: called before waiting for another process that builds the entry.
        extra: the extra of octile that installs filelock.

    Raises:
        ImportError: filelock is not installed.
        Exception: what `build` raises; nothing is stored then.
    """
    if (found := read()) is not None:
        return found
    require("filelock", extra=extra)
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        try:
            lock = FileLock(path.with_suffix(".lock"), mode=0o600)
            try:
                stack.enter_context(lock.acquire(timeout=0))
            except Timeout:
                wait()
                stack.enter_context(lock)
        except OSError as error:
            cannot_store(error)
            return build()
        if (found := read()) is not None:  # another process has built it meanwhile
            return found
        if path.exists():
            log.warning("the cached %s %s is damaged: it is built again", what, path)
        built = build()
        try:
            write(built)
        except OSError as error:
            cannot_store(error)
        return built


def check_private(path: Path) -> None:
    """Refuse a folder of the cache that someone else could write to.

    Raises:
        PermissionError: it belongs to another user, or others may write to it.
    """
    if not hasattr(os, "geteuid"):  # Windows, where a user's folders are private by their access control list
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"octile's cache {path} must belong to the user {os.geteuid()} who runs this, not to {found.st_uid}: "
            "set OCTILE_CACHE_DIR to another folder"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"others may write to octile's cache {path} (mode {stat.filemode(found.st_mode)}): "
            f"chmod 700 {path}, or set OCTILE_CACHE_DIR to another folder"
        )


def _read(path: Path) -> bytes | None:
    """Return the content of a file; None where there is no file, or it does not match its checksum."""
    try:
        checksum, _, built = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return built if checksum == _checksum(built) else None


def _write(path: Path, built: bytes) -> None:
    write_locked(path, _checksum(built) + b"\n" + built)


def write_locked(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it. Only the holder of its lock may call this.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
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
