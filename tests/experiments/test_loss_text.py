"""Tests of the selection of training text, of the longer text, and of packing and unpacking token stores."""

import json
import random
import subprocess

import numpy as np
import pytest

from experiments.loss import text as module
from experiments.loss.text import DuplicateFilter, extend, pack, unpack, why_left_out
from experiments.loss.text_sources import Repository, Sources
from octile.train.data.prepare import prepare
from octile.train.data.token_store import TokenStore

LINE = b"A sentence of some length that a person may have written down.\n"
WORDS = LINE.decode().split()


def sentences(seed, n=40):
    draw = random.Random(seed)
    return "".join(f"{' '.join(draw.choices(WORDS, k=12))}.\n" for _ in range(n))


@pytest.fixture
def store(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(100):
        (text / f"{i}.txt").write_text(sentences(i))
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


def test_added_lines_count_as_seen_though_they_repeat_earlier_ones():
    lines = [f"this is line number {i} of a file\n" for i in range(60)]
    duplicates = DuplicateFilter()
    for first in (0, 10):
        duplicates.add("".join(lines[first : first + 30]))
    assert duplicates.has_seen("".join(lines[30:40]))
    assert not duplicates.has_seen("".join(lines[30:]))


@pytest.fixture
def packed(store, tmp_path, monkeypatch):
    """The folder of the packed store, with several chunks in some parts, and train.npy in several parts."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 2**14)
    monkeypatch.setattr(module, "PART_BYTES", 2**14)
    pack(store.folder, tmp_path / "packed")
    return tmp_path / "packed"


def parts_with(packed, chunk):
    return {part for part in packed.iterdir() if any(part.glob(chunk))}


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["", "empty: a.txt\nduplicate: b.txt\n"], ids=["nothing", "files"])
def test_the_names_of_what_was_left_out_are_packed_too(store, tmp_path, left_out):
    (store.folder / "left_out.txt").write_text(left_out)
    pack(store.folder, tmp_path / "packed")
    unpack(tmp_path / "there", list((tmp_path / "packed").iterdir()))
    assert (tmp_path / "there" / "left_out.txt").read_text() == left_out


@pytest.mark.slow
def test_a_packed_store_is_restored_unchanged(store, packed, tmp_path):
    parts = list(packed.iterdir())
    assert len(parts_with(packed, "train.npy.*")) > 2
    unpack(tmp_path / "there", parts[::-1])
    assert (np.load(tmp_path / "there/train.npy") == store.train).all()
    assert json.loads((tmp_path / "there/manifest.json").read_text())["tokens"] == store.manifest.tokens


def test_a_part_is_no_larger_than_the_limit(packed):
    parts = [[file.stat().st_size for file in part.iterdir()] for part in packed.iterdir()]
    assert all(sum(sizes) <= 2**14 for sizes in parts)
    assert any(len(sizes) > 1 for sizes in parts)


@pytest.mark.slow
def test_a_part_that_is_missing_is_noticed(packed, tmp_path):
    parts = set(packed.iterdir())
    with pytest.raises(ValueError, match=r"train\.npy fails its checksum"):
        unpack(tmp_path / "there", [*(parts - parts_with(packed, "train.npy.005.xz"))])
    with pytest.raises(FileNotFoundError, match=r"no chunk of val\.npy"):
        unpack(tmp_path / "nowhere", [*(parts - parts_with(packed, "val.npy.*"))])


def git(folder, *arguments):
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", "-C", folder, *author, *arguments], capture_output=True, check=True, text=True).stdout


@pytest.fixture
def extended(store, tmp_path, monkeypatch):
    """extended(**files): the store extended by these files of a repository, by their names without a suffix."""

    def extended(**files):
        repository = tmp_path / "repositories/a+b"
        repository.mkdir(parents=True)
        for name, text in files.items():
            (repository / f"{name}.md").write_text(text)
        git(repository, "init")
        git(repository, "add", ".")
        git(repository, "commit", "-m", "all")
        commit = git(repository, "rev-parse", "HEAD").strip()
        monkeypatch.setattr(module, "LONG", Sources((Repository("a/b", commit, (".md",)),), (), ()))
        extend(tmp_path, store.folder, tmp_path / "long")
        return TokenStore.open(tmp_path / "long")

    (tmp_path / "text.json").write_text(json.dumps({"sha256": store.manifest.sha256}))
    monkeypatch.setattr(module, "FACTS", tmp_path / "text.json")
    return extended


NEW = sentences("new", 10)


def test_a_longer_text_begins_with_the_text_and_holds_out_the_same(store, extended):
    long = extended(new=NEW)
    n = len(store.train)
    assert (long.val == store.val).all()
    assert long.tokenizer.fingerprint == store.tokenizer.fingerprint
    assert (long.train[:n] == store.train).all()
    assert long.tokenizer.decode(long.train[n:].tolist()) == f"<|begin|>{NEW}<|end|>"
    assert long.manifest.tokens == {"train": len(long.train), "val": len(store.val)}
    assert long.manifest.documents["train"] == store.manifest.documents["train"] + 1
    assert long.digest != store.digest


@pytest.mark.parametrize("part", ["val", "train"])
def test_a_file_that_repeats_a_document_of_the_text_is_left_out(store, extended, tmp_path, part):
    text = store.tokenizer.decode(getattr(store, part).tolist()).partition("<|end|>")[0].removeprefix("<|begin|>")
    long = extended(new=NEW, again=text + "and a line of its own\n")
    assert long.left_out(9) == {"repeated": ["a/b: again.md"]}
    assert long.manifest.documents["train"] == store.manifest.documents["train"] + 1
    assert json.loads((tmp_path / "text_long.json").read_text()) == {
        "bytes": {"a/b": len(NEW)},
        "kinds": {"prose": len(NEW)},
        "left_out": {"repeated": 1},
        "tokens": long.manifest.tokens,
        "documents": long.manifest.documents,
        "sha256": long.manifest.sha256,
    }


def test_held_out_spans_are_cut_out_of_additional_files(store, extended):
    held_out = store.tokenizer.decode(store.val[1:101].tolist())
    long = extended(new=NEW + held_out + NEW.upper())
    text = long.tokenizer.decode(long.train[len(store.train) :].tolist())
    first, second = text.removeprefix("<|begin|>").removesuffix("<|end|>").split("<|end|><|begin|>")
    assert NEW.startswith(first)
    assert NEW.upper().endswith(second)
    assert 90 <= long.manifest.cut_tokens - store.manifest.cut_tokens <= 110


def test_another_store_than_that_of_the_text_is_not_extended(store, extended, tmp_path):
    (tmp_path / "text.json").write_text(json.dumps({"sha256": {**store.manifest.sha256, "train.npy": "0"}}))
    with pytest.raises(ValueError, match=r"must have the checksums of text\.json; other ones: train\.npy"):
        extended(new=NEW)
    assert not (tmp_path / "long").exists()


def test_the_recorded_longer_text_has_the_held_out_tokens_of_the_text():
    text, long = (json.loads(file.read_text()) for file in (module.FACTS, module.LONG_FACTS))
    unchanged = [name for name in text["sha256"] if text["sha256"][name] == long["sha256"][name]]
    assert unchanged == ["tokenizer.json", "tokenizer_config.json", "val.npy"]
