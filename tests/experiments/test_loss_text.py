"""Tests of the selection of training text, and of packing and unpacking token stores."""

import json

import numpy as np
import pytest

from experiments.loss.text import DuplicateFilter, pack, unpack, why_left_out
from octile.train.data import prepare

LINE = b"A sentence of some length that a person may have written down.\n"


@pytest.fixture
def store(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_bytes(b"".join(b"%d %s" % (i * j, LINE) for j in range(40)))
    return prepare(text, 300, tmp_path / "store", 15, held_out_windows=2)


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("a.py", LINE * 9, None),
        ("a.py", LINE, "short"),
        ("x/locale/de.py", LINE * 9, "translated or vendored"),
        ("a.md", LINE * 9 + b"\xff", "not UTF-8"),
        ("a.md", "слово и дело ".encode() * 40, "not in Latin letters"),
        ("a.py", b"x" * 600 + b"\n", "long lines"),
        ("a.c", b"0x12, 0x34, 0x56,\n" * 40, "not words"),
    ],
)
def test_a_file_is_left_out_for_the_expected_reason(path, content, reason):
    assert why_left_out(path, content) == reason


def test_a_books_paragraph_is_one_line():
    assert why_left_out("a.md", LINE.strip() * 40, book=True) is None


def test_a_file_that_repeats_another_is_noticed_though_lines_differ():
    lines = [f"this is line number {i} of a file\n" for i in range(200)]
    duplicates = DuplicateFilter()
    assert not duplicates.has_seen("".join(lines))
    assert duplicates.has_seen("".join(lines[:190]) + "some words of its own at the end\n" * 3)
    assert not duplicates.has_seen("".join(f"other words at place {i} of it\n" for i in range(200)))


def test_a_packed_store_is_restored_unchanged(store, tmp_path):
    pack(store.folder, tmp_path / "packed")
    unpack(tmp_path / "there", [tmp_path / "packed/part2", tmp_path / "packed/part1"])
    assert (np.load(tmp_path / "there/train.npy") == store.train).all()


def test_a_part_that_is_missing_is_noticed(store, tmp_path):
    pack(store.folder, tmp_path / "packed")
    with pytest.raises(ValueError, match=r"train\.npy fails its checksum"):
        unpack(tmp_path / "there", [tmp_path / "packed/part1"])
    with pytest.raises(FileNotFoundError, match=r"no chunk of tokenizer\.json"):
        unpack(tmp_path / "nowhere", [tmp_path / "packed/part2"])


def test_a_packed_store_names_its_source(store, tmp_path):
    pack(store.folder, tmp_path / "packed")
    unpack(tmp_path / "there", [tmp_path / "packed/part1", tmp_path / "packed/part2"])
    assert json.loads((tmp_path / "there/manifest.json").read_text())["tokens"] == store.manifest.tokens
