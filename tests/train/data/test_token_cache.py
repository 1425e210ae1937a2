"""Tests of the cache of token stores: a text is tokenized once for all runs, and only intact entries are used."""

import ast
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import filelock
import pytest

from octile.tokenizer import Tokenizer
from octile.train.data import prepare as data
from octile.train.data import prepare_examples as examples
from octile.train.data import token_cache
from octile.train.data.prepare import prepare
from octile.train.data.token_store import FILES, LEFT_OUT, MANIFEST, TokenStore
from octile.train.loop import train
from tests.train.conftest import micro, silent_console

SETTINGS = {"vocab_size": 300, "sequence_length": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A new cache; the folder of its token stores."""
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n:02}.txt").write_text("".join(f"{n} times {k} is {n * k}\n" for k in range(40)))
    return folder


class Preparation:
    """Prepares tokens in new folders, and notes the lines and stages of the last."""

    def __init__(self, parent: Path):
        self.parent, self.number = parent, 0
        self.lines: list[str] = []
        self.stages: list[str] = []

    def __call__(self, source: Path, **settings) -> TokenStore:
        self.number += 1
        self.lines, self.stages = [], []
        return prepare(
            source,
            folder=self.parent / f"run{self.number}" / "data",
            progress=lambda stage, share: self.stages.append(stage),
            say=self.lines.append,
            **{**SETTINGS, **settings},
        )

    @property
    def is_built(self) -> bool:
        """Whether the last tokens were not those of the cache."""
        return "encoding" in self.stages


@pytest.fixture
def preparation(tmp_path) -> Preparation:
    return Preparation(tmp_path)


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


NOT_CACHED = "the tokens cannot be cached, so other runs prepare them again: "


def contents(store: TokenStore) -> dict[str, bytes]:
    return {name: (store.folder / name).read_bytes() for name in (*FILES, LEFT_OUT, MANIFEST)}


def test_a_second_run_neither_trains_a_tokenizer_nor_encodes(source, preparation, monkeypatch):
    preparation(source)
    assert preparation.is_built
    monkeypatch.setattr(Tokenizer, "train", None)
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    preparation(source)
    assert preparation.stages == ["reading"]


def test_the_files_of_both_runs_are_equal(source, preparation):
    assert contents(preparation(source)) == contents(preparation(source))


def test_one_line_names_the_entry_from_which_tokens_come(source, preparation, cache):
    preparation(source)
    assert preparation.lines == []
    preparation(source)
    (entry,) = entries(cache)
    assert preparation.lines == [f"tokens from the cache ({entry})"]


@pytest.mark.slow
def test_losses_with_the_cache_are_those_without_it(text, tmp_path, cache):
    losses, shown = [], []
    for name in ("without", "with"):
        console = silent_console()
        run = train(micro(data=str(text), out=tmp_path / name, steps=3, val_sequences=1), False, console)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([line[key] for line in lines for key in ("loss", "val_loss") if key in line])
        shown.append(f"tokens from the cache ({cache}" in console.console.file.getvalue())
    assert shown == [False, True]
    assert losses[0] == losses[1] != []


def test_a_run_needs_nothing_of_the_cache_later(source, preparation, cache):
    preparation(source)
    store = preparation(source)
    shutil.rmtree(cache)
    assert TokenStore.open(store.folder).digest == store.digest


def test_a_changed_file_of_a_run_does_not_damage_the_cache(source, preparation):
    preparation(source)
    with (preparation(source).folder / "train.npy").open("r+b") as file:
        file.write(b"damaged")
    preparation(source)
    assert not preparation.is_built


def test_the_manifest_names_the_source_of_its_own_run(source, preparation, tmp_path):
    preparation(source)
    shutil.copytree(source, tmp_path / "copy")
    store = preparation(tmp_path / "copy")
    assert not preparation.is_built
    assert store.manifest.source == str(tmp_path / "copy")


def test_files_with_other_times_and_the_same_contents_are_found(source, preparation):
    preparation(source)
    for file in source.iterdir():
        os.utime(file, (1, 1))
    preparation(source)
    assert not preparation.is_built


def change_a_byte(source: Path) -> None:
    file = source / "00.txt"
    before = file.stat()
    file.write_text(file.read_text().replace("times", "timed", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "one byte of a file, with the same size and time": change_a_byte,
    "another file": lambda source: (source / "more.txt").write_text("more"),
    "a file less": lambda source: (source / "00.txt").unlink(),
    "another order": lambda source: (source / "00.txt").rename(source / "99.txt"),
    "another file that is left out": lambda source: (source / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0"),
    "a hidden file": lambda source: (source / ".profile").write_text("export"),
}


@pytest.mark.one_case
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_text_is_a_new_entry(source, preparation, cache, change):
    preparation(source)
    change(source)
    preparation(source)
    assert preparation.is_built
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("other", [{"vocab_size": 280}, {"sequence_length": 17}, {"held_out_windows": 1}], ids=str)
def test_another_setting_is_a_new_entry(source, preparation, cache, other):
    preparation(source)
    preparation(source, **other)
    assert preparation.is_built
    assert len(entries(cache)) == 2


def test_another_version_of_the_code_is_a_new_entry(source, preparation, monkeypatch):
    preparation(source)
    monkeypatch.setattr(data, "source_digest", lambda names: "other")
    preparation(source)
    assert preparation.is_built


DECIDES_NOTHING = {  # it reads, writes or reuses tokens; `mix` decides about chance collisions
    "atomic_files",
    "checkpoint.files",
    "checkpoint.store",
    "extras",
    "nn.packed_texts",
    "ops.cross_entropy",
    "report.machine",
    "text",
    "train.data.batches",
    "train.data.packed_tokens",
    "train.data.streamed_tokens",
    "train.data.token_cache",
    "train.source_digest",
    "validation",
}
OF_EXAMPLES = {
    "train.data.corpus",
    "train.data.prepare",
}  # types, the name of a folder, and the files, whose names and digests count


@pytest.mark.parametrize(
    ("prepared_by", "others"),
    [(data.PREPARED_BY, set()), (examples.PREPARED_BY, OF_EXAMPLES)],
    ids=["text", "examples"],
)
def test_the_code_of_which_the_version_counts_is_all_that_prepares_tokens(prepared_by, others):
    package = Path(data.__file__).parents[2]
    imported = set()
    for file in prepared_by:
        for node in ast.walk(ast.parse((package / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("octile."):
                module = node.module.removeprefix("octile.")
                is_folder = (package / module.replace(".", "/")).is_dir()
                imported |= {f"{module}.{alias.name}" for alias in node.names} if is_folder else {module}
    modules = {file.removesuffix(".py").replace("/", ".") for file in prepared_by}
    assert imported - DECIDES_NOTHING - others <= modules


def test_another_version_of_the_package_tokenizers_is_a_new_entry(source, preparation, monkeypatch):
    preparation(source)
    monkeypatch.setattr(data, "version_of", lambda package: f"{package} 0")
    preparation(source)
    assert preparation.is_built


def test_a_given_tokenizer_is_part_of_the_key(source, preparation, tmp_path):
    for name, text in (("one", "some text, some text"), ("two", "other words, other words")):
        (tmp_path / name).mkdir()
        Tokenizer.train([text], 270).save(tmp_path / name)
    found = {}
    for name in (None, "one", "two", "one"):
        store = preparation(source, tokenizer=name and tmp_path / name)
        assert preparation.is_built == (name not in found)
        found.setdefault(name, store.tokenizer.fingerprint)
        assert store.tokenizer.fingerprint == found[name]
    assert len(set(found.values())) == 3


def test_the_configuration_of_a_given_tokenizer_is_part_of_the_key(source, preparation, tmp_path):
    Tokenizer.train(["some text, some text"], 270).save(tmp_path)
    preparation(source, tokenizer=tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    assert preparation(source, tokenizer=tmp_path).tokenizer.config["chat_template"] == "{{ messages }}"


def test_of_two_that_begin_at_once_one_prepares_and_the_other_says_that_it_waits(source, tmp_path, cache):
    is_waiting = Event()
    stages: dict[str, list[str]] = {"first": [], "second": []}
    lines: list[str] = []

    def first_progress(stage: str, share: float) -> None:
        stages["first"].append(stage)
        if stage == "encoding" and share == 0.0:
            second.append(pool.submit(prepare, source, folder=tmp_path / "second", **SETTINGS, **second_options))
            assert is_waiting.wait(60)

    def say(line: str) -> None:
        lines.append(line)
        is_waiting.set()

    second_options = {"progress": lambda stage, share: stages["second"].append(stage), "say": say}
    second = []
    with ThreadPoolExecutor(1) as pool:
        one = prepare(source, folder=tmp_path / "first", progress=first_progress, **SETTINGS)
        assert contents(second[0].result()) == contents(one)
    assert "encoding" in stages["first"]
    assert set(stages["second"]) == {"reading"}
    assert lines[0] == "another octile process prepares the same tokens: waiting for them"
    assert lines[1:] == [f"tokens from the cache ({entries(cache)[0]})"]


def test_where_the_first_fails_the_one_that_waits_prepares(source, preparation, monkeypatch):
    monkeypatch.setattr(data.TokenWriter, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        preparation(source)
    monkeypatch.undo()
    preparation(source)
    assert preparation.is_built


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "missing": lambda file: file.unlink(),
    "changed": lambda file: file.write_bytes(file.read_bytes().swapcase()),
}


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_built_again_with_a_warning(source, preparation, cache, caplog, name, damage):
    before = contents(preparation(source))
    (entry,) = entries(cache)
    damage(entry / name)
    assert contents(preparation(source)) == before
    assert preparation.is_built
    assert f"the cached token store {entry} is damaged: it is built again" in caplog.text
    preparation(source)
    assert not preparation.is_built


def test_an_entry_under_the_name_of_another_is_damaged(source, preparation, cache):
    preparation(source)
    (first,) = entries(cache)
    preparation(source, vocab_size=280)
    (second,) = set(entries(cache)) - {first}
    shutil.rmtree(first)
    second.rename(first)
    assert preparation(source).manifest.vocab_size == 300


def test_what_a_process_leaves_that_is_killed_while_it_caches_is_not_used(source, preparation, cache):
    preparation(source)
    (entry,) = entries(cache)
    entry.rename(entry.with_suffix(".partial"))
    (entry.with_suffix(".partial") / "val.npy").unlink()
    preparation(source)
    assert preparation.is_built
    assert entries(cache) == [entry]


def test_a_file_that_is_no_document_and_appears_meanwhile_leaves_the_tokens_uncached(
    source, preparation, cache, monkeypatch, caplog
):
    save = Tokenizer.save
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", lambda *args: (save(*args), (source / ".draft").write_text("a draft")))
        preparation(source)
    assert warnings(caplog) == [f"{NOT_CACHED}files of the data changed while they were read"]
    assert entries(cache) == []
    (source / ".draft").unlink()
    preparation(source)
    assert preparation.is_built


def test_the_cache_may_be_emptied_while_its_entry_is_copied(source, preparation, cache, monkeypatch):
    preparation(source)
    check_files = token_cache.check_files

    def check_and_empty(folder: Path, manifest) -> None:
        check_files(folder, manifest)
        shutil.rmtree(folder)

    monkeypatch.setattr(token_cache, "check_files", check_and_empty)
    preparation(source)
    assert preparation.is_built


def test_on_a_full_disk_the_run_goes_on_with_a_warning(source, preparation, cache, monkeypatch, caplog):
    copyfile = shutil.copyfile

    def copy_half(source: Path, destination: Path) -> None:
        if destination.is_relative_to(cache) and destination.name == "train.npy":
            destination.write_bytes(source.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(destination))
        copyfile(source, destination)

    monkeypatch.setattr(shutil, "copyfile", copy_half)
    preparation(source)
    assert [line[: len(NOT_CACHED)] for line in warnings(caplog)] == [NOT_CACHED]
    assert "No space left on device" in warnings(caplog)[0]
    assert entries(cache) == []


def test_in_a_read_only_cache_what_is_there_is_used_and_nothing_is_added(source, preparation, monkeypatch, caplog):
    preparation(source)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    preparation(source)
    assert not preparation.is_built
    assert warnings(caplog) == []
    preparation(source, vocab_size=280)
    assert preparation.is_built
    assert warnings(caplog) == [f"{NOT_CACHED}[Errno {errno.EROFS}] Read-only file system"]


def test_where_no_folder_can_be_made_the_run_goes_on_with_a_warning(source, preparation, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    preparation(source)
    assert [line[: len(NOT_CACHED)] for line in warnings(caplog)] == [NOT_CACHED]


def test_a_cache_that_others_may_write_to_is_not_used(source, preparation, cache, caplog):
    preparation(source)
    cache.chmod(0o777)
    preparation(source)
    assert preparation.is_built
    assert "others may write to octile's cache" in caplog.text


def test_the_folders_of_the_cache_are_private(source, preparation, cache):
    umask = os.umask(0o002)
    try:
        preparation(source)
    finally:
        os.umask(umask)
    assert [folder.stat().st_mode & 0o777 for folder in (cache, cache.parent)] == [0o700, 0o700]


def test_a_cache_inside_the_text_is_refused(source, preparation, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(source / "cache"))
    with pytest.raises(ValueError, match=r"must not hold octile's cache .*: set OCTILE_CACHE_DIR to another folder"):
        preparation(source)


def test_a_hidden_cache_inside_the_text_is_not_read(source, preparation, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(source / ".cache" / "octile"))
    for _ in range(2):
        store = preparation(source)
    assert sum(store.manifest.documents.values()) == 60
