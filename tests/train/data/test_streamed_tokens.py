"""Tests of token stores under a URL: their tokens are those of the local store, read by ranges, and damage is found."""

import json

import fsspec
import numpy as np
import pytest

from octile.checkpoint.store import Store
from octile.train.data.batches import Batches, validation_windows
from octile.train.data.corpus import check_source
from octile.train.data.prepare import prepare
from octile.train.data.token_store import FILES, LEFT_OUT, MANIFEST, TokenStore

URL = "memory://bucket/data"
LENGTH = 16


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> TokenStore:
    file = tmp_path_factory.mktemp("source") / "text.txt"
    file.write_text("".join(f"line {n} of a text, {n * n}\n" for n in range(1000)))
    return prepare(file, 300, tmp_path_factory.mktemp("run") / "data", LENGTH)


@pytest.fixture(autouse=True)
def remote(local) -> fsspec.AbstractFileSystem:
    fs = fsspec.filesystem("memory")
    for name in (*FILES, LEFT_OUT, MANIFEST):
        fs.pipe_file(f"{URL}/{name}", (local.folder / name).read_bytes())
    return fs


@pytest.fixture
def streamed(tmp_path) -> TokenStore:
    return prepare(URL, 300, tmp_path / "data", LENGTH)


def test_batches_are_those_of_the_local_store(local, streamed):
    batches = [Batches(store.train, 8, LENGTH, seed=3) for store in (local, streamed)]
    for step in (0, 1, 7, batches[0].n_windows // 8):
        assert batches[0].batch(step).equal(batches[1].batch(step))


def test_held_out_windows_are_those_of_the_local_store(local, streamed):
    assert validation_windows(streamed.val, LENGTH, 5).equal(validation_windows(local.val, LENGTH, 5))


def test_ranges_are_those_of_the_local_store(local, streamed):
    assert np.array_equal(streamed.train[5:90], local.train[5:90])
    assert np.array_equal(streamed.train[-7:], local.train[-7:])


def test_streamed_tokens_are_not_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "cache"))
    prepare(URL, 300, tmp_path / "data", LENGTH)
    assert not (tmp_path / "cache").exists()


def test_the_digest_is_that_of_the_local_store(local, streamed):
    assert streamed.digest == local.digest


def test_a_batch_reads_only_its_tokens(streamed, monkeypatch):
    read, read_ranges = [], Store.read_ranges

    def count(self, name, begins, nbytes):
        read.append(len(begins) * nbytes)
        return read_ranges(self, name, begins, nbytes)

    monkeypatch.setattr(Store, "read_ranges", count)
    Batches(streamed.train, 8, LENGTH, seed=3).batch(0)
    assert read == [8 * (LENGTH + 1) * streamed.train.dtype.itemsize]


def test_a_rank_reads_its_part_of_a_batch_only(streamed, monkeypatch):
    read, read_ranges = [], Store.read_ranges

    def count(self, name, begins, nbytes):
        read.append(len(begins))
        return read_ranges(self, name, begins, nbytes)

    monkeypatch.setattr(Store, "read_ranges", count)
    Batches(streamed.train, 8, LENGTH, seed=3).batch(0, rank=1, n_ranks=4)
    assert read == [2]


def test_no_tokens_are_copied(streamed):
    names = {path.name for path in streamed.folder.iterdir()}
    assert names == {LEFT_OUT, MANIFEST, "tokenizer.json", "tokenizer_config.json"}


def test_a_run_opens_its_streamed_store_again(streamed):
    again = TokenStore.open(streamed.folder)
    assert np.array_equal(again.train[:50], streamed.train[:50])
    assert again.digest == streamed.digest


def test_other_tokens_than_those_that_a_run_began_with_are_refused(streamed, remote):
    manifest = json.loads(remote.cat_file(f"{URL}/{MANIFEST}"))
    manifest["sha256"]["train.npy"] = "0" * 64
    remote.pipe_file(f"{URL}/{MANIFEST}", json.dumps(manifest).encode())
    with pytest.raises(ValueError, match=f"{URL} has other tokens than when"):
        TokenStore.open(streamed.folder)


@pytest.mark.parametrize("name", ["train.npy", "val.npy"])
def test_a_truncated_file_is_named(remote, tmp_path, name):
    remote.pipe_file(f"{URL}/{name}", remote.cat_file(f"{URL}/{name}")[:-2])
    with pytest.raises(ValueError, match=f"{URL}/{name} is damaged: .* bytes for"):
        prepare(URL, 300, tmp_path, LENGTH)


@pytest.mark.parametrize("name", ["train.npy", "tokenizer.json", LEFT_OUT])
def test_a_missing_file_is_named(remote, tmp_path, name):
    remote.rm_file(f"{URL}/{name}")
    with pytest.raises(FileNotFoundError, match=name):
        prepare(URL, 300, tmp_path, LENGTH)


def test_a_damaged_tokenizer_is_named(remote, tmp_path):
    remote.pipe_file(f"{URL}/tokenizer.json", b"{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json fails its checksum"):
        prepare(URL, 300, tmp_path, LENGTH)


def test_a_token_outside_the_vocabulary_is_found(remote, tmp_path):
    content = bytearray(remote.cat_file(f"{URL}/train.npy"))
    content[-1] = 255
    remote.pipe_file(f"{URL}/train.npy", bytes(content))
    with pytest.raises(ValueError, match=r"train\.npy is damaged: it holds the token 65\d+, the vocabulary has 300"):
        prepare(URL, 300, tmp_path, LENGTH).train[-3:]


def test_an_unfinished_store_is_refused(remote, tmp_path):
    remote.rm_file(f"{URL}/{MANIFEST}")
    with pytest.raises(FileNotFoundError, match=r"is not a finished token store: it has no manifest\.json"):
        prepare(URL, 300, tmp_path, LENGTH)


def test_a_larger_vocabulary_than_the_models_is_refused(local, tmp_path):
    size = local.manifest.vocab_size
    with pytest.raises(ValueError, match=f"has {size} tokens, vocab_size is only {size - 1}"):
        prepare(URL, size - 1, tmp_path, LENGTH)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match="data 'nowhere://data' cannot be read: Protocol not known: nowhere"):
        check_source("nowhere://data")
