"""What of a folder of packages is text to train on: source and documentation that people wrote, once.

A file is left out if it is not written by a person (long lines, few words, generated, translated, tables), or if most
of its longer lines occurred in earlier files.
"""

import hashlib
import re
import string

PROSE = (".md", ".rst", ".adoc", ".txt")
SOURCE = (".py", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".js", ".ts", ".sh", ".perl", ".go", ".java")
LEFT_OUT_PATHS = re.compile(
    r"(^|/)(locale|locales|translations|vendor|_vendor|node_modules|\.github)/|\.min\.js$|lextab|yacctab"
)
LETTERS = string.ascii_letters.encode()
MIN_BYTES, MAX_BYTES = 256, 2**19  # of a file in a package
MAX_LINE, MAX_MEAN_LINE = 2000, 120  # characters; a book's paragraph is one line
MAX_DUPLICATE_SHARE = 0.5  # of a file's longer lines that earlier files have


def why_left_out(path: str, content: bytes, book: bool = False) -> str | None:
    """The reason to leave a file out of the training text, or None.

    Args:
        path: the file's name below its folder, whose parts and suffix count.
        content: its bytes.
        book: whether it may be short, and its lines long.
    """
    if LEFT_OUT_PATHS.search(path):
        return "translated or vendored"
    if not book and len(content) < MIN_BYTES:
        return "short"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if "\0" in text:
        return "not text"
    if len(content) > 1.1 * len(text):
        return "not in Latin letters"
    lines = text.splitlines() or [""]
    if not book and path.endswith(SOURCE) and len(max(lines, key=len)) > MAX_LINE / 4:
        return "long lines"
    if not book and path.endswith(SOURCE) and len(text) / len(lines) > MAX_MEAN_LINE:
        return "long lines"
    return "not words" if len(content.translate(None, LETTERS)) > 0.55 * len(content) else None


class DuplicateFilter:
    """A filter of duplicate files, by hashes of an eighth of their lines of at least 20 characters."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def has_seen(self, text: str) -> bool:
        """Whether most lines were seen before; if not, add them to the lines seen."""
        sample = _sample(text)
        if sample and len(sample & self.seen) > MAX_DUPLICATE_SHARE * len(sample):
            return True
        self.seen |= sample
        return False

    def add(self, text: str) -> None:
        """Add the lines of a text to the lines seen."""
        self.seen |= _sample(text)


def _sample(text: str) -> set[int]:
    """The hashes of a text's longer lines: of an eighth of them, or of all if they are few."""
    lines = {_hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= 20}
    return {h for h in lines if h % 8 == 0} if len(lines) > 64 else lines


def _hash(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest())
