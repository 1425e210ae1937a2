"""Octile's old private words stay out of the package, the documents and the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "tests" / "private_words.txt"
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".jinja", ".md"}


def patterns() -> list[tuple[str, str]]:
    """(regular expression, standard term) of each line of the list."""
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("\t") for line in lines if line and not line.startswith("#")]
    return [(pattern, term) for pattern, _, term in pairs]


def files() -> list[Path]:
    folders = (ROOT / "octile", ROOT / "docs")
    return [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES)]


@pytest.mark.parametrize(("pattern", "term"), patterns())
def test_a_private_word_is_not_used(pattern: str, term: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, f"use {term!r} instead of {pattern!r} in\n" + "\n".join(found)
