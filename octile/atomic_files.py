"""Atomic writing of files: a file is written under a temporary name in the same folder, and renamed.

A rename is atomic, so a crash leaves the old file or the new one, and no part of either. Each of several writers of one
file has a temporary name of its own, NAME.….partial, and the last one to rename it decides what the file holds.
"""

import glob
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Context manager that yields a new binary file, which replaces `path` when the block ends without an error.

    Raises:
        OSError: the disk is full or the folder is not writable. The exception names `path`.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(path)  # a failed write does not name its file
        raise
    sync_folder(path.parent)


def remove_partial(path: Path) -> None:
    """Remove what killed writers of a file have left under temporary names. No process may be writing the file."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        partial.unlink()


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_folder(folder: Path) -> None:
    """Force the renames in a folder to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
