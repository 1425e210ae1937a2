"""Tests of `prepare`: a document is in one part, training or held-out, and only valid stores are reused."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from octile.tokenizer import Tokenizer
from octile.train.data import prepare as data
from octile.train.data.corpus import Corpus, NamedText, open_corpus
from octile.train.data.prepare import prepare
from octile.train.data.spans import SPAN
from octile.train.data.token_store import FILES, TokenStore

VOCAB_SIZE, SEQUENCE_LENGTH = 300, 16


def document(n: int) -> str:
    return "".join(f"{n} times {k} is {n * k}\n" for k in range(40))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A new cache of tokens."""
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n:02}.txt").write_text(document(n))
    return folder


def build(source: Path, folder: Path, **settings) -> TokenStore:
    return prepare(source, settings.pop("vocab_size", VOCAB_SIZE), folder, SEQUENCE_LENGTH, **settings)


def texts(store: TokenStore, tokens: np.ndarray) -> list[str]:
    """Split a token array into its documents and decode them."""
    ends = np.flatnonzero(tokens == store.tokenizer.end)
    assert ends[-1] == len(tokens) - 1
    documents = np.split(tokens, ends + 1)[:-1]
    assert all(document[0] == store.tokenizer.begin for document in documents)
    return [store.tokenizer.decode(document[1:-1].tolist()) for document in documents]


def test_every_document_is_stored_once(source, tmp_path):
    store = build(source, tmp_path / "data")
    everything = texts(store, store.train) + texts(store, store.val)
    assert Counter(everything) == Counter(open_corpus(source).texts())


def test_no_document_is_in_both_parts(source, tmp_path):
    for copy in range(10):  # exact copies under other names could be in either part
        (source / f"copy{copy}.txt").write_text(document(copy))
    store = build(source, tmp_path / "data")
    assert not set(texts(store, store.train)) & set(texts(store, store.val))


def test_no_long_span_of_held_out_text_is_trained_on(source, tmp_path):
    license = "".join(f"condition {n} of the license, which holds for {n + 1} of them\n" for n in range(20))
    for file in source.iterdir():
        file.write_text(license + file.read_text())
    store = build(source, tmp_path / "data")
    assert any(license in text for text in texts(store, store.val))
    train, val = (
        {tuple(part[i : i + SPAN].tolist()) for i in range(len(part) - SPAN)} for part in (store.train, store.val)
    )
    specials = {store.tokenizer.begin, store.tokenizer.end}
    assert not {span for span in train & val if not specials & set(span)}
    assert store.manifest.cut_tokens > 50 * len(store.tokenizer.encode(license))


def test_the_tokenizer_is_trained_on_the_training_part_alone(source, tmp_path):
    store = build(source, tmp_path / "data")
    assert Tokenizer.train(texts(store, store.train), VOCAB_SIZE).fingerprint == store.tokenizer.fingerprint


def test_held_out_documents_stay_held_out_when_others_are_added(source, tmp_path):
    before = build(source, tmp_path / "before", held_out_windows=1)
    (source / "more.txt").write_text(document(100))
    after = build(source, tmp_path / "after", held_out_windows=1)
    assert not set(texts(before, before.val)) & set(texts(after, after.train))


def test_the_manifest_counts_documents_bytes_and_skipped_files(source, tmp_path):
    (source / "empty.txt").write_text("\n")
    (source / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    (source / "copy.txt").write_text(document(0))
    manifest = build(source, tmp_path / "data").manifest
    assert manifest.skipped == {"empty": 1, "not_text": 1, "duplicate": 1}
    assert sum(manifest.documents.values()) == 60
    assert sum(manifest.bytes.values()) == sum(len(document(n)) for n in range(60))


def test_what_is_left_out_is_named_in_a_file(source, tmp_path):
    (source / "empty.txt").write_text("\n")
    (source / "two\nlines.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    (source / "copy.txt").write_text(document(0))
    store = build(source, tmp_path / "data")
    named = (store.folder / "left_out.txt").read_text()
    assert named == "not_text: two\\nlines.jpg\nduplicate: copy.txt\nempty: empty.txt\n"


def test_the_first_names_of_each_reason_can_be_read(source, tmp_path):
    for n in range(5):
        (source / f"photo{n}.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    assert build(source, tmp_path / "data").left_out(2) == {"not_text": ["photo0.jpg", "photo1.jpg"]}


def test_what_a_killed_process_left_half_built_is_removed(source, tmp_path):
    (tmp_path / "data" / ".building-x").mkdir(parents=True)
    (tmp_path / "data" / ".building-x" / "train.npy").touch()
    store = build(source, tmp_path / "data")
    assert {path.name for path in store.folder.iterdir()} == {*FILES, "left_out.txt", "manifest.json"}


def test_two_builds_are_identical(source, tmp_path):
    one, two = build(source, tmp_path / "one"), build(source, tmp_path / "two")
    assert one.manifest == two.manifest
    assert all((one.folder / name).read_bytes() == (two.folder / name).read_bytes() for name in FILES)


def test_batching_does_not_change_the_tokens(source, tmp_path, monkeypatch):
    whole = build(source, tmp_path / "whole")
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 1)
    assert build(source, tmp_path / "pieces").manifest == whole.manifest


@pytest.fixture
def stages() -> list[str]:
    return []


@pytest.fixture
def built(source, tmp_path) -> TokenStore:
    return build(source, tmp_path / "data")


def test_same_text_and_settings_reuse_the_store(source, built, stages):
    build(source, built.folder, progress=lambda stage, share: stages.append(stage))
    assert "encoding" not in stages


def test_changed_text_is_encoded_again(source, built):
    (source / "00.txt").write_text("something else\n" * 50)
    after = build(source, built.folder)
    assert "something else\n" * 50 in texts(after, after.train) + texts(after, after.val)


def test_changed_settings_train_another_tokenizer(source, built):
    assert build(source, built.folder, vocab_size=280).tokenizer.vocab_size == 280


def test_an_unfinished_store_is_built_again(source, built, stages, cache):
    shutil.rmtree(cache)
    (built.folder / "manifest.json").unlink()
    build(source, built.folder, progress=lambda stage, share: stages.append(stage))
    assert "encoding" in stages


def test_a_damaged_store_is_refused(source, built):
    (built.folder / "train.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged: train.npy fails its checksum; delete it"):
        build(source, built.folder)


def test_a_failed_build_keeps_the_old_store(source, built, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.TokenWriter, "append", full_disk)
    with pytest.raises(OSError, match="No space left"):
        build(source, built.folder, vocab_size=280)
    assert TokenStore.open(built.folder).manifest == built.manifest


def test_a_failed_build_leaves_no_files(source, tmp_path):
    with pytest.raises(ValueError, match="too little text"):
        prepare(source, VOCAB_SIZE, tmp_path / "data", 10**6)
    assert not list((tmp_path / "data").iterdir())


def test_other_files_in_the_folder_are_left_alone(source, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes").write_text("mine")
    build(source, tmp_path / "data")
    assert (tmp_path / "data" / "notes").read_text() == "mine"


def test_a_given_tokenizer_is_used(source, tmp_path):
    given = Tokenizer.train(["other text, other text"], 270)
    given.save(tmp_path)
    store = build(source, tmp_path / "data", tokenizer=tmp_path / "tokenizer.json")
    assert store.tokenizer.fingerprint == given.fingerprint


def test_a_given_tokenizer_may_have_fewer_tokens_than_there_are_bytes(source, tmp_path):
    vocabulary = {"<|begin|>": 0, "<|end|>": 1, "\n": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    Tokenizer(backend, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}).save(tmp_path)
    store = build(source, tmp_path / "data", vocab_size=3, tokenizer=tmp_path / "tokenizer.json")
    assert store.tokenizer.vocab_size == 3


def test_a_given_tokenizer_larger_than_the_vocabulary_is_refused(source, built, tmp_path):
    with pytest.raises(ValueError, match="has 300 tokens, vocab_size is only 299"):
        build(source, tmp_path / "other", vocab_size=299, tokenizer=built.folder)


def test_one_short_file_is_enough(tmp_path):
    (tmp_path / "text.txt").write_text(document(7) * 3)
    store = build(tmp_path / "text.txt", tmp_path / "data")
    assert min(len(store.train), len(store.val)) > SEQUENCE_LENGTH


@pytest.fixture
def two_files(tmp_path) -> Path:
    """A folder of a file of 10 kB and one of 60 kB."""
    folder = tmp_path / "two"
    folder.mkdir()
    for name, begin, size in (("short", 0, 10_000), ("long", 1000, 60_000)):
        text = "".join(document(n) for n in range(begin, begin + 200))
        (folder / f"{name}.txt").write_text(text[:size].rpartition("\n")[0] + "\n")
    return folder


def test_of_two_files_about_a_tenth_is_held_out(two_files, tmp_path):
    manifest = build(two_files, tmp_path / "data").manifest
    assert 0.08 < manifest.held_out_share <= 0.1


def test_held_out_spans_of_two_files_are_whole_lines_that_are_not_trained_on(two_files, tmp_path):
    store = build(two_files, tmp_path / "data")
    trained, held_out = ("".join(texts(store, tokens)).splitlines() for tokens in (store.train, store.val))
    lines = "".join(open_corpus(two_files).texts()).splitlines()
    assert Counter(trained) + Counter(held_out) == Counter(lines)
    assert not set(trained) & set(held_out)


def test_spans_are_held_out_of_both_files(two_files, tmp_path):
    store = build(two_files, tmp_path / "data")
    held_out = texts(store, store.val)
    assert {any(span in text for span in held_out) for text in open_corpus(two_files).texts()} == {True}


def test_a_store_of_an_earlier_version_is_built_again(source, built, stages, cache):
    shutil.rmtree(cache)
    manifest = json.loads((built.folder / "manifest.json").read_text())
    del manifest["settings"]["preparation"], manifest["span"]
    (built.folder / "manifest.json").write_text(json.dumps(manifest))
    build(source, built.folder, progress=lambda stage, share: stages.append(stage))
    assert "encoding" in stages


def test_too_little_text_is_refused_with_the_numbers(tmp_path):
    (tmp_path / "text.txt").write_text("two words")
    numbers = "1 document, 9 bytes; 9 tokens to train on and 0 held out, with those at the ends of documents, but each "
    numbers += "of the two needs at least 17"
    with pytest.raises(ValueError, match=rf"^data '.*' has too little text: {numbers}$"):
        build(tmp_path / "text.txt", tmp_path / "data")


def test_too_little_text_says_what_was_left_out(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("two words")
    with pytest.raises(ValueError, match=r"needs at least 17; left out: 1 duplicate$"):
        build(tmp_path / "texts", tmp_path / "data")


def test_a_folder_inside_the_source_is_refused(source):
    with pytest.raises(ValueError, match=f"data '{source}' must not hold the folder {source / 'data'}: "):
        build(source, source / "data")


def test_a_too_small_vocabulary_is_refused_before_any_work(source, tmp_path):
    with pytest.raises(ValueError, match="at least 258"):
        build(source, tmp_path / "data", vocab_size=100)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("argument", ["sequence_length", "held_out_windows"])
def test_sizes_below_one_are_refused(source, tmp_path, argument):
    arguments = {"sequence_length": SEQUENCE_LENGTH, argument: 0}
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, not 0"):
        prepare(source, VOCAB_SIZE, tmp_path / "data", **arguments)


def test_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    readings = iter(range(100))

    def changing():
        reading = next(readings)
        yield from (NamedText(f"row {n}", document(100 * reading + n)) for n in range(20))

    monkeypatch.setattr(data, "open_corpus", lambda source: Corpus(str(source), (), changing))
    monkeypatch.setattr(data, "content_digest", lambda source: "")
    with pytest.raises(RuntimeError, match="changed while it was read"):
        build(Path("changing"), tmp_path / "data")


@pytest.fixture
def val_source(tmp_path) -> Path:
    file = tmp_path / "val.txt"
    file.write_text(document(77))
    return file


def test_validation_data_are_held_out_and_nothing_else(source, val_source, tmp_path):
    store = build(source, tmp_path / "data", val_source=val_source)
    assert Counter(texts(store, store.train)) == Counter(open_corpus(source).texts())
    assert texts(store, store.val) == [document(77)]
    assert store.manifest.documents == {"train": 60, "val": 1}
    assert store.manifest.bytes["val"] == len(document(77))


def test_the_tokenizer_is_not_trained_on_validation_data(source, val_source, tmp_path):
    store = build(source, tmp_path / "data", val_source=val_source)
    assert Tokenizer.train(texts(store, store.train), VOCAB_SIZE).fingerprint == store.tokenizer.fingerprint


def test_validation_data_in_the_training_text_are_cut_out_of_it(source, val_source, tmp_path):
    (source / "copy.txt").write_text(document(77))
    store = build(source, tmp_path / "data", val_source=val_source)
    assert document(77) not in texts(store, store.train)
    assert store.manifest.cut_tokens == store.manifest.tokens["val"] - 2  # without those at the ends


def test_other_validation_data_are_encoded_again(source, val_source, tmp_path):
    build(source, tmp_path / "data", val_source=val_source)
    val_source.write_text(document(78))
    store = build(source, tmp_path / "data", val_source=val_source)
    assert texts(store, store.val) == [document(78)]


def test_too_little_validation_text_is_refused_before_training_text_is_encoded(source, val_source, tmp_path):
    val_source.write_text("two words")
    shares: list[float] = []
    with pytest.raises(
        ValueError, match=r"^val_data '.*' has too little text: .* tokens, with .*, but at least 17 are needed$"
    ):
        build(source, tmp_path / "data", val_source=val_source, progress=lambda stage, share: shares.append(share))
    assert set(shares) == {0.0}


def test_validation_data_with_all_documents_of_the_training_text_are_refused_before_they_are_encoded(source, tmp_path):
    stages: list[str] = []
    (tmp_path / "val").mkdir()
    for n in range(61):
        (tmp_path / "val" / f"{n}.txt").write_text(document(n))
    with pytest.raises(
        ValueError, match=r"^val_data '.*val' must leave documents to train on, but it has every document of data '.*e'"
    ):
        build(source, tmp_path / "data", val_source=tmp_path / "val", progress=lambda stage, _: stages.append(stage))
    assert stages == ["reading"]


def test_too_little_text_that_is_not_in_the_validation_data_is_refused_with_their_name(source, val_source, tmp_path):
    val_source.write_text("\n".join(map(document, range(60))))
    with pytest.raises(
        ValueError, match=r"^data '.*' has too little text: .* left out because val_data '.*' has them, too$"
    ):
        build(source, tmp_path / "data", val_source=val_source)


def test_what_is_left_out_of_validation_data_is_named_as_such(source, tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "text.txt").write_text(document(77))
    (tmp_path / "val" / "empty.txt").touch()
    store = build(source, tmp_path / "data", val_source=tmp_path / "val")
    assert store.left_out(3) == {"empty": ["val_data: empty.txt"]}
