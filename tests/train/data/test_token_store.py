"""Tests of token stores: they return what was written, and damaged stores are refused."""

import json
import re

import numpy as np
import pytest

from octile.train.data.prepare import prepare
from octile.train.data.token_store import FILES, TokenStore, TokenWriter


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("source") / "text.txt"
    file.write_text("".join(f"line {n} of a text, {n * n}\n" for n in range(1000)))
    return file


@pytest.fixture
def store(text, tmp_path):
    return prepare(text, 300, tmp_path / "data", 16)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_writer_uses_the_smallest_dtype_that_holds_every_token(tmp_path, vocab_size, dtype):
    with TokenWriter(tmp_path / "tokens.npy", vocab_size) as writer:
        writer.append([vocab_size - 1])
    tokens = np.load(tmp_path / "tokens.npy")
    assert (tokens.dtype, tokens.tolist()) == (dtype, [vocab_size - 1])


@pytest.mark.parametrize("lengths", [[], [1], [7, 0, 5], [60_000, 60_000]])
def test_the_writer_appends(tmp_path, lengths):
    with TokenWriter(tmp_path / "tokens.npy", 300) as writer:
        for length in lengths:
            writer.append(list(range(300))[:length] * (length // 300 or 1))
    assert len(np.load(tmp_path / "tokens.npy")) == writer.length == sum(lengths)


def test_tokens_are_memory_mapped_and_read_only(store):
    assert isinstance(store.train, np.memmap)
    assert not store.train.flags.writeable


def test_the_manifest_counts_the_tokens(store):
    assert store.manifest.tokens == {"train": len(store.train), "val": len(store.val)}


def test_an_opened_store_has_the_same_manifest(store):
    assert TokenStore.open(store.folder).manifest == store.manifest


def test_a_store_of_an_earlier_version_is_opened_with_the_same_digest(store):
    manifest = json.loads((store.folder / "manifest.json").read_text())
    del manifest["settings"]["preparation"], manifest["span"]
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    assert TokenStore.open(store.folder).digest == store.digest


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_refused(store, name):
    content = bytearray((store.folder / name).read_bytes())
    content[-1] ^= 1
    (store.folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"is damaged: {name} fails its checksum"):
        TokenStore.open(store.folder)


def test_a_missing_file_is_refused(store):
    (store.folder / "val.npy").unlink()
    with pytest.raises(ValueError, match=r"is damaged: val.npy is missing"):
        TokenStore.open(store.folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged: not JSON at byte 0: Expecting value"),
        (b'{"source": "\xff"}', "is damaged: byte 12 is not UTF-8"),
        (b"[]", r"must hold a JSON object, not \[\]"),
        (b'{"source": "stdlib"}', "is damaged: settings is missing"),
        (b'{"color": 1}', "is damaged: color is unknown: there are source, "),
    ],
    ids=["empty", "not-utf-8", "list", "incomplete", "unknown"],
)
def test_a_damaged_manifest_is_refused(store, content, message):
    file = store.folder / "manifest.json"
    file.write_bytes(content)
    remedy = f"; delete the folder {store.folder} to have it built anew"
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} {message}.*{re.escape(remedy)}$"):
        TokenStore.open(store.folder)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a finished token store"):
        TokenStore.open(tmp_path)
