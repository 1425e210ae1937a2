"""A folder of files on a POSIX file system, or under a URL that fsspec knows: `s3://…`, `gs://…`, `memory://…`.

Files are read, listed and removed alike. On a POSIX file system a file is written under a temporary name, forced to
disk and renamed; in an object store it appears when its upload is complete.
"""

import builtins
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from octile.atomic_files import atomic_write
from octile.checkpoint.files import RECORD, check_record, compare_checksum
from octile.validation import parse_json

ANSWER_WITHIN = 12  # seconds that a server has to answer at first
# seconds and attempts of S3, after which its package names the endpoint
S3_PATIENCE: dict[str, Any] = {"connect_timeout": 4, "read_timeout": 4, "retries": {"total_max_attempts": 2}}
BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}  # have no folders: to make one would make a bucket


class Store:
    """A folder, which need not exist.

    Args:
        url: a path, or a URL of a file system that fsspec has or that is installed for it (s3fs, gcsfs, adlfs, …).

    Attributes:
        url: the folder, without a slash at its end.

    Raises:
        ValueError: fsspec knows no such protocol, or the URL has nothing after it.
        ImportError: the package for it is not installed.
        OSError: a server to which the file system connects at once cannot be reached.
    """

    def __init__(self, url: str | Path):
        self.url = str(url).rstrip("/") or "/"
        if "://" in str(url):
            if "://" not in self.url:
                raise ValueError(f"{url} has nothing after the protocol: name a bucket or a folder")
            with _named(self.url, "reached"):
                self._fs, self._root = url_to_fs(self.url)
        else:  # fsspec would expand ~ and split the path at ::
            self._fs, self._root = LocalFileSystem(), os.path.abspath(self.url)
        self.is_local = isinstance(self._fs, LocalFileSystem)
        protocols = self._fs.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._has_folders = BUCKETS.isdisjoint(self._protocols)

    @property
    def name(self) -> str:
        """The last part of the path or URL."""
        return self.url.rpartition("/")[2]

    def folder(self, name: str) -> "Store":
        """The folder of a name in this one."""
        return Store(f"{self.url}/{name}")

    def path_of(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        return f"{self.url}/{name}"

    def check_answers(self) -> None:
        """Refuse a server that does not answer, within seconds. Later accesses are tried again, for minutes.

        Raises:
            OSError: it does not answer.
        """
        if not isinstance(self._fs, AsyncFileSystem):
            return
        with _named(self.url, "reached"):
            server = self._fs
            if "s3" in self._protocols:
                server, _ = url_to_fs(self.url, config_kwargs=S3_PATIENCE)
                server.retries = 1
                server.connect()  # reads the package's files, which is not the server's time
            try:
                sync(server.loop, server._info, self._root, timeout=ANSWER_WITHIN)
            except FSTimeoutError:
                raise TimeoutError(f"no answer within {ANSWER_WITHIN} s") from None
            except OSError as error:
                if not _is_builtin(error):  # such as a timeout of S3's package
                    raise
                # else an answer, or what the next access raises at once

    def names(self) -> list[str]:
        """The names of the files and folders here, sorted; none if the folder does not exist.

        Raises:
            FileNotFoundError: the bucket does not exist.
            OSError: the store cannot be reached or read.
        """
        self._fs.invalidate_cache()
        try:
            with _named(self.url):
                found = self._fs.ls(self._root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            self.check_bucket()
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    def check_bucket(self) -> None:
        """Refuse a bucket that does not exist, once a file or folder was not found there.

        Raises:
            FileNotFoundError: it does not exist.
        """
        bucket = self._root.partition("/")[0]
        try:
            if not self._has_folders:
                self._fs.info(bucket)
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.url} cannot be read: the bucket {bucket!r} does not exist") from None
        except Exception:  # the user may read files, and not ask for the bucket
            pass

    def open(self, name: str) -> BinaryIO:
        """Open a file to read its bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self.is_local:
            return Path(self._root, name).open("rb")
        file: BinaryIO = self._fs.open(f"{self._root}/{name}", "rb")
        return file

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Context manager that yields a new binary file, which is not seekable. It is there when the block ends.

        Raises:
            OSError: the disk is full, or the folder cannot be reached or written. The exception names the file.
        """
        if self.is_local:
            path = Path(self._root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                yield file
            return
        if self._has_folders:
            self._fs.makedirs(self._root, exist_ok=True)
        try:
            with self._fs.open(f"{self._root}/{name}", "wb") as file:
                yield file
        except BaseException as error:
            with suppress(OSError):
                self._fs.rm_file(f"{self._root}/{name}")
            if isinstance(error, OSError) and error.strerror is not None:
                error.filename = error.filename or self.path_of(name)
            elif isinstance(error, Exception) and _is_of_file_system(error):
                raise as_os_error(error, f"{self.path_of(name)} cannot be written") from error
            raise

    def write(self, name: str, content: bytes) -> None:
        """Write a file, which replaces one of that name.

        Raises:
            OSError: as for `writing`.
        """
        with self.writing(name) as file:
            file.write(content)

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the store cannot be reached or read.
        """
        with _named(self.path_of(name)):
            if self.is_local:
                return Path(self._root, name).read_bytes()
            content: bytes = self._fs.cat_file(f"{self._root}/{name}")  # `open` calls a file of a dead host missing
            return content

    def size(self, name: str) -> int:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        try:
            size: int = self._fs.size(f"{self._root}/{name}")
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path_of(name)} is missing") from None
        return size

    def read_ranges(self, name: str, begins: Sequence[int], nbytes: int) -> list[bytes]:
        """Read `nbytes` bytes at each of several positions of a file, at the same time where the file system can.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the store cannot be reached or read.
            ValueError: it ends before.
        """
        path = f"{self._root}/{name}"
        ends = [begin + nbytes for begin in begins]
        with _named(self.path_of(name)):
            found: list[bytes] = self._fs.cat_ranges([path] * len(begins), list(begins), ends, on_error="raise")
        for begin, content in zip(begins, found, strict=True):
            if len(content) != nbytes:
                raise ValueError(
                    f"{self.path_of(name)} is damaged: {len(content)} bytes found at byte {begin}, {nbytes} expected"
                )
        return found

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged.
        """
        return parse_json(self.read(name), self.path_of(name))

    def read_record(self) -> dict[str, Any]:
        """Read octile.json, whose entry "files" has the checksums of the folder's other files.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged.
        """
        record = self.read_json(RECORD)
        check_record(record, self.path_of(RECORD))
        return record

    def verify(self, name: str, expected: Mapping[str, Any]) -> None:
        """Compare a file with its checksum.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: its size or its contents differ.
        """
        compare_checksum(self.path_of(name), self.size(name), lambda: self._sha256(name), expected)

    def _sha256(self, name: str) -> str:
        with _named(self.path_of(name)), self.open(name) as file:
            digest = hashlib.sha256()
            while block := file.read(2**22):
                digest.update(block)
        return digest.hexdigest()

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def remove(self) -> None:
        """Remove the folder. Its octile.json is removed first, so that what is left is never taken for whole."""
        self.remove_file(RECORD)
        with suppress(FileNotFoundError):
            self._fs.rm(self._root, recursive=True)


@contextmanager
def _named(url: str, done: str = "read") -> Iterator[None]:
    """Turn exceptions of a file system that name no file into an OSError that names the URL, which cannot be `done`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or getattr(error, "filename", None) is not None:
            raise
        if not _is_of_file_system(error):
            raise
        raise as_os_error(error, f"{url} cannot be {done}") from error


def _is_of_file_system(error: Exception) -> bool:
    """Whether a package behind fsspec may have raised an exception: an OSError, or one of its own kinds."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] not in ("builtins", "octile")


def _is_builtin(error: Exception) -> bool:
    return type(error) in vars(builtins).values()


def as_os_error(error: Exception, what: str) -> OSError:
    """Return an exception of a file system as one of Python's own kinds of OSError, with `what` in its message."""
    text = str(error)
    reason = getattr(error, "strerror", None) if text.startswith("[Errno") else text
    reason = reason or type(error).__name__
    kind = type(error) if isinstance(error, OSError) and _is_builtin(error) else OSError
    return kind(f"{what}: {reason}")
