"""Atomic writing of several files that belong together, and checksums that reveal damage.

`staged` writes them in a folder inside their destination, which has one of these states:

    .octile-partial/new                  new files, being written; the destination has the old ones
    .octile-complete-ID/new and old      all new files are written; what they replace is moved to `old`
    .octile-complete-ID/new, replaced    the new files are moved to the destination; then this folder is removed

The rename to .octile-complete-ID is the commit: a crash before it leaves the old files, and after it whoever opens the
destination next carries out the moves that are missing (`finish_interrupted`), one process at a time: it locks the
folder.

Where the file system has no locks, several may do so at once, and each move succeeds in one of them. A process that
falls behind disturbs neither the new files nor a later replacement: what it would still move away goes to `old`, which
has another name by then, and a later replacement has another ID. Without locks a folder of a checkpoint, such as one of
templates, is less safe than a file: a rename that has found `old` before it got that name can move the new folder away.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from octile.atomic_files import sync_folder, write_json
from octile.gpu_failure import is_gpu_failure
from octile.validation import read_json

RECORD = "octile.json"
STAGING, COMPLETE = ".octile-partial", ".octile-complete-"
NEW, OLD, REPLACED = "new", "old", "replaced"  # folders in them
CONFIG = "config.json"  # of a model, in Hugging Face's layout
GENERATION_CONFIG = "generation_config.json"  # how texts of a model are sampled and end
DEVICES = Path("/dev")  # also has links such as stdout, which may lead to a file
WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
RECORDED = frozenset({"config.json", "tokenizer.json"})  # a chat template may be added to tokenizer_config.json
READ_BACK = frozenset({  # files that are written once and read again, which a result must not replace
    "comparison.json", "config.json", GENERATION_CONFIG, "index.json", "manifest.json",
    "model.safetensors.index.json", "octile.json", "state.json", "summary.json", "tokenizer.json",
    "tokenizer_config.json",
})  # fmt: skip

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # of a disk that is full, or fails
LOCK_SECONDS = 10.0  # for which a process waits for another one's moves, which take milliseconds unless it is stopped
TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})  # by a file or folder of that name

Checksums = dict[str, dict[str, Any]]  # file name → {"bytes": int, "sha256": str}


@contextmanager
def explaining_failures(how_to_continue: Callable[[], str]) -> Iterator[None]:
    """Context manager that adds a note to an error of `DISK_ERRORS` or of a failed GPU: how to continue after it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if is_gpu_failure(error) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
            error.add_note(how_to_continue())
        raise


def check_space(folder: Path, needed: int, instead: str) -> None:
    """Refuse to begin what writes more than the file system has room for.

    Args:
        folder: where it writes; exists.
        needed: the bytes that it is going to write.
        instead: what to do where no room can be made.

    Raises:
        OSError: fewer bytes are free; the message has the folder and both numbers. It has no `errno`, as an error of a
            disk that becomes full has: nothing is lost.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder} has too little room: {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free; "
            f"make room, or {instead}"
        )


def check_output_file(name: str, path: Path, *endings: str) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold. Its folder need not exist.

    Args:
        name: the argument that names the file.
        path: the file.
        endings: those that its name may have, such as ".html"; any if there is none. A slip of the pen then replaces
            no file of another kind.

    Raises:
        IsADirectoryError: it is a folder.
        NotADirectoryError: it is below a file.
        PermissionError: its folder, or the first above it that exists, is not writable.
        OSError: no file can be made there.
        ValueError: it has another ending; is a file of a run, a model or a checkpoint; or is a device or a pipe, which
            a renamed file would replace for all processes of the machine.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{name} {str(path)!r} is a folder: name a file")
    if path.absolute().parent == DEVICES or (path.exists() and not path.is_file()):
        raise ValueError(f"{name} {str(path)!r} is a device or a pipe: name a file")
    if endings and path.suffix not in endings:
        raise ValueError(f"{name} must end in {' or '.join(endings)}, not {str(path)!r}")
    if path.name in READ_BACK and path.is_file():
        raise ValueError(f"{name} {str(path)!r} is a file of a run, a model or a checkpoint, which is not replaced")
    folder = next(folder for folder in path.parents if folder.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{name} {str(path)!r} cannot be written: {str(folder)!r} is not a folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{name} {str(path)!r} cannot be written: no write permission for {str(folder)!r}")
    try:  # /proc and a full disk have permissions, and take no file
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise type(error)(f"{name} {str(path)!r} cannot be written: {error.strerror}") from None


def copy(source: Path, destination: Path) -> None:
    """Copy a file or a folder. What links lead to is copied, not the links. The destination must not be a folder."""
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, destination)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checksum(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a file, as octile.json has them."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_record(folder: Path, names: Iterable[str], facts: Mapping[str, Any] | None = None) -> None:
    """Write octile.json: the checksums of the named files of the folder, and further entries from `facts`."""
    write_json(folder / RECORD, {**(facts or {}), "files": {name: checksum(folder / name) for name in names}})


def read_record(folder: Path) -> Checksums:
    """Read the checksums in octile.json; an empty dictionary where there is no octile.json.

    Raises:
        ValueError: octile.json is damaged.
    """
    if not (folder / RECORD).exists():
        return {}
    record = read_json(folder / RECORD)
    check_record(record, str(folder / RECORD))
    files: Checksums = record["files"]
    return files


def check_record(record: Mapping[str, Any], path: str) -> None:
    """Check that the content of an octile.json, which the message calls `path`, has the checksums of files.

    Raises:
        ValueError: it has not.
    """
    files = record.get("files")
    if not isinstance(files, dict) or not all(_is_checksum(entry) for entry in files.values()):
        raise ValueError(f"{path} is damaged: it must map each file to its checksum under 'files'")


def _is_checksum(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def verify(path: Path, expected: Mapping[str, Any]) -> None:
    """Compare a file with its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its size or its contents differ.
    """
    compare_checksum(str(path), path.stat().st_size, lambda: checksum(path)["sha256"], expected)


def compare_checksum(path: str, size: int, sha256: Callable[[], str], expected: Mapping[str, Any]) -> None:
    """Compare a file, which messages call `path`, with its checksum: first its size, then its SHA-256.

    Raises:
        ValueError: its size or its contents differ.
    """
    if size != expected["bytes"]:
        raise ValueError(f"{path} is damaged: {size} bytes found, {expected['bytes']} expected")
    if (found := sha256()) != expected["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is {found[:12]}…, {expected['sha256'][:12]}… expected")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Context manager that yields an empty folder, whose files and folders replace those of `folder` when it ends.

    If the block fails, `folder` is unchanged. Weight files of an earlier checkpoint in `folder` are removed; files of
    other names stay untouched.

    Raises:
        NotADirectoryError: `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"folder must be a folder, but {str(folder)!r} is a file")
    finish_interrupted(folder)
    staging = folder / STAGING
    created = not folder.exists()
    shutil.rmtree(staging, ignore_errors=True)
    (staging / NEW).mkdir(parents=True)
    (staging / OLD).mkdir()
    try:
        yield staging / NEW
        names = sorted(path.name for path in (staging / NEW).iterdir())
        write_record(staging / NEW, (name for name in names if WEIGHT_FILE.fullmatch(name) or name in RECORDED))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if created:
            with suppress(OSError):
                folder.rmdir()
        raise
    os.replace(staging, folder / f"{COMPLETE}{secrets.token_hex(8)}")
    sync_folder(folder)
    finish_interrupted(folder)


def finish_interrupted(folder: Path) -> None:
    """Complete the moves of a `staged` replacement that is among them, or was interrupted there, if any.

    Raises:
        PermissionError: the folder is not writable.
    """
    for replacement in folder.glob(f"{COMPLETE}*"):
        try:
            with _locked(replacement):
                _finish(replacement, folder)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise PermissionError(
                f"{folder} holds a save that was interrupted, or has not ended yet, and only who may write there can "
                "complete it: load it once with write permission"
            ) from error
        shutil.rmtree(replacement, ignore_errors=True)  # another process may do so, too


@contextmanager
def _locked(replacement: Path) -> Iterator[None]:
    """Context manager in which no other process makes moves, unless one is stopped or the file system has no locks."""
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        descriptor = os.open(replacement, os.O_RDONLY)
    except FileNotFoundError:  # another process has finished it
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
            except OSError:  # no locks
                pass
            break
        yield
    finally:
        os.close(descriptor)


def _finish(replacement: Path, folder: Path) -> None:
    """Carry out the moves of a replacement that neither this process nor another one has made yet."""
    new, old = replacement / NEW, replacement / OLD
    if old.exists():
        names = set(_names(new))  # all, or `old` was renamed in the meantime, and nothing is moved
        for path in folder.iterdir():
            if path.name in names:
                is_in_the_way = path.is_dir() or (new / path.name).is_dir()  # only a file replaces a file
            else:
                is_in_the_way = WEIGHT_FILE.fullmatch(path.name) is not None
            if is_in_the_way:
                _move(path, old)
        with suppress(FileNotFoundError):
            os.replace(old, replacement / REPLACED)
    with suppress(FileNotFoundError):
        sync_folder(replacement)  # a power failure must not bring `old` back when new files are in place
    for name in sorted(_names(new), key=RECORD.__eq__):
        _move(new / name, folder)
    sync_folder(folder)


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none if another process has removed it."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _move(path: Path, folder: Path) -> None:
    """Move a file or folder into a folder, unless another process has moved it, or the folder."""
    try:
        os.replace(path, folder / path.name)
    except FileNotFoundError:
        pass
    except OSError as error:  # it found the folder before another process moved it, and the old file or folder in it
        if error.errno not in TAKEN or folder.exists():
            raise
