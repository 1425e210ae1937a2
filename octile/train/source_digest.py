"""The digest of octile's source, by which ranks and resumed runs find out that they run different code."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import octile

SUFFIXES = (".py", ".cu", ".cuh", ".cpp")


def source_digest(names: Sequence[str] | None = None) -> str:
    """The first digits of SHA-256 over the names and contents of source files of the package: all, or those named."""
    digest, root = hashlib.sha256(), Path(octile.__file__).parent
    paths = root.rglob("*") if names is None else (root / name for name in names)
    for path in sorted(path for path in paths if path.suffix in SUFFIXES):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
