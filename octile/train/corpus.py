"""Reads a corpus one document at a time, so that it may be larger than memory.

A source is named by one string:

    stdlib                                    the source text of the Python standard library that runs this program,
                                              without its tests and its tables of character encodings
    PATH                                      a text file, or a folder of them
    hf:OWNER/NAME[/CONFIG][:SPLIT][#COLUMN]   a dataset of the Hugging Face Hub, if the package `datasets` is installed

A file is a document. A single file, or a file longer than 1 MiB, is split at line ends into about 64 passages, each of
which is a document, so that a part of it can be held out. Text is what decodes as UTF-8 and contains no NUL; everything
else is left out and counted.
"""

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STANDARD_LIBRARY = "stdlib"
HUB = re.compile(
    r"hf:(?P<name>[^/:#]+(/[^/:#]+)?)(/(?P<config>[^/:#]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?"
)  # a split may be a slice, train[:1%], colon and all

MAX_WHOLE_FILE = 2**20  # bytes; a longer file is split into passages
MIN_PASSAGE, MAX_PASSAGE = 2**10, 2**16  # characters

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its digest, the first 16 bytes of the SHA-256 of its UTF-8 bytes."""

    digest: bytes
    text: str


@dataclass(frozen=True)
class Corpus:
    """A stream of texts that can be read repeatedly.

    Attributes:
        source: the string that named it.
        skipped: how many files were left out, by reason.
        texts: reads the source from its beginning, in an order that depends only on the names of the files.
    """

    source: str
    skipped: Mapping[str, int]
    texts: Callable[[], Iterator[str]]

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """Every distinct text once; empty texts and exact duplicates are left out and added to `skipped`."""
        seen: set[bytes] = set()
        for text in self.texts():
            digest = hashlib.sha256(text.encode()).digest()[:16]
            if not text or text.isspace():
                skipped["empty"] += 1
            elif digest in seen:
                skipped["duplicate"] += 1
            else:
                seen.add(digest)
                yield Document(digest, text)


def open_corpus(source: str | Path) -> Corpus:
    """Open the corpus that `source` names, as the module describes. Files are read once to find those that are text.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder has no files.
        ValueError: nothing there is text, or the Hub's dataset cannot be used.
    """
    if source == STANDARD_LIBRARY:
        return _standard_library()
    if str(source).startswith("hf:"):
        return _hub_dataset(str(source))
    path = Path(source)
    if not str(source).strip():  # Path("") is the current folder
        raise ValueError("source is empty: name a file, a folder, 'stdlib' or 'hf:OWNER/NAME'")
    if not path.exists():
        raise FileNotFoundError(f"source {str(source)!r} is no file or folder (nor 'stdlib', nor 'hf:OWNER/NAME')")
    return _from_files(str(source), path, _files_below(path) if path.is_dir() else [path])


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _files_below(root, excluded=EXCLUDED_FOLDERS) if file.suffix == ".py"]
    return _from_files(STANDARD_LIBRARY, root, files)


def _files_below(root: Path, excluded: frozenset[str] = frozenset()) -> list[Path]:
    """All files below a folder, sorted by their relative names, without hidden files and folders."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _from_files(source: str, root: Path, files: list[Path]) -> Corpus:
    if not files:
        raise FileNotFoundError(f"source {source!r}: the folder {root} holds no files to read; name one that does")
    refusals = {file: _why_not_text(file) for file in files}
    skipped = Counter(reason for reason in refusals.values() if reason)
    readable = [file for file, reason in refusals.items() if not reason]
    if not readable:
        raise ValueError(f"source {source!r} holds no UTF-8 text: {_list(skipped)} of {len(files)} files")

    def texts() -> Iterator[str]:
        for file in readable:
            yield from _passages(file, split=len(readable) == 1 or file.stat().st_size > MAX_WHOLE_FILE)

    return Corpus(source, skipped, texts)


def _why_not_text(file: Path) -> str | None:
    if not file.is_file():  # a pipe, a socket, a link to nothing
        return "unreadable"
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


def _passages(file: Path, split: bool) -> Iterator[str]:
    with file.open(encoding="utf-8", newline="") as stream:  # newline="": line ends stay as they are
        if not split:
            yield stream.read()
            return
        length = min(max(file.stat().st_size // 64, MIN_PASSAGE), MAX_PASSAGE)
        while passage := stream.read(length) + stream.readline(length):
            yield passage


def _hub_dataset(source: str) -> Corpus:
    name = HUB.fullmatch(source)
    if name is None:
        raise ValueError(f"source {source!r} must have the form hf:OWNER/NAME[/CONFIG][:SPLIT][#COLUMN]")
    try:
        from datasets import load_dataset  # late: optional, and slow to import
    except ImportError as error:
        raise ValueError(f"source {source!r} needs the package `datasets`: pip install datasets") from error
    try:
        dataset = load_dataset(name["name"], name["config"], split=name["split"] or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"source {source!r} could not be loaded: {str(error).partition(chr(10))[0]}") from error
    column = _text_column(source, dataset.features, name["column"])

    def texts() -> Iterator[str]:
        for row in dataset.select_columns([column]):
            yield row[column] or ""

    return Corpus(source, {}, texts)


def _text_column(source: str, features: Mapping[str, Any], requested: str | None) -> str:
    """The requested column, or the one named "text", or the only one that holds strings."""
    strings = [
        name for name, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")
    ]
    if requested is not None and requested not in strings:
        raise ValueError(f"source {source!r}: {requested!r} is not a column of text; these are: {strings}")
    if requested is None and "text" not in strings and len(strings) != 1:
        raise ValueError(f"source {source!r}: name the text column, hf:…#COLUMN, one of {strings}")
    return requested or ("text" if "text" in strings else strings[0])


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items())
