"""Build the training text from pinned versions of PyPI packages and GitHub repositories.

    python -m experiments.loss.text fetch .data [--long]    pip download, git clone: .data/packages, .data/repositories
    python -m experiments.loss.text build .data             .data/text (UTF-8 files) and .data/tokens (a token store)
    python -m experiments.loss.text extend .data .data/tokens .data/long    the store of the longer text
    python -m experiments.loss.text pack STORE DIR          compresses a store into DIR/part1, DIR/part2, …
    python -m experiments.loss.text unpack STORE PART…      restores it and verifies its checksums

Two fifths are prose: books in the public domain and documentation. The rest is source code. A file is left out if it is
not written by a person (long lines, few words, generated, translated, tables), or if most of its longer lines occurred
in earlier files, in the order of the sources below. 2% of the documents are held out; `octile.train.data.prepare` does
that and trains the tokenizer.

The longer text is for runs over 1B tokens. It has the tokenizer and the held-out tokens of the text, so that losses
compare. Its training tokens are those of the text, followed by those of the files that `fetch --long` downloads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.loss.sizes import SEQUENCE, VOCABULARY
from experiments.loss.text_sources import BOOKS, LONG, TEXT, Sources, fetch, files
from octile.checkpoint.files import checksum
from octile.tokenizer import Tokenizer
from octile.train.data.filter import PROSE, DuplicateFilter, why_left_out
from octile.train.data.spans import HeldOutSpans
from octile.train.data.token_store import FILES, LEFT_OUT, MANIFEST, TOKENIZER_FILES, Tokens, TokenStore, TokenWriter

FACTS = Path(__file__).with_name("text.json")  # what `build` wrote of the text of the runs
LONG_FACTS = Path(__file__).with_name("text_long.json")  # what `extend` wrote of the longer text


@dataclass
class Selection:
    """The files that are text, and a count of them and of those left out.

    Attributes:
        duplicates: the lines of earlier files.
        sizes, kinds: the bytes of the selected files by source, and by kind.
        left_out: the reason and the name of each file left out.
    """

    duplicates: DuplicateFilter = field(default_factory=DuplicateFilter)
    sizes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def files(self, folder: Path, sources: Sources) -> Iterator[tuple[int, str, str, bytes]]:
        """Yield (number, source, path, content) of the files of these sources to train on."""
        for number, (source, path, content) in enumerate(files(folder, sources)):
            reason = why_left_out(path, content, book=source == BOOKS.name)
            if reason is None and self.duplicates.has_seen(content.decode()):
                reason = "repeated"
            if reason:
                self.left_out.append((reason, f"{source}: {path}"))
                continue
            self.sizes[source] += len(content)
            self.kinds["prose" if path.endswith(PROSE) else "source"] += len(content)
            yield number, source, path, content

    def facts(self) -> dict[str, Any]:
        """Return the bytes of each source and kind, and the number of files left out by reason."""
        left_out = Counter(reason for reason, _ in self.left_out)
        return {"bytes": dict(self.sizes), "kinds": dict(self.kinds), "left_out": dict(left_out)}


def build(folder: Path) -> None:
    """Write folder/text and folder/tokens, and a summary of them as folder/text.json.

    Raises:
        FileExistsError: folder/text exists.
    """
    from octile.train.data.prepare import prepare

    if (folder / "text").exists():
        raise FileExistsError(f"{folder / 'text'} exists: delete it to build it again")
    selection = Selection()
    for number, source, path, content in selection.files(folder, TEXT):
        place = folder / "text" / re.sub(r"\W+", "-", source) / f"{number:06}{Path(path).suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    store = prepare(folder / "text", VOCABULARY, folder / "tokens", SEQUENCE - 1)
    _write_facts(folder / "text.json", selection, store)


def extend(folder: Path, store: Path, out: Path) -> None:
    """Write the store of the longer text to `out`, and a summary as folder/text_long.json.

    The summary's bytes and files left out are those of the additional sources; its tokens, documents and checksums are
    those of the whole store. Files that repeat lines of the text, also of its held-out documents, are left out, and
    spans of 50 tokens that held-out documents have are cut.

    Args:
        folder: the one with what `fetch --long` downloaded.
        store: the token store with the checksums of text.json, which the recorded runs read. Commit d7c74e3 builds it;
            later ones cut held-out spans out of its training tokens, too.
        out: a folder that does not exist.

    Raises:
        ValueError: the store does not have the checksums of text.json.
        FileExistsError: `out` exists.
    """
    base = _open_the_text(store)
    out.mkdir(parents=True)
    tokenizer = base.tokenizer
    selection, spans = Selection(), HeldOutSpans((tokenizer.begin, tokenizer.end))
    spans.add([np.asarray(base.val)])
    for part in (base.val, base.train):
        for text in _texts(part, tokenizer):
            selection.duplicates.add(text)
    for name in (*TOKENIZER_FILES, "val.npy"):
        shutil.copyfile(store / name, out / name)
    fingerprint, n_documents = hashlib.sha256(bytes.fromhex(base.manifest.fingerprint)), 0
    with TokenWriter(out / "train.npy", tokenizer.vocab_size) as train:
        train.append(base.train)
        contents = (content for _, _, _, content in selection.files(folder, LONG))
        while batch := list(islice(contents, BATCH_FILES)):
            n_documents += len(batch)
            for content in batch:
                fingerprint.update(hashlib.sha256(content).digest())
            encoded = tokenizer.encode_batch([content.decode() for content in batch])
            for tokens in spans.cut([np.array([tokenizer.begin, *ids, tokenizer.end]) for ids in encoded]):
                train.append(tokens)
    (out / LEFT_OUT).write_text("".join(f"{reason}: {name}\n" for reason, name in selection.left_out))
    facts, there = selection.facts(), base.manifest
    replace(
        there,
        settings={**there.settings, "extends": base.digest},
        fingerprint=fingerprint.hexdigest(),
        documents={**there.documents, "train": there.documents["train"] + n_documents},
        bytes={**there.bytes, "train": there.bytes["train"] + selection.sizes.total()},
        tokens={**there.tokens, "train": train.length},
        skipped=facts["left_out"],
        cut_tokens=there.cut_tokens + spans.cut_tokens,
        sha256={name: checksum(out / name)["sha256"] for name in FILES},
    ).write(out)
    _write_facts(folder / LONG_FACTS.name, selection, TokenStore.open(out))


BATCH_FILES = 256  # that are encoded at a time


def _open_the_text(folder: Path) -> TokenStore:
    store = TokenStore.open(folder)
    expected = json.loads(FACTS.read_text())["sha256"]
    if different := [name for name in FILES if store.manifest.sha256[name] != expected[name]]:
        raise ValueError(f"store {folder} must have the checksums of {FACTS.name}; other ones: {', '.join(different)}")
    return store


def _texts(tokens: Tokens, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of each document of a store's part."""
    ids = np.asarray(tokens)
    begins, ends = (np.flatnonzero(ids == special) for special in (tokenizer.begin, tokenizer.end))
    for begin, end in zip(begins, ends, strict=True):
        yield tokenizer.decode(ids[begin + 1 : end].tolist())


def _write_facts(file: Path, selection: Selection, store: TokenStore) -> None:
    facts = selection.facts() | {name: getattr(store.manifest, name) for name in ("tokens", "documents", "sha256")}
    file.write_text(json.dumps(facts, indent=1) + "\n")


def pack(store: Path, folder: Path) -> None:
    """Write folder/part1, folder/part2, …, each of at most PART_BYTES, with chunks that are compressed one by one."""
    chunks = [
        (f"{name}.{number:03}.xz", content[begin : begin + CHUNK_BYTES])
        for name in (MANIFEST, LEFT_OUT, *FILES)
        for content in [(store / name).read_bytes()]
        for number, begin in enumerate(range(0, max(len(content), 1), CHUNK_BYTES))  # an empty file has a chunk
    ]
    part, size = 1, 0
    with ProcessPoolExecutor(2) as pool:
        for (name, _), packed in zip(chunks, pool.map(_compress, (chunk for _, chunk in chunks)), strict=True):
            if size and size + len(packed) > PART_BYTES:
                part, size = part + 1, 0
            size += len(packed)
            place = folder / f"part{part}" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(packed)
            print(f"{place}: {len(packed):,} bytes", flush=True)


def _compress(content: bytes) -> bytes:
    return lzma.compress(content, filters=FILTERS)


def unpack(store: Path, parts: list[Path]) -> None:
    """Restore a store from its parts, and open it, which verifies every file's checksum.

    Raises:
        FileNotFoundError: none of the parts has a chunk of a file.
        ValueError: a file fails its checksum.
    """
    chunks = sorted((p for part in parts for p in part.glob("*.xz")), key=lambda p: p.name)
    store.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, LEFT_OUT, MANIFEST):
        own = [chunk for chunk in chunks if chunk.name.startswith(f"{name}.")]
        if not own:
            raise FileNotFoundError(f"no chunk of {name} in {', '.join(map(str, parts))}")
        (store / name).write_bytes(b"".join(lzma.decompress(chunk.read_bytes()) for chunk in own))
    print({part: f"{n:,} tokens" for part, n in TokenStore.open(store).manifest.tokens.items()})


PART_BYTES = 44 * 10**6
CHUNK_BYTES = 2**25  # even, so that no token is split
# pb=1: tokens are two bytes long, and the statistics of both bytes differ
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1, "dict_size": 2**25}]


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    run: dict[str, Callable[..., None]] = {f.__name__: f for f in (fetch, build, extend, pack, unpack)}
    for name, arguments in {
        "fetch": ["folder"],
        "build": ["folder"],
        "extend": ["folder", "store", "out"],
        "pack": ["store", "folder"],
        "unpack": ["store"],
    }.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
    commands.choices["fetch"].add_argument("--long", action="store_true", help="download what the longer text adds")
    commands.choices["unpack"].add_argument("parts", type=Path, nargs="+")
    asked = vars(parser.parse_args())
    run[asked.pop("command")](**asked)


if __name__ == "__main__":
    main()
