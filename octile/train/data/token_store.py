"""A folder of tokenized text, which is memory-mapped, or read by ranges from a URL, and so may be larger than memory.

    tokenizer.json, tokenizer_config.json   the tokenizer
    train.npy, val.npy                      uint16 (or uint32) [tokens]: <|begin|> text <|end|> <|begin|> text <|end|> …
    left_out.txt                            the files and texts that were left out, a line each: reason, name
    train_marks.npy, val_marks.npy          uint8 [tokens], only of packed sequences (`packed_tokens`)
    manifest.json                           their source and number, and the SHA-256 of each file but left_out.txt

The manifest is written last: a folder without one is not finished, and a folder that does not match it is damaged.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from octile.atomic_files import atomic_write, write_json
from octile.checkpoint.files import checksum
from octile.checkpoint.store import Store
from octile.nn.packed_texts import TextStatistics
from octile.text import format_count
from octile.tokenizer import Tokenizer
from octile.train.data.packed_tokens import PackedTokens
from octile.train.data.streamed_tokens import StreamedTokens
from octile.validation import check_fields, from_json, json_checksum, read_json

Tokens = npt.NDArray[np.unsignedinteger] | StreamedTokens | PackedTokens

PARTS = ("train", "val")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
FILES = (*TOKENIZER_FILES, "train.npy", "val.npy")
LEFT_OUT = "left_out.txt"
MANIFEST = "manifest.json"

REMEDY = "delete it to have it built anew"


@dataclass(frozen=True)
class Packed:
    """What else is known of a store of packed sequences.

    Attributes:
        sequence_length: the tokens of a sequence.
        max_texts: the most texts of a sequence; padding counts as one.
        labels: the tokens with a loss of each of the parts "train" and "val".
        padding: the tokens of padding of each part.
        truncated: how many texts were longer than a sequence, and were cut at its end.
        longest: the tokens of the longest text, before it was cut.
        has_plain_template: whether the tokenizer has no chat template, so that a plain one writes conversations.
        empty_answers: how many answers and completions have no text and no calls.
        first_empty_answer: the line of the first of them; None if there is none.
        shared_prompts: how many held-out texts have the prompt of a text that is trained on.
    """

    sequence_length: int
    max_texts: int
    labels: dict[str, int]
    padding: dict[str, int]
    truncated: int
    longest: int
    has_plain_template: bool
    empty_answers: int = 0
    first_empty_answer: str | None = None
    shared_prompts: int = 0


@dataclass(frozen=True)
class Manifest:
    """The content of a store.

    Attributes:
        source: the name of the corpus.
        settings: everything on which the tokens depend: the digest of the text, and how it is prepared. The digest is
            None if files that are no documents, or a file of examples, changed meanwhile.
        fingerprint: the SHA-256 of the corpus's documents in order.
        vocab_size: the tokens of the tokenizer.
        documents, bytes, tokens: the numbers of each of the parts "train" and "val".
        skipped: how many texts were left out, by reason.
        sha256: the checksum of every file of the store but the manifest and left_out.txt.
        span: the characters of the spans into which few documents were cut, which count as documents; None if they are
            whole.
        cut_tokens: the tokens that were cut out of the training documents, because held-out documents have them, too.
        url: where the tokens are streamed from; None if they lie in the folder.
        packed: what else is known of packed sequences; None if they are windows of one text.
    """

    source: str
    settings: dict[str, Any]
    fingerprint: str
    vocab_size: int
    documents: dict[str, int]
    bytes: dict[str, int]
    tokens: dict[str, int]
    skipped: dict[str, int]
    sha256: dict[str, str]
    span: int | None = None
    cut_tokens: int = 0
    url: str | None = None
    packed: Packed | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the store's files that have checksums."""
        return FILES if self.packed is None else (*FILES, *(f"{part}_marks.npy" for part in PARTS))

    @property
    def unit(self) -> str:
        """What is held out: "documents", or "spans" of them; "texts" of packed sequences."""
        if self.packed is not None:
            return "texts"
        return "documents" if self.span is None else "spans"

    @property
    def held_out_share(self) -> float:
        """The share of the text's bytes that is held out."""
        return self.bytes["val"] / (self.bytes["train"] + self.bytes["val"])

    @property
    def cut_share(self) -> float:
        """The share of the training documents' tokens that was cut out."""
        return self.cut_tokens / (self.tokens["train"] + self.cut_tokens)

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a token of the held-out documents, which turn a loss per token into one per byte."""
        return self.bytes["val"] / self.tokens["val"]

    @property
    def text_statistics(self) -> TextStatistics | None:
        """What a model may know of the texts of all packed sequences; None if tokens are not packed.

        Padding is a text, too, at most one in a sequence: the mean length is the true one, or less.
        """
        if self.packed is None:
            return None
        padding = sum(self.packed.padding.values())
        length = sum(self.tokens.values()) + padding
        texts = sum(self.documents.values()) + min(padding, length // self.packed.sequence_length)
        return TextStatistics(self.packed.max_texts, length // texts)

    @property
    def mean_train_length(self) -> int:
        """The mean tokens of the documents, or texts, that are trained on, without padding."""
        return self.tokens["train"] // self.documents["train"]

    def write(self, folder: Path) -> None:
        """Write manifest.json."""
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read manifest.json.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged.
        """
        file = folder / MANIFEST
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not a finished token store: there is no {file}")
        try:
            return cls.from_values(read_json(file), str(file))
        except ValueError as error:
            raise ValueError(f"{error}; delete the folder {folder} to have it built anew") from None

    @classmethod
    def from_values(cls, values: dict[str, Any], file: str) -> Self:
        """Make a manifest from the JSON object in a manifest.json, whose path or URL messages name.

        Raises:
            ValueError: it is damaged.
        """
        try:
            manifest = from_json(cls, values)
            check_fields(manifest)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None
        return manifest


@dataclass(frozen=True)
class TokenStore:
    """A finished store: train and val are [tokens] uint16 or uint32, memory-mapped, or read by ranges from a URL."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens

    @property
    def digest(self) -> str:
        """The SHA-256 of the files' digests, which identifies all tokens and the tokenizer."""
        return json_checksum(self.manifest.sha256)

    def left_out(self, limit: int) -> dict[str, list[str]]:
        """The names of the first `limit` files and texts that were left out for each reason."""
        names: dict[str, list[str]] = {}
        with (self.folder / LEFT_OUT).open(encoding="utf-8") as lines:
            for line in lines:
                reason, _, name = line.rstrip("\n").partition(": ")
                if len(named := names.setdefault(reason, [])) < limit:
                    named.append(name)
        return names

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a store that `prepare` has written, after comparing its files with their checksums.

        Raises:
            FileNotFoundError: the folder holds no finished store.
            ValueError: a file is missing or is not what was written.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        check_files(folder, manifest)
        return cls(folder, manifest, Tokenizer.load(folder), *_parts(folder, manifest))

    @classmethod
    def stream(cls, url: str, folder: Path) -> Self:
        """Write a store whose tokens lie under a URL that fsspec knows, and are read from there, a batch at a time.

        The checksums of the tokenizer's files are compared, and of the tokens their number: to compare their checksum
        would be to read them all.

        Args:
            url: the URL of a store's folder that `prepare` has written, which was copied there.
            folder: the folder of the new store, with copies of all files but the tokens; made if it does not exist.

        Raises:
            FileNotFoundError: there is no finished store, or a file of it is missing.
            ValueError: a file is not what was written, or the store has packed sequences.
        """
        store, manifest = Store(url), manifest_at(url)
        if manifest.packed is not None:
            raise ValueError(f"data {url!r} has packed sequences, which are not streamed: give their file of examples")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*TOKENIZER_FILES, LEFT_OUT):
            with atomic_write(folder / name) as file:
                file.write(store.read(name))
        replace(manifest, url=url).write(folder)
        return cls.open(folder)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of a store with the checksums in its manifest.

    Raises:
        ValueError: a file is missing or is not what was written.
    """
    for name in manifest.files if manifest.url is None else TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"token store {folder} is damaged: {name} is missing; {REMEDY}")
        if checksum(folder / name)["sha256"] != manifest.sha256.get(name):
            raise ValueError(f"token store {folder} is damaged: {name} fails its checksum; {REMEDY}")


def _parts(folder: Path, manifest: Manifest) -> list[Tokens]:
    """The tokens of each part, memory-mapped or streamed."""
    if manifest.url is None:
        tokens, packed = [_mapped(folder / f"{part}.npy") for part in PARTS], manifest.packed
        if packed is None:
            return [*tokens]
        marks = [_mapped(folder / f"{part}_marks.npy") for part in PARTS]
        return [PackedTokens(*each, packed.sequence_length) for each in zip(tokens, marks, strict=True)]
    if manifest_at(manifest.url).sha256 != manifest.sha256:
        raise ValueError(f"token store {manifest.url} has other tokens than when {folder} was written")
    store = Store(manifest.url)
    return [StreamedTokens(store, f"{part}.npy", manifest.tokens[part], manifest.vocab_size) for part in PARTS]


def _mapped(file: Path) -> npt.NDArray[Any]:
    return np.load(file, mmap_mode="r", allow_pickle=False)


def manifest_at(url: str) -> Manifest:
    """Read the manifest.json of the store under a URL.

    Raises:
        FileNotFoundError: there is no finished store.
        OSError: the server does not answer, or refuses to.
        ValueError: the manifest is damaged, or fsspec knows no such protocol.
        ImportError: the package for the protocol is not installed.
    """
    store = Store(url)
    store.check_answers()
    try:
        return Manifest.from_values(store.read_json(MANIFEST), store.path_of(MANIFEST))
    except FileNotFoundError:
        store.check_bucket()
        raise FileNotFoundError(f"{url} is not a finished token store: it has no {MANIFEST}") from None


def describe_truncated(manifest: Manifest) -> str:
    """Say how many texts of packed sequences were cut: "3 of 100 texts are"."""
    assert manifest.packed is not None
    cut, all_texts = manifest.packed.truncated, sum(manifest.documents.values()) + sum(manifest.skipped.values())
    return f"{cut:,} of {format_count(all_texts, 'text')} {'is' if cut == 1 else 'are'}"


class TokenWriter:
    """Appends tokens to a .npy file. The header, which contains the length, is overwritten at the end.

    NumPy pads the header so that every length fits.

    Args:
        path: the file.
        dtype: that of the elements; or the size of a vocabulary, for the smallest one that holds its tokens.
    """

    def __init__(self, path: Path, dtype: int | np.dtype[Any]):
        self._dtype = np.dtype("<u2" if dtype <= 2**16 else "<u4") if isinstance(dtype, int) else dtype
        self._file = path.open("wb")
        self.length = 0
        self._header_end = self._write_header()

    def append(self, tokens: npt.ArrayLike) -> None:
        """Write tokens to the end of the file."""
        ids = np.asarray(tokens, self._dtype)
        self._file.write(ids.tobytes())
        self.length += len(ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            if self._write_header() != self._header_end:
                raise RuntimeError(f"NumPy {np.__version__} does not pad the .npy header for a longer length")

    def _write_header(self) -> int:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()
