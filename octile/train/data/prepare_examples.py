"""Builds a token store of packed sequences from a file of examples, or all of a folder.

A store of the same examples and settings is reused: that in the folder, or one in the cache (`token_cache`). Otherwise
each example is rendered and encoded, cut at the end if it is longer than a sequence, and left out if no token of it has
a loss then. Examples with the same prompt are held out together: by the digest of the tokens before the first
answer to a user, by the rule by which documents are (`CorpusIndex.hold_out`). Where further examples are given to be
held out, all others are trained on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octile.chat.template import ChatTemplate
from octile.checkpoint.files import checksum
from octile.tokenizer import Tokenizer
from octile.train.data.corpus import LeftOut
from octile.train.data.corpus_index import BYTES_PER_TOKEN, CorpusIndex
from octile.train.data.examples import Example, example_files, read_examples
from octile.train.data.packed_tokens import FIRST, LOSS, best_fit
from octile.train.data.prepare import Progress, check_not_inside, one_line, reuse_or_build, versions
from octile.train.data.token_store import LEFT_OUT, PARTS, Manifest, Packed, TokenStore, TokenWriter
from octile.train.source_digest import source_digest
from octile.validation import json_checksum

PREPARED_BY = (  # the source on which the tokens of examples depend
    "added_tokens.py",
    "byte_level.py",
    "chat/template.py",
    "chat/thought.py",
    "tiktoken_model.py",
    "tokenizer.py",
    "train/data/corpus_index.py",
    "train/data/examples.py",
    "train/data/packed_tokens.py",
    "train/data/prepare_examples.py",
    "train/data/token_store.py",
)
NO_LOSS = "without_a_token_that_has_a_loss"
ANSWER_CUT = "whose_answer_begins_after_the_end_of_a_sequence"
ARGUMENTS = {"train": "data", "val": "val_data"}  # that name the sources of the parts


@dataclass(frozen=True)
class _Text:
    """A text that is trained on or held out: tokens, marks and its line's bytes."""

    prompt: bytes
    tokens: npt.NDArray[np.uint32]
    marks: npt.NDArray[np.uint8]
    n_bytes: int


def prepare_examples(
    source: str | Path,
    folder: str | Path,
    sequence_length: int,
    tokenizer: str | Path,
    *,
    val_source: str | Path | None = None,
    held_out_sequences: int = 64,
    progress: Progress = lambda stage, share: None,
    say: Callable[[str], None] = lambda line: None,
) -> TokenStore:
    """Build the token store of examples in a folder, or reuse one with the same examples and settings.

    One in the folder is reused, or else one in the cache (`token_cache`), of which the folder gets a copy; but not
    where the chat template reads the clock.

    Args:
        source: the file of examples, or a folder of them, whose files are read in the order of their names.
        folder: the folder of the store; other files in it are not changed. What a killed process left half-built is
            removed.
        sequence_length: S.
        tokenizer: the folder of the tokenizer and its chat template.
        val_source: examples of which all are held out, and none of `source`.
        held_out_sequences: the minimum of held-out sequences, if a tenth of the tokens suffices for them.
        progress: called with the name of a stage and its progress from 0 to 1.
        say: called with a line if the store comes from the cache, or another process is waited for.

    Raises:
        FileNotFoundError: the tokenizer does not exist.
        ValueError: a line is no example, there are too few, or the store in the folder is damaged. The source is a
            folder that holds the store's folder or the cache.
    """
    folder = Path(folder)
    sources = {"train": Path(source)} if val_source is None else {"val": Path(val_source), "train": Path(source)}
    for part, each in sources.items():
        check_not_inside(each, folder, ARGUMENTS[part])
    progress("reading", 0.0)
    loaded = Tokenizer.load(tokenizer)
    template = ChatTemplate.load(Path(tokenizer), loaded)
    settings = {
        "text": _digest(sources),
        "preparation": source_digest(PREPARED_BY),
        "versions": versions("tokenizers", "jinja2"),
        "sequence_length": sequence_length,
        "held_out_sequences": held_out_sequences if val_source is None else None,
        "tokenizer": json_checksum([loaded.fingerprint, loaded.config, template.texts]),
    }
    build = partial(_build, sources=sources, settings=settings, tokenizer=loaded, template=template, progress=progress)
    return reuse_or_build(folder, str(source), settings, build, say, reuse=not template.reads_clock)


def _build(
    folder: Path,
    sources: Mapping[str, Path],
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    progress: Progress,
) -> Manifest:
    sequence_length = settings["sequence_length"]
    texts = {part: list[_Text]() for part in sources}
    left_out, lengths, empty = list[LeftOut](), list[int](), list[str]()
    files = [(part, file) for part, source in sources.items() for file in example_files(source)]
    done, total = 0, max(sum(file.stat().st_size for _, file in files), 1)
    for part, file in files:
        source = sources[part]
        where = ("val_data: " if part == "val" else "") + ("" if file == source else f"{_name(file, source)}, ")
        for example in read_examples(file, tokenizer, template):
            done += example.n_bytes
            progress("encoding", done / total)
            lengths.append(len(example.tokens))
            name, text = f"{where}line {example.line}", _text(example, sequence_length)
            if text is None:
                left_out.append(LeftOut(ANSWER_CUT if any(example.has_loss[1:]) else NO_LOSS, name))
            else:
                texts[part].append(text)
                empty += [name] * example.empty_answers
    counts = Counter(reason.replace("_", " ") for reason, _ in left_out)
    without = "".join(f"; left out: {count:,} {reason}" for reason, count in counts.items())
    for part, source in sources.items():
        if not texts[part] and "val" in sources:
            raise ValueError(f"{ARGUMENTS[part]} {str(source)!r} has no example that can be used{without}")
    if "val" not in sources and len({text.prompt for text in texts["train"]}) < 2:
        raise ValueError(
            f"data {str(source)!r} has too few examples: at least two with different prompts are needed, one to train "
            f"on and one to hold out, and {len(texts['train'])} can be used{without}"
        )
    tokenizer.save(folder)
    (folder / LEFT_OUT).write_text("".join(f"{reason}: {line}\n" for reason, line in left_out), "utf-8")
    parts = texts
    if "val" not in sources:
        split = _split(texts["train"], sequence_length, settings["held_out_sequences"])
        parts = dict(zip(PARTS, split, strict=True))
    trained = {text.prompt for text in parts["train"]}
    packed = Packed(
        sequence_length=sequence_length,
        max_texts=0,
        labels={part: sum(int((text.marks & LOSS != 0).sum()) for text in parts[part]) for part in PARTS},
        padding={},
        truncated=sum(length > sequence_length for length in lengths),
        longest=max(lengths),
        has_plain_template=template.is_plain,
        empty_answers=len(empty),
        first_empty_answer=empty[0] if empty else None,
        shared_prompts=sum(text.prompt in trained for text in parts["val"]),
    )
    for part in PARTS:
        max_texts, padding = _write(folder, part, parts[part], sequence_length, tokenizer)
        packed = replace(packed, max_texts=max(packed.max_texts, max_texts), padding={**packed.padding, part: padding})
    digest = _digest(sources)
    manifest = Manifest(
        source=str(sources["train"]),
        settings=settings if digest == settings["text"] else {**settings, "text": None},  # a file has changed meanwhile
        fingerprint=digest,
        vocab_size=tokenizer.vocab_size,
        documents={part: len(parts[part]) for part in PARTS},
        bytes={part: sum(text.n_bytes for text in parts[part]) for part in PARTS},
        tokens={part: sum(len(text.tokens) for text in parts[part]) for part in PARTS},
        skipped=dict(Counter(reason for reason, _ in left_out)),
        sha256={},
        packed=packed,
    )
    manifest = replace(manifest, sha256={name: checksum(folder / name)["sha256"] for name in manifest.files})
    manifest.write(folder)
    return manifest


def _digest(sources: Mapping[str, Path]) -> str:
    """The SHA-256 of everything that is read."""
    digests = {part: _source_digest(source) for part, source in sources.items()}
    return json_checksum(digests) if "val" in digests else digests["train"]


def _source_digest(source: Path) -> str:
    """The SHA-256 of a file, or of the names and contents of a folder's."""
    if not source.is_dir():
        sha256: str = checksum(source)["sha256"]
        return sha256
    return json_checksum([[_name(file, source), checksum(file)["sha256"]] for file in example_files(source)])


def _name(file: Path, folder: Path) -> str:
    return one_line(file.relative_to(folder).as_posix())


def _text(example: Example, sequence_length: int) -> _Text | None:
    """Cut an example to a sequence; None if no token of it has a loss then. The first token is never predicted."""
    tokens = np.array(example.tokens[:sequence_length], np.uint32)
    has_loss = np.array(example.has_loss[:sequence_length], bool)
    has_loss[:1] = False
    if not has_loss.any():
        return None
    marks = np.where(has_loss, LOSS, 0).astype(np.uint8)
    marks[0] |= FIRST
    prompt = hashlib.sha256(np.array(example.prompt, np.uint32).tobytes()).digest()[:16]
    return _Text(prompt, tokens, marks, example.n_bytes)


def _split(texts: Sequence[_Text], sequence_length: int, held_out_sequences: int) -> tuple[list[_Text], list[_Text]]:
    """The texts to train on, and those that are held out: at least one of each."""
    sizes: dict[bytes, int] = {}
    for text in texts:
        sizes[text.prompt] = sizes.get(text.prompt, 0) + BYTES_PER_TOKEN * len(text.tokens)  # the index counts bytes
    smallest = min(sizes, key=lambda prompt: (sizes[prompt], prompt))
    held_out = CorpusIndex(sizes, ()).hold_out(sequence_length - 1, held_out_sequences) or {smallest}
    train = [text for text in texts if text.prompt not in held_out]
    return train, [text for text in texts if text.prompt in held_out]


def _write(
    folder: Path, part: str, texts: Sequence[_Text], sequence_length: int, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Pack texts and write tokens and marks; return the most texts of a sequence, padding included, and all padding."""
    max_texts = padding = 0
    with (
        TokenWriter(folder / f"{part}.npy", tokenizer.vocab_size) as tokens,
        TokenWriter(folder / f"{part}_marks.npy", np.dtype(np.uint8)) as marks,
    ):
        for sequence in best_fit([len(text.tokens) for text in texts], sequence_length):
            for number in sequence:
                tokens.append(texts[number].tokens)
                marks.append(texts[number].marks)
            left = sequence_length - sum(len(texts[number].tokens) for number in sequence)
            if left:
                tokens.append([tokenizer.end] * left)
                marks.append([FIRST] + [0] * (left - 1))
            max_texts = max(max_texts, len(sequence) + bool(left))
            padding += left
    return max_texts, padding
