"""What a first pass over a corpus tells, and which documents are held out.

A document is held out for what it is, not for its place in a list. Its digest is a random number that never changes:
the smallest 2% of all digests are never trained on. So a document stays on its side when others come or go, and it is
on the same side in every corpus.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from octile.train.corpus import Corpus

HELD_OUT_SHARE = 0.02
HELD_OUT_AT_MOST = 0.1  # of the bytes, where more than the share is needed for the windows asked for
BYTES_PER_TOKEN = 8  # more than a token of usual text has, so that these windows are really there


@dataclass(frozen=True)
class CorpusIndex:
    """sizes: UTF-8 bytes of each document by its digest, in reading order. skipped: what was left out, by reason."""

    sizes: Mapping[bytes, int]
    skipped: Mapping[str, int]

    @classmethod
    def of(cls, corpus: Corpus) -> Self:
        skipped = Counter(corpus.skipped)
        sizes = {document.digest: len(document.text.encode()) for document in corpus.documents(skipped)}
        return cls(sizes, skipped)

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all digests in order: what the tokens of a store depend on."""
        return hashlib.sha256(b"".join(self.sizes)).hexdigest()

    def hold_out(self, sequence_length: int, windows: int) -> set[bytes]:
        """The digests of the documents that are never trained on.

        All that are among the smallest 2% of possible digests. Where that is too little text for `windows` windows of
        sequence_length + 1 tokens, the next ones follow, up to a tenth of the text; enough for a single window always,
        unless nothing would be left to train on.
        """
        window = (sequence_length + 1) * BYTES_PER_TOKEN
        enough = max(window, min(windows * window, int(self.total_bytes * HELD_OUT_AT_MOST)))
        chosen: set[bytes] = set()
        held = 0
        for digest in sorted(self.sizes)[:-1]:
            if held >= enough and int.from_bytes(digest) >= HELD_OUT_SHARE * 256 ** len(digest):
                break
            chosen.add(digest)
            held += self.sizes[digest]
        return chosen

    def sample(self, held_out: set[bytes], at_least: int) -> set[bytes]:
        """A uniform sample of the training documents, `at_least` so many bytes, or all of them."""
        chosen: set[bytes] = set()
        sampled = 0
        for digest in sorted(self.sizes.keys() - held_out):
            if sampled >= at_least:
                break
            chosen.add(digest)
            sampled += self.sizes[digest]
        return chosen
