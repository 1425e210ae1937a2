"""Reads a corpus one document at a time, so that it may be larger than memory.

A source is named by one string:

    stdlib                                    the source text of the Python standard library that runs this program,
                                              without its tests and its tables of character encodings
    packages                                  source and documentation of the standard library and of every package
                                              installed in the environment, without what repeats (`text_filter`)
    arithmetic                                additions, most of them wrong, to begin `octile rl` with
                                              (`octile.train.data.arithmetic`)
    PATH                                      a text file, or a folder of them
    hf:OWNER/NAME[/CONFIG][:SPLIT][#COLUMN]   a dataset of the Hugging Face Hub, if the package `datasets` is installed

A file is a document; a file longer than 1 MiB is cut at line ends into passages, each of which is a document. Where
documents are few, `Corpus.in_spans` cuts them further, so that a small part of the text can be held out. Text is what
decodes as UTF-8 and contains no NUL; everything else is left out and named. What may have no end, such as a pipe, a
device or a file in /proc, is not opened.
"""

import errno
import hashlib
import io
import os
import re
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from octile.checkpoint.store import as_os_error
from octile.text import format_count
from octile.train.data import arithmetic
from octile.train.data.filter import MAX_BYTES, PROSE, SOURCE, DuplicateFilter, why_left_out
from octile.train.data.token_store import manifest_at

STANDARD_LIBRARY, PACKAGES, ARITHMETIC = "stdlib", "packages", "arithmetic"
PYTHON = (STANDARD_LIBRARY, PACKAGES)  # whose documents are source text
BUILT_IN = tuple(map(repr, (STANDARD_LIBRARY, PACKAGES, ARITHMETIC)))  # in messages
HUB = re.compile(
    r"hf:(?P<name>[^/:#]+(/[^/:#]+)?)(/(?P<config>[^/:#]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?"
)  # a split may be a slice, train[:1%], colon and all

HUB_WORD = re.compile(r"\w([\w.-]{0,94}\w)?", re.ASCII)  # an owner or a dataset, without -- and ..

TOKEN_STORE = ("manifest.json", "tokenizer.json")  # files of `octile.train.data.token_store`

MAX_WHOLE_FILE = 2**20  # bytes; a longer file is cut into passages
MIN_SPAN, MAX_SPAN = 2**6, 2**16  # characters

PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
EXCLUDED_FOLDERS = PACKAGE_FOLDERS | {"test", "tests", "idle_test", "encodings"}

SPECIAL = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
KERNEL_FOLDERS = ("/proc", "/sys")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its digest, the first 16 bytes of the SHA-256 of its UTF-8 bytes."""

    digest: bytes
    text: str


class NamedText(NamedTuple):
    """A text and its name: the file below the source, or the number of a row."""

    name: str
    text: str


class LeftOut(NamedTuple):
    """The name of a file, a folder or a text that is not read, and the reason."""

    reason: str
    name: str


@dataclass(frozen=True)
class Corpus:
    """A stream of texts that can be read repeatedly.

    Attributes:
        source: the string that named it.
        left_out: the files and folders that are not read.
        read: reads the source from its beginning, in an order that depends only on the names of the files.
    """

    source: str
    left_out: Sequence[LeftOut]
    read: Callable[[], Iterator[NamedText]]

    def texts(self) -> Iterator[str]:
        """All texts, without their names."""
        return (text for _, text in self.read())

    def documents(self, left_out: list[LeftOut] | None = None) -> Iterator[Document]:
        """Every distinct text once; empty texts and exact duplicates are left out and added to `left_out`."""
        left_out = [] if left_out is None else left_out
        seen: set[bytes] = set()
        for name, text in self.read():
            digest = hashlib.sha256(text.encode()).digest()[:16]
            if not text or text.isspace():
                left_out.append(LeftOut("empty", name))
            elif digest in seen:
                left_out.append(LeftOut("duplicate", name))
            else:
                seen.add(digest)
                yield Document(digest, text)

    def in_spans(self, length: int) -> "Corpus":
        """This corpus, with each longer text cut after the first line end from `length` characters on.

        A line that is longer than `length` is cut too. The spans together are the text.
        """

        def read() -> Iterator[NamedText]:
            for name, text in self.read():
                if len(text) <= length:
                    yield NamedText(name, text)
                    continue
                for number, span in enumerate(_cut(io.StringIO(text, newline=""), length), start=1):
                    yield NamedText(f"{name}, span {number}", span)

        return replace(self, read=read)


def check_source(source: str | Path, name: str = "data") -> None:
    """Refuse what cannot name a corpus, without reading a text; arguments as in `open_corpus`.

    Raises:
        FileNotFoundError: there is no such file or folder.
        PermissionError: it cannot be read.
        OSError: the server of a URL does not answer, or refuses to.
        ValueError: source is empty, a pipe, a socket, a device, in a folder of the kernel, or a run or its tokens. The
            name of a dataset is malformed. There are damaged tokens under a URL, or fsspec knows no such protocol.
        ImportError: a package for the protocol of a URL is not installed.
    """
    path, named = Path(source), f"{name} {str(source)!r}"
    if source in (STANDARD_LIBRARY, PACKAGES, ARITHMETIC):
        return
    if str(source).startswith("hf:"):
        _parse_hub_name(str(source), named)
        return
    if is_url(source):
        try:
            manifest_at(str(source))
        except (ValueError, ImportError) as error:
            raise type(error)(f"{named} cannot be read: {error}") from None
        except OSError as error:
            raise as_os_error(error, f"{named} cannot be read") from None
        return
    if not str(source).strip():  # Path("") is the current folder
        raise ValueError(f"{name} is empty: name a file, a folder, {', '.join(BUILT_IN)} or 'hf:OWNER/NAME'")
    try:
        exists = path.exists()
    except PermissionError as error:  # of a folder on the way
        raise PermissionError(f"{named} cannot be read: {error.strerror}") from None
    if not exists and path.is_symlink():
        raise FileNotFoundError(f"{named} is a link to {str(path.readlink())!r}, which does not exist")
    if not exists:
        others = ", ".join(f"nor {word}" for word in (*BUILT_IN, "'hf:OWNER/NAME'"))
        raise FileNotFoundError(f"{named} is no file or folder ({others})")
    status = path.stat()
    if kind := SPECIAL.get(stat.S_IFMT(status.st_mode)):
        raise ValueError(f"{named} is a {kind}: name a regular file or a folder")
    if status.st_dev in _kernel_devices():
        raise ValueError(
            f"{named} lies in a folder of the kernel ({' or '.join(KERNEL_FOLDERS)}), where reading a file may not "
            "end: name another file or folder"
        )
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{named} cannot be read: {os.strerror(errno.EACCES)}")
    if (store := find_token_store(path)) is not None:
        is_local = os.path.isfile(store / "train.npy")  # others are read from a URL, batch by batch
        where = f"file://{store.resolve()}" if is_local else f"the url in {store / 'manifest.json'}"
        raise ValueError(f"{named} holds the tokens of a run, no text: give them as {where}")


def find_token_store(path: Path) -> Path | None:
    """Return the token store of a path: the folder itself, or `data` of a run's folder; None if there is none."""
    stores = (path, path / "data")
    return next((store for store in stores if all(os.path.isfile(store / file) for file in TOKEN_STORE)), None)


def is_url(source: str | Path) -> bool:
    """Whether a source is the URL of a token store, which holds tokens already, and no corpus."""
    return "://" in str(source) and not str(source).startswith("hf:")


def is_path(source: str | Path) -> bool:
    """Whether a source is the path of a file or a folder, which may not exist."""
    return not (is_url(source) or str(source).startswith("hf:") or source in (*PYTHON, ARITHMETIC))


def open_corpus(source: str | Path, name: str = "data") -> Corpus:
    """Open the corpus that `source` names, as the module describes. Files are read once to find those that are text.

    Args:
        source: names the corpus.
        name: the argument that names it, for messages.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder has no files.
        ValueError: nothing there is text, or the Hub's dataset cannot be used.
    """
    check_source(source, name)
    named = f"{name} {str(source)!r}"
    if str(source).startswith("hf:"):
        return _hub_dataset(str(source), named)
    if source == ARITHMETIC:
        return Corpus(ARITHMETIC, (), _read_arithmetic)
    return _from_files(str(source), named, _find_files(source))


def content_digest(source: str | Path, name: str = "data") -> str:
    """The SHA-256 of everything from which `open_corpus` makes a corpus: names and contents, not where they lie.

    Arguments and errors are those of `open_corpus`. The content is not searched for text, so this is much faster.
    """
    check_source(source, name)
    digest = hashlib.sha256()

    def add(*parts: bytes) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8) + part)

    if source == ARITHMETIC or str(source).startswith("hf:"):
        for row in open_corpus(source, name).read():
            add(row.name.encode(), row.text.encode())
        return digest.hexdigest()
    files = _find_files(source)
    add(files.rule.encode(), len(files.left_out).to_bytes(8))
    for reason, path in files.left_out:
        add(reason.encode(), os.fsencode(path))
    for file, path in files.names.items():
        add(os.fsencode(path), _file_digest(file))
    return digest.hexdigest()


def why_not_opened(file: Path) -> str | None:
    """The reason to leave a file out without opening it; None if it can be opened, and has an end.

    The kernel makes the content of a file in /proc or /sys while it is read. Most of these files have size 0, some
    have no end, and others are as long as the address space, such as /proc/self/pagemap.
    """
    try:
        status = file.stat()
    except OSError:  # also of a link to nothing
        return "unreadable"
    if kind := SPECIAL.get(stat.S_IFMT(status.st_mode)):
        return kind
    if status.st_dev in _kernel_devices():
        return "file_of_the_kernel"
    return None if status.st_size else "empty"


@cache
def _kernel_devices() -> frozenset[int]:
    """The device numbers of the kernel's file systems; a folder without one mounted has that of the disk."""
    return frozenset(os.stat(folder).st_dev for folder in KERNEL_FOLDERS if os.path.ismount(folder))


def _file_digest(file: Path) -> bytes:
    """The SHA-256 of a file, or the reason for which it is not read."""
    if reason := why_not_opened(file):
        return reason.encode()
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError:
        return b"unreadable"


class _Files(NamedTuple):
    """The files in which a corpus is searched.

    Attributes:
        root: their folder, for messages.
        names: their names, in reading order.
        left_out: what is not read below the folder.
        rule: what is left out of the files: `PACKAGES`, where the text filter decides, or "text", all that is not text.
    """

    root: Path
    names: Mapping[Path, str]
    left_out: Sequence[LeftOut] = ()
    rule: str = "text"


def _find_files(source: str | Path) -> _Files:
    if source == STANDARD_LIBRARY:
        return _standard_library()
    if source == PACKAGES:
        return _installed_packages()
    path = Path(source)
    if not path.is_dir():
        return _Files(path.parent, {path: path.name})
    files, left_out = files_below(path)
    return _Files(path, {file: file.relative_to(path).as_posix() for file in files}, left_out)


def _standard_library() -> _Files:
    root = Path(sysconfig.get_path("stdlib"))
    files, _ = files_below(root, excluded=EXCLUDED_FOLDERS)
    return _Files(root, {file: file.relative_to(root).as_posix() for file in files if file.suffix == ".py"})


def _installed_packages() -> _Files:
    root = Path(sysconfig.get_path("stdlib"))
    folders = dict.fromkeys([root, *(Path(path) for path in sys.path if Path(path).name in PACKAGE_FOLDERS)])
    names = {
        file: file.relative_to(folder.parent).as_posix()
        for folder in folders
        for file in files_below(folder, excluded=EXCLUDED_FOLDERS if folder == root else frozenset())[0]
        if file.name.endswith((*SOURCE, *PROSE)) or file.name == "METADATA"  # of a package: its description
    }
    return _Files(root, names, rule=PACKAGES)


def _package_filter() -> Callable[[Path, str], str | None]:
    """A function that returns the reason to leave a file of a package out; it is called in reading order."""
    duplicates = DuplicateFilter()

    def why_not(file: Path, name: str) -> str | None:
        if reason := why_not_opened(file):
            return reason
        try:
            content = file.read_bytes()
        except OSError:
            return "unreadable"
        if len(content) > MAX_BYTES:
            return "long"
        return why_left_out(name, content) or ("repeated" if duplicates.has_seen(content.decode()) else None)

    return why_not


def files_below(root: Path, excluded: frozenset[str] = frozenset()) -> tuple[list[Path], list[LeftOut]]:
    """All files below a folder, sorted by their relative names, and what is not read below it.

    Hidden files and folders, links to folders, and folders that cannot be read are left out.
    """
    found: list[Path] = []
    left_out: list[LeftOut] = []

    def leave_out(reason: str, path: str | Path) -> None:
        left_out.append(LeftOut(reason, Path(path).relative_to(root).as_posix()))

    for folder, subfolders, names in os.walk(
        root, onerror=lambda error: leave_out("unreadable_folder", error.filename)
    ):
        for name in (*subfolders, *names):
            path = Path(folder, name)
            if name.startswith("."):
                leave_out("hidden", path)
            elif name not in subfolders:
                found.append(path)
            elif path.is_symlink():  # os.walk does not follow it
                leave_out("linked_folder", path)
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix()), sorted(left_out)


def _from_files(source: str, named: str, files: _Files) -> Corpus:
    """The corpus of the files that are text; the others follow what is left out already.

    Args:
        source: its name.
        named: the option that named it, and the name, for messages.
        files: the files.
    """
    if not files.names:
        others = f" ({_list(files.left_out)})" if files.left_out else ""
        raise FileNotFoundError(f"{named}: the folder {files.root} holds no files to read{others}; name one that does")
    why_not = _package_filter() if files.rule == PACKAGES else why_not_text
    refusals = {file: why_not(file, name) for file, name in files.names.items()}
    refused = [LeftOut(reason, files.names[file]) for file, reason in refusals.items() if reason]
    readable = [file for file, reason in refusals.items() if not reason]
    if not readable:
        raise ValueError(f"{named} holds no UTF-8 text: {_list(refused)} of {format_count(len(files.names), 'file')}")

    def read() -> Iterator[NamedText]:
        for file in readable:
            yield from _passages(file, files.names[file])

    return Corpus(source, [*files.left_out, *refused], read)


def why_not_text(file: Path, name: str) -> str | None:
    """The reason to leave a file out of a corpus; None if it is text. Its name does not matter."""
    if reason := why_not_opened(file):
        return reason
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            while chunk := stream.read(MAX_WHOLE_FILE):
                if "\0" in chunk:
                    return "not_text"
    except UnicodeDecodeError:
        return "not_text"
    except OSError:
        return "unreadable"
    return None


def _passages(file: Path, name: str) -> Iterator[NamedText]:
    """A file as one text, or as passages of a 64th of the file, at most MAX_SPAN characters and the rest of a line."""
    size = file.stat().st_size
    with file.open(encoding="utf-8", newline="") as stream:  # newline="": line ends stay as they are
        if size <= MAX_WHOLE_FILE:
            yield NamedText(name, stream.read())
            return
        for number, passage in enumerate(_cut(stream, span_length(size)), start=1):
            yield NamedText(f"{name}, passage {number}", passage)


def span_length(size: int) -> int:
    """The characters of a span if a text of `size` bytes is cut into 64 spans, within MIN_SPAN and MAX_SPAN."""
    return min(max(size // 64, MIN_SPAN), MAX_SPAN)


def _cut(stream: TextIO, length: int) -> Iterator[str]:
    """Cut a text at the first line end from `length` characters on, but after 2 × length characters at the latest."""
    while span := stream.read(length) + stream.readline(length):
        yield span


def _read_arithmetic() -> Iterator[NamedText]:
    for number, text in enumerate(arithmetic.examples(), start=1):
        yield NamedText(f"example {number}", text)


def _hub_dataset(source: str, named: str) -> Corpus:
    name = _parse_hub_name(source, named)
    try:
        from datasets import load_dataset  # late: optional, and slow to import
    except ImportError as error:
        raise ValueError(f"{named} needs the package `datasets`: pip install datasets") from error
    try:
        dataset = load_dataset(name["name"], name["config"], split=name["split"] or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{named} could not be loaded: {str(error).partition(chr(10))[0]}") from error
    column = _text_column(named, dataset.features, name["column"])

    def read() -> Iterator[NamedText]:
        for number, row in enumerate(dataset.select_columns([column])):
            yield NamedText(f"row {number}", row[column] or "")

    return Corpus(source, (), read)


def _parse_hub_name(source: str, named: str) -> re.Match[str]:
    name = HUB.fullmatch(source)
    if name is None:
        raise ValueError(f"{named} must have the form hf:OWNER/NAME[/CONFIG][:SPLIT][#COLUMN]")
    for part in name["name"].split("/"):
        if HUB_WORD.fullmatch(part) is None or "--" in part or ".." in part:
            raise ValueError(f"{named} is malformed: {part!r} is no name of the Hugging Face Hub")
    return name


def _text_column(named: str, features: Mapping[str, Any], requested: str | None) -> str:
    """The requested column, or the one named "text", or the only one that holds strings."""
    strings = [
        name for name, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")
    ]
    if requested is not None and requested not in strings:
        raise ValueError(f"{named}: {requested!r} is not a column of text; these are: {strings}")
    if requested is None and "text" not in strings and len(strings) != 1:
        raise ValueError(f"{named}: name the text column, hf:…#COLUMN, one of {strings}")
    return requested or ("text" if "text" in strings else strings[0])


def _list(left_out: Iterable[LeftOut]) -> str:
    counts = Counter(reason for reason, _ in left_out)
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items())
