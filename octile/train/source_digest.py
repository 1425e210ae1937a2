"""The digest of octile's source, by which ranks find out that they run different code."""

import hashlib
from pathlib import Path

import octile

SUFFIXES = (".py", ".cu", ".cuh", ".cpp")


def source_digest() -> str:
    """The first digits of SHA-256 over the names and contents of all source files of the package."""
    digest, root = hashlib.sha256(), Path(octile.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
