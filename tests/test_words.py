"""Octile's old private words stay out of the package, the documents and the README."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "docs" / "private_words.txt"
RESULTS = ROOT / "benchmarks" / "results"
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".jinja", ".md"}


def patterns() -> list[tuple[str, str]]:
    """(regular expression, standard term) of each line of the list."""
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("\t") for line in lines if line and not line.startswith("#")]
    return [(pattern, term) for pattern, _, term in pairs]


def files() -> list[Path]:
    folders = (ROOT / "octile", ROOT / "docs")
    return [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES)]


def result_names() -> set[str]:
    """The case, what and peer of every row of the committed results: such names stay, so that runs compare."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    rows = [row for file in files for row in file.get("rows", [])]
    names = [(row["case"], row["what"], (row.get("against") or {}).get("peer")) for row in rows]
    return {name for row in names for name in row if isinstance(name, str)}


NAMES = [f", {name}," for name in result_names()]


def without_result_names(line: str) -> str:
    """Remove the string literals that are a row's name, or a part of one between commas."""
    return re.sub(r'"([^"]*)"', lambda literal: "" if is_result_name(literal[1]) else literal[0], line)


def is_result_name(literal: str) -> bool:
    return any(f", {literal}," in name for name in NAMES)


@pytest.mark.parametrize(("pattern", "term"), patterns())
def test_a_private_word_is_not_used(pattern: str, term: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, without_result_names(line), re.IGNORECASE)
    ]
    assert not found, f"use {term!r} instead of {pattern!r} in\n" + "\n".join(found)
