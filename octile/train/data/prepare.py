"""Builds a token store from a corpus in four passes, without holding the corpus in memory.

1. `CorpusIndex` computes the digest and size of each document, which decide what is held out. Where documents are few,
   they are cut into spans and read once more.
2. The tokenizer is trained on a sample of the training documents.
3. The held-out documents are encoded.
4. The training documents are encoded, without the spans that held-out documents have, too (`shared_spans`).

Where the documents of a second corpus are held out, all of the first are training documents.

Before that, a pass over the files computes their digest. A store of the same text and settings is reused: that in the
folder, or one in the cache (`token_cache`).
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octile.checkpoint.files import checksum
from octile.report.machine import version_of
from octile.text import escape_control_characters, format_count
from octile.tokenizer import Tokenizer, check_vocab_size
from octile.train.data import token_cache
from octile.train.data.corpus import Corpus, Document, LeftOut, content_digest, is_url, open_corpus
from octile.train.data.corpus_index import CorpusIndex
from octile.train.data.spans import HeldOutSpans
from octile.train.data.token_store import FILES, LEFT_OUT, MANIFEST, Manifest, TokenStore, TokenWriter
from octile.train.source_digest import source_digest
from octile.validation import json_checksum

PREPARED_BY = (  # the source on which the tokens of a text depend
    "added_tokens.py",
    "byte_level.py",
    "tiktoken_model.py",
    "tokenizer.py",
    "train/data/arithmetic.py",
    "train/data/corpus.py",
    "train/data/corpus_index.py",
    "train/data/filter.py",
    "train/data/prepare.py",
    "train/data/spans.py",
    "train/data/token_store.py",
)
SAMPLE_BYTES = 16 * 2**20  # of text on which the tokenizer is trained
BUILDING = ".building-"  # begins the name of the folder in which a store is built
BATCH_CHARACTERS = 4 * 2**20  # that are encoded at a time

Progress = Callable[[str, float], None]


def prepare(
    source: str | Path,
    vocab_size: int,
    folder: str | Path,
    sequence_length: int,
    *,
    val_source: str | Path | None = None,
    tokenizer: str | Path | None = None,
    held_out_windows: int = 64,
    progress: Progress = lambda stage, share: None,
    say: Callable[[str], None] = lambda line: None,
) -> TokenStore:
    """Build the token store of a corpus in a folder, or reuse one with the same text and settings.

    One in the folder is reused, or else one in the cache (`token_cache`), of which the folder gets a copy.

    Args:
        source: "stdlib", a file, a folder or "hf:OWNER/NAME…": see `octile.train.data.corpus`. Or the URL of a token
            store that was prepared before, such as "s3://bucket/store": its tokens are streamed, not copied.
        vocab_size: the maximum number of tokens of the tokenizer; at least 258 if one is trained.
        folder: the folder of the store, or of the copy of a streamed store's tokenizer; other files in it are not
            changed. What a killed process left half-built is removed.
        sequence_length: S; a window is S + 1 tokens.
        val_source: a corpus of which all documents are held out, and none of `source`; not with a URL.
        tokenizer: a tokenizer.json, or its folder, to use instead of training one.
        held_out_windows: the minimum number of held-out windows, if a tenth of the text suffices for them.
        progress: called with the name of a stage and its progress from 0 to 1.
        say: called with a line if the store comes from the cache, or another process is waited for.

    Raises:
        FileNotFoundError: the source or the tokenizer does not exist, or the source is a folder without files.
        ValueError: there is no text or too little, or all of it is held out; the vocabulary is too small, or the
            existing store is damaged.
        RuntimeError: the text changed while it was read.
    """
    folder = Path(folder)
    check_not_inside(source, folder)
    if val_source is not None:
        check_not_inside(val_source, folder, "val_data")
    _check_positive(sequence_length=sequence_length, held_out_windows=held_out_windows)
    if tokenizer is None:
        check_vocab_size(vocab_size)
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    if given is not None and given.vocab_size > vocab_size:
        raise ValueError(f"tokenizer {str(tokenizer)!r} has {given.vocab_size} tokens, vocab_size is only {vocab_size}")
    if is_url(source):
        return _streamed(str(source), folder, vocab_size, given)
    progress("reading", 0.0)
    settings = {
        "text": _digest(source, val_source),
        "preparation": source_digest(PREPARED_BY),
        "versions": versions("tokenizers"),
        "vocab_size": vocab_size,
        "sequence_length": sequence_length,
        "held_out_windows": held_out_windows if val_source is None else None,
        "tokenizer": given and json_checksum([given.fingerprint, given.config]),
    }
    build = partial(_build, source=source, val_source=val_source, settings=settings, given=given, progress=progress)
    return reuse_or_build(folder, str(source), settings, build, say)


def _digest(source: str | Path, val_source: str | Path | None) -> str:
    """The digest of everything that is read."""
    digest = content_digest(source)
    return digest if val_source is None else json_checksum([digest, content_digest(val_source, "val_data")])


def check_not_inside(source: str | Path, folder: Path, name: str = "data") -> None:
    """Refuse a source that is a folder in which something is written: that would be read, too.

    Args:
        source: a source of data.
        folder: the folder that is written.
        name: the argument that names the source, for messages.

    Raises:
        ValueError: the source holds the folder, or the cache.
    """
    if Path(source).is_dir() and folder.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(
            f"{name} {str(source)!r} must not hold the folder {folder}: what is written would be read as text"
        )
    token_cache.check_outside(source, name)


def _streamed(url: str, folder: Path, vocab_size: int, tokenizer: Tokenizer | None) -> TokenStore:
    store = TokenStore.stream(url, folder)
    if store.manifest.vocab_size > vocab_size:
        raise ValueError(f"data {url!r} has {store.manifest.vocab_size} tokens, vocab_size is only {vocab_size}")
    if tokenizer is not None and tokenizer.fingerprint != store.tokenizer.fingerprint:
        raise ValueError(f"data {url!r} was tokenized with another tokenizer than that of the model")
    return store


def _check_positive(**arguments: int) -> None:
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def versions(*packages: str) -> list[str | None]:
    """The versions of Python and of packages, None for one that is not installed."""
    return [f"Python {sys.version_info.major}.{sys.version_info.minor}", *map(version_of, packages)]


def reuse_or_build(
    folder: Path,
    source: str,
    settings: dict[str, Any],
    build: Callable[[Path], Manifest],
    say: Callable[[str], None],
    reuse: bool = True,
) -> TokenStore:
    """Open the store of a folder if it has this source and these settings, or else one from the cache or a new one.

    What a killed process has left half-built in the folder is removed.

    Args:
        folder: the folder of the store.
        source: the name of the data.
        settings: everything on which the store depends.
        build: writes a store into an empty folder and returns its manifest.
        say: as in `token_cache.fetch`.
        reuse: whether a store that was built before may be used.

    Raises:
        ValueError: the store in the folder is damaged.
        Exception: what `build` raises.
    """
    for unfinished in folder.glob(BUILDING + "*"):
        shutil.rmtree(unfinished)
    if not reuse or not _is_built(folder, source, settings):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=BUILDING, dir=folder) as building:
            built = Path(building)
            new = partial(build, built)
            manifest = token_cache.fetch(settings, built, new, say) if reuse else new()
            replace(manifest, source=source).write(built)
            publish(built, folder, manifest)
    return TokenStore.open(folder)


def _is_built(folder: Path, source: str, settings: dict[str, Any]) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    there = Manifest.read(folder)
    return (there.source, there.settings) == (source, settings)


def _build(
    folder: Path,
    source: str | Path,
    val_source: str | Path | None,
    settings: dict[str, Any],
    given: Tokenizer | None,
    progress: Progress,
) -> Manifest:
    parts, span, left_out = _divide(source, val_source, settings)
    train, val = parts["train"], parts["val"]
    if given is None:
        progress("training the tokenizer", 0.0)
        sample = train.index.sample(set(val.digests), SAMPLE_BYTES)
        texts = (document.text for document in train.corpus.documents() if document.digest in sample)
        tokenizer = Tokenizer.train(texts, settings["vocab_size"])
    else:
        tokenizer = given
    tokenizer.save(folder)
    lines = (f"{reason}: {one_line(name)}\n" for reason, name in left_out)
    (folder / LEFT_OUT).write_text("".join(lines), encoding="utf-8")
    window = settings["sequence_length"] + 1
    tokens, cut_tokens = _encode(folder, parts, window, tokenizer, progress)
    if _digest(source, val_source) != settings["text"]:  # other files than documents, whose changes are refused
        settings = {**settings, "text": None}

    skipped = dict(Counter(reason for reason, _ in left_out))
    if min(tokens.values()) < window:
        index = train.index
        size = f"{format_count(len(index.sizes), 'document')}, {format_count(index.total_bytes, 'byte')}"
        reasons = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped.items())
        others = f"; left out: {', '.join(reasons)}" if skipped else ""
        holder = "they are held out" if val_source is None else f"val_data {str(val_source)!r} has them"
        cut = f"; {cut_tokens:,} more are left out because {holder}, too" if cut_tokens else ""
        raise ValueError(
            f"data {str(source)!r} has too little text: {size}; {format_count(tokens['train'], 'token')} "
            f"to train on and {tokens['val']:,} held out, with those at the ends of documents, but each of the two "
            f"needs at least {window:,}{cut}{others}"
        )
    manifest = Manifest(
        source=str(source),
        settings=settings,
        fingerprint=train.index.fingerprint,
        vocab_size=tokenizer.vocab_size,
        documents={name: len(part.digests) for name, part in parts.items()},
        bytes={name: part.bytes for name, part in parts.items()},
        tokens=tokens,
        skipped=skipped,
        span=span,
        cut_tokens=cut_tokens,
        sha256={name: checksum(folder / name)["sha256"] for name in FILES},
    )
    manifest.write(folder)
    return manifest


@dataclass(frozen=True)
class _Part:
    """The documents of a corpus that are trained on, or held out: those with these digests."""

    argument: str  # that names the corpus, "data" or "val_data"
    corpus: Corpus
    index: CorpusIndex
    digests: Set[bytes]

    @property
    def bytes(self) -> int:
        return sum(self.index.sizes[digest] for digest in self.digests)

    def documents(self) -> Iterator[Document]:
        """Its documents. Raises RuntimeError after the last one if the corpus is not that of the index any more."""
        read = hashlib.sha256()
        for document in self.corpus.documents():
            read.update(document.digest)
            if document.digest in self.digests:
                yield document
        if read.hexdigest() != self.index.fingerprint:
            raise RuntimeError(
                f"{self.argument} {self.corpus.source!r} changed while it was read; start again when it no longer "
                "changes"
            )


def _divide(
    source: str | Path, val_source: str | Path | None, settings: dict[str, Any]
) -> tuple[dict[str, _Part], int | None, list[LeftOut]]:
    """The parts "train" and "val", the characters of the spans of a corpus that is cut, and what is left out."""
    corpus = open_corpus(source)
    index = CorpusIndex.of(corpus)
    if val_source is not None:
        val_corpus = open_corpus(val_source, "val_data")
        val_index = CorpusIndex.of(val_corpus)
        if index.sizes and index.sizes.keys() <= val_index.sizes.keys():
            raise ValueError(
                f"val_data {str(val_source)!r} must leave documents to train on, but it has every document of data "
                f"{str(source)!r}: name other text"
            )
        parts = {
            "train": _Part("data", corpus, index, index.sizes.keys()),
            "val": _Part("val_data", val_corpus, val_index, val_index.sizes.keys()),
        }
        val_left_out = (LeftOut(reason, f"val_data: {name}") for reason, name in val_index.left_out)
        return parts, None, [*index.left_out, *val_left_out]
    selection = settings["sequence_length"], settings["held_out_windows"]
    span = index.span(*selection)
    if span is not None:
        corpus = corpus.in_spans(span)
        index = CorpusIndex.of(corpus)
    held_out = index.hold_out(*selection)
    digests = {"train": index.sizes.keys() - held_out, "val": held_out}
    return {name: _Part("data", corpus, index, part) for name, part in digests.items()}, span, [*index.left_out]


def one_line(name: str) -> str:
    """A name as it stands in a line of left_out.txt."""
    return escape_control_characters(name).replace("\n", r"\n")


def _encode(
    folder: Path, parts: Mapping[str, _Part], window: int, tokenizer: Tokenizer, progress: Progress
) -> tuple[dict[str, int], int]:
    """Write train.npy and val.npy; return the number of tokens of each, and of those cut out of the training part.

    Raises:
        ValueError: a corpus of its own that is held out has no window of tokens.
    """
    done, total = 0, sum(part.bytes for part in parts.values())
    spans = HeldOutSpans((tokenizer.begin, tokenizer.end))

    def encoded(part: _Part) -> Iterator[list[npt.NDArray[np.integer]]]:
        nonlocal done
        for batch in batches_of_text(part.documents()):
            progress("encoding", done / total)
            done += sum(part.index.sizes[document.digest] for document in batch)
            yield encode_documents(batch, tokenizer)

    with TokenWriter(folder / "val.npy", tokenizer.vocab_size) as val:
        for documents in encoded(parts["val"]):
            spans.add(documents)
            for tokens in documents:
                val.append(tokens)
    if parts["val"].argument == "val_data" and val.length < window:
        raise ValueError(
            f"val_data {parts['val'].corpus.source!r} has too little text: {format_count(val.length, 'token')}, with "
            f"those at the ends of documents, but at least {window:,} are needed"
        )
    with TokenWriter(folder / "train.npy", tokenizer.vocab_size) as train:
        for documents in encoded(parts["train"]):
            for tokens in spans.cut(documents):
                train.append(tokens)
    return {"train": train.length, "val": val.length}, spans.cut_tokens


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[npt.NDArray[np.integer]]:
    """Return the ids of each document, from <|begin|> to <|end|>."""
    ids = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([tokenizer.begin, *tokens, tokenizer.end]) for tokens in ids]


def batches_of_text(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in batches that are encoded at a time: of BATCH_CHARACTERS or little more."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def publish(building: Path, folder: Path, manifest: Manifest) -> None:
    """Move a built store to its folder, the manifest last, so that it never describes files of another build."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in (*manifest.files, LEFT_OUT, MANIFEST):
        os.replace(building / name, folder / name)
