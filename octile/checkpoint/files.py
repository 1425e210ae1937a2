"""Files that are whole or absent: written beside, forced to disk, then renamed; and checksums that tell damage.

A rename is the one step that a file system does at once, so nothing is ever written under its final name. One file
is simple (`atomic_write`). Several files that belong together are first written into a folder inside their destination,
and the last of them, octile.json with the checksums, decides: a crash before it leaves the old files, and after it
`finish_interrupted` carries out the renames that are still missing (`staged`).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

RECORD = "octile.json"
STAGING = ".octile-partial"
WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

Checksums = dict[str, dict[str, Any]]  # file name → {"bytes": int, "sha256": str}


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that takes path's place when the block ends; if the block fails, path is as it was.

    Raises:
        OSError: the disk is full or the folder not writable; names path.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write does not know its file
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes text as UTF-8, beside and renamed."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes value as indented JSON, beside and renamed."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> dict[str, Any]:
    """The size in bytes and the SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_record(folder: Path, names: Iterable[str], facts: Mapping[str, Any] | None = None) -> None:
    """Writes octile.json: the checksums of the named files of the folder, and other facts to keep."""
    write_json(folder / RECORD, {**(facts or {}), "files": {name: checksum(folder / name) for name in names}})


def read_record(folder: Path) -> Checksums:
    """The checksums that octile.json keeps; none where there is no octile.json.

    Raises:
        ValueError: octile.json is damaged.
    """
    if not (folder / RECORD).exists():
        return {}
    files = read_json(folder / RECORD).get("files")
    if not isinstance(files, dict) or not all(_is_checksum(entry) for entry in files.values()):
        raise ValueError(f"{folder / RECORD} is damaged: it must map each file to its checksum under 'files'")
    return files


def _is_checksum(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def verify(path: Path, expected: Mapping[str, Any]) -> None:
    """Compares a file with its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its size or its contents differ.
    """
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(f"{path} is damaged: {size} bytes found, {expected['bytes']} expected")
    found = checksum(path)["sha256"]
    if found != expected["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is {found[:12]}…, {expected['sha256'][:12]}… expected")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder whose files replace those of `folder` when the block ends; if it fails, `folder` is as it was.

    Weight files of the checkpoint that stood there before are removed; files of other names stay untouched.
    """
    finish_interrupted(folder)
    staging = folder / STAGING
    created = not folder.exists()
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        write_record(staging, sorted(p.name for p in staging.iterdir() if WEIGHT_FILE.fullmatch(p.name)))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if created:
            with suppress(OSError):
                folder.rmdir()
        raise
    finish_interrupted(folder)


def finish_interrupted(folder: Path) -> None:
    """Completes a replacement that was stopped between its decision and its last rename; otherwise does nothing."""
    staging = folder / STAGING
    if not (staging / RECORD).exists():
        return
    new = read_record(staging)
    for path in staging.iterdir():
        if path.name != RECORD:
            os.replace(path, folder / path.name)
    for path in folder.iterdir():
        if WEIGHT_FILE.fullmatch(path.name) and path.name not in new:
            path.unlink()
    os.replace(staging / RECORD, folder / RECORD)
    staging.rmdir()
    sync_folder(folder)
