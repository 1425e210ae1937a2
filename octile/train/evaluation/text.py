"""The text on which `octile eval` measures models: tokens of a text, or the held-out part of a token store.

A text is read as `octile train --val-data` reads it: its documents one after the other, from <|begin|> to <|end|>.

Shapes: T tokens; N sequences of S tokens each.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octile.nn.packed_texts import TextStatistics
from octile.report.console import progress_bar
from octile.report.evaluation import EvaluatedText
from octile.text import format_count
from octile.tokenizer import Tokenizer
from octile.train.data.batches import count_windows, evenly_spaced, read_windows
from octile.train.data.corpus import LeftOut, check_source, find_token_store, is_path, is_url, open_corpus
from octile.train.data.examples import is_examples
from octile.train.data.packed_tokens import PackedTokens
from octile.train.data.prepare import batches_of_text, encode_documents
from octile.train.data.token_store import Manifest, Tokens, TokenStore, TokenWriter


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text.

    Attributes:
        name: what the text is, in messages.
        tokens: [T]; sequences of examples if they are packed.
        tokenizer: the tokenizer that made them.
        n_bytes: the bytes of the text; None if the tokens are packed.
        n_padding: how many of the packed tokens are padding.
        statistics: what is known of all packed texts; None if the tokens are not packed.
        sequence_length: tokens of a sequence of the run for which the tokens were prepared; None if of none.
        left_out: how many texts or files were left out, by the reason.
    """

    name: str
    tokens: Tokens
    tokenizer: Tokenizer
    n_bytes: int | None
    n_padding: int = 0
    statistics: TextStatistics | None = None
    sequence_length: int | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether the tokens are packed sequences of examples."""
        return isinstance(self.tokens, PackedTokens)

    def notes(self) -> list[str]:
        """Return a line that says what was left out, if anything was."""
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in self.left_out.items())
        return [f"left out of the text: {reasons}"] if reasons else []


@dataclass(frozen=True)
class Sequences:
    """Evenly spaced sequences of a text.

    Attributes:
        text: the text.
        sequence_length: S.
        number_N: int64 [N], which they are of all sequences of the text.
        n_all: how many the text has.
    """

    text: TextTokens
    sequence_length: int
    number_N: npt.NDArray[np.int64]
    n_all: int

    @classmethod
    def of(cls, text: TextTokens, sequence_length: int, n: int | None) -> Sequences:
        """Choose n sequences of a text, or all of them where n is None.

        Raises:
            ValueError: the text is shorter than a sequence.
        """
        if len(text.tokens) < sequence_length:
            raise ValueError(
                f"data has too little text: {text.name} has {format_count(len(text.tokens), 'token')}, with those at "
                f"the ends of documents, but a sequence has {sequence_length:,}: name more text, or use a smaller "
                "--sequence-length"
            )
        n_all = count_windows(text.tokens, sequence_length - 1)  # a window is one token longer than that
        return cls(text, sequence_length, evenly_spaced(n_all, n_all if n is None else n), n_all)

    def read(self, at_once: int) -> Iterator[Tensor]:
        """Yield the sequences, so many at a time: int64 [B, S], or [B, S, 2] if they are packed."""
        for start in range(0, len(self.number_N), at_once):
            yield read_windows(self.text.tokens, self.number_N[start : start + at_once], self.sequence_length - 1)

    def __len__(self) -> int:
        return len(self.number_N)

    def size(self) -> EvaluatedText:
        """Return the size of the text, for a report."""
        text = self.text
        n_tokens = len(text.tokens) - text.n_padding
        return EvaluatedText(text.name, n_tokens, self.sequence_length, len(self), self.n_all, text.n_bytes)


def sequence_length_of(manifest: Manifest) -> int:
    """Return the tokens of a sequence of the run for which a token store was prepared."""
    packed = manifest.packed
    return int(manifest.settings["sequence_length"]) + 1 if packed is None else packed.sequence_length


def check_data(data: str) -> None:
    """Refuse what cannot name a text or a token store, without reading a text.

    Raises:
        ValueError: data is a file of examples or the folder of a model, or as for `check_source`, which raises the
            other exceptions, too.
    """
    if is_path(data) and find_token_store(Path(data)) is not None:
        return
    if is_path(data) and next(Path(data).glob("*.safetensors"), None):
        raise ValueError(
            f"data {data!r} is the folder of a model: name a text, or the run whose held-out text is meant"
        )
    check_source(data)
    if is_examples(data):
        raise ValueError(
            f"data {data!r} holds examples: name the folder of the run that trained on them, whose held-out examples "
            "are evaluated, or a text"
        )


@contextmanager
def open_text(data: str, tokenizer: Tokenizer) -> Iterator[TextTokens]:
    """Open a text inside the context, or the token store that data names.

    The tokens of a text lie in a temporary file.

    Args:
        data: the text, a run, or the folder or URL of a token store.
        tokenizer: encodes a text.

    Raises:
        FileNotFoundError, ValueError: as for `open_corpus` and `TokenStore.open`.
    """
    with tempfile.TemporaryDirectory(prefix="octile-eval-") as folder:
        stored = find_token_store(Path(data)) if is_path(data) else None
        if stored is not None or is_url(data):
            store = TokenStore.stream(data, Path(folder)) if stored is None else TokenStore.open(stored)
            yield _held_out(store, data if stored is None else str(stored))
        else:
            yield _encoded(data, tokenizer, Path(folder) / "tokens.npy")


def _held_out(store: TokenStore, name: str) -> TextTokens:
    packed = store.manifest.packed
    kind = "text" if packed is None else "examples"
    return TextTokens(
        f"the held-out {kind} of {name}",
        store.val,
        store.tokenizer,
        store.manifest.bytes["val"] if packed is None else None,
        0 if packed is None else packed.padding["val"],
        store.manifest.text_statistics,
        sequence_length_of(store.manifest),
    )


def _encoded(data: str, tokenizer: Tokenizer, file: Path) -> TextTokens:
    corpus = open_corpus(data)
    left_out: list[LeftOut] = [*corpus.left_out]
    n_bytes = 0
    with TokenWriter(file, tokenizer.vocab_size) as writer, progress_bar(f"encoding {data}", None) as advance:
        for batch in batches_of_text(corpus.documents(left_out)):
            advance(len(batch))
            n_bytes += sum(len(document.text.encode()) for document in batch)
            for ids in encode_documents(batch, tokenizer):
                writer.append(ids)
    tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    return TextTokens(data, tokens, tokenizer, n_bytes, left_out=Counter(reason for reason, _ in left_out))
