"""Octile's old private words stay out of the package, the documents and the README; docstrings are plain sentences."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "tests" / "private_words.txt"
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".jinja", ".md"}
MAX_SENTENCE = 41  # words
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"    (\S[^:]*): (.*)$")
LEGEND = re.compile(r"(Shapes|Sources?):? ")  # of letters, and of papers: lists, and no sentences
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"]?\s")
TABLE_ROW = re.compile(r"\||.*\S {3,}\S")


def patterns() -> list[tuple[str, str]]:
    """(regular expression, standard term) of each line of the list."""
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("\t") for line in lines if line and not line.startswith("#")]
    return [(pattern, term) for pattern, _, term in pairs]


@cache
def texts() -> dict[Path, str]:
    folders = (ROOT / "octile", ROOT / "docs")
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES]
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *found)}


@cache
def texts_with_private_words() -> dict[Path, str]:
    """The texts in which one of the patterns is found, all of which are looked for together."""
    boundary, bounded, others = r"\b", [], []
    for pattern, _ in patterns():
        has_alternatives = "|" in re.sub(r"\(.*?\)", "", pattern)
        if pattern.startswith(boundary) and not has_alternatives:
            bounded.append(pattern.removeprefix(boundary))
        else:
            others.append(pattern)
    # with one boundary for all, it is found four times as fast
    word = re.compile("|".join([rf"\b(?:{'|'.join(bounded)})", *others]), re.IGNORECASE | re.MULTILINE)
    return {path: text for path, text in texts().items() if word.search(text)}


@pytest.mark.parametrize(("pattern", "term"), patterns())
def test_a_private_word_is_not_used(pattern: str, term: str) -> None:
    word = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts_with_private_words().items()
        if word.search(text)  # before each line is looked at
        for number, line in enumerate(text.splitlines(), start=1)
        if word.search(line)
    ]
    assert not found, f"use {term!r} instead of {pattern!r} in\n" + "\n".join(found)


class Names(NamedTuple):
    """What is looked at in a module: its docstrings and its variables, with the lines that they are in."""

    docstrings: list[tuple[str, list[str]]]
    variables: list[tuple[str, str]]


@cache
def names() -> Names:
    """Those of all modules of the package, whose trees are not stored: each garbage collection would look at them."""
    found = Names([], [])
    for path in sorted((ROOT / "octile").rglob("*.py")):
        file = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
                if text := ast.get_docstring(node):
                    found.docstrings.append((f"{file}:{line}: {name}", text.splitlines()))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.variables.append((f"{file}:{node.lineno}: ", node.id))
            elif isinstance(node, ast.arg):
                found.variables.append((f"{file}:{node.lineno}: ", node.arg))
    return found


def paragraphs(lines: list[str]) -> Iterator[str]:
    """The paragraphs, list items and entries of a docstring, without its tables and diagrams, which are indented."""
    found, in_section = [""], False
    for line in lines:
        is_section, is_entry = SECTION.match(line) is not None, in_section and ENTRY.match(line) is not None
        in_section = is_section or (in_section and (not line or line.startswith(" ")))
        if is_section or is_entry or not line or line.startswith("- "):
            found.append("")
        if not is_section and not TABLE_ROW.match(line) and (in_section or not line.startswith("    ")):
            found[-1] += f" {line.strip()}"
    return (text.strip() for text in found if text.strip())


def test_no_entry_begins_with_a_bare_of() -> None:
    bare = []
    for where, lines in names().docstrings:
        section = ""
        for before, line in zip(["", *lines], lines, strict=False):
            if match := SECTION.match(line):
                section = match[1]
            elif line and not line.startswith(" "):
                section = ""
            text = line.strip() if SECTION.match(before) else ""  # a result has no name
            if section in ("Args", "Attributes", "Raises") and (match := ENTRY.match(line)):
                text = match[2]
            if re.match(r"(as )?of\b", text):
                bare.append(f"{where}: {line.strip()}")
    assert not bare, "\n".join(bare)


def test_no_sentence_of_a_docstring_is_long() -> None:
    long = [
        f"{where}: {len(sentence.split())} words: {sentence}"
        for where, lines in names().docstrings
        for text in paragraphs(lines)
        if not LEGEND.match(text)
        for sentence in SENTENCE_END.split(text)
        if len(sentence.split()) > MAX_SENTENCE
    ]
    assert not long, "\n".join(long)


def test_no_variable_is_named_by_a_bare_of() -> None:
    bare = [where + name for where, name in names().variables if re.match(r"_?of(_|$)", name)]
    assert not bare, "\n".join(bare)
