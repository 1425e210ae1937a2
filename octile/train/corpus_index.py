"""The sizes and digests of a corpus's documents, and the choice of held-out documents.

The digest of a document decides whether it is held out: the smallest 2% of all possible digests are never trained on.
Adding or removing documents therefore does not move other documents between the parts, and a document is in the same
part in every corpus.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from octile.train.corpus import Corpus

HELD_OUT_SHARE = 0.02
MAX_HELD_OUT_SHARE = 0.1  # of the bytes, if HELD_OUT_SHARE is too little for the requested windows
BYTES_PER_TOKEN = 8  # more than a token of usual text has, so that the windows are available in any case


@dataclass(frozen=True)
class CorpusIndex:
    """The documents of a corpus, without their text.

    Attributes:
        sizes: the UTF-8 bytes of each document by its digest, in reading order.
        skipped: the number of texts that were left out, by reason.
    """

    sizes: Mapping[bytes, int]
    skipped: Mapping[str, int]

    @classmethod
    def of(cls, corpus: Corpus) -> Self:
        """Read a corpus and build its index."""
        skipped = Counter(corpus.skipped)
        sizes = {document.digest: len(document.text.encode()) for document in corpus.documents(skipped)}
        return cls(sizes, skipped)

    @property
    def total_bytes(self) -> int:
        """The UTF-8 bytes of all documents."""
        return sum(self.sizes.values())

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all digests in order, which identifies the text of a token store."""
        return hashlib.sha256(b"".join(self.sizes)).hexdigest()

    def hold_out(self, sequence_length: int, windows: int) -> set[bytes]:
        """The digests of the documents that are never trained on.

        These are the documents among the smallest 2% of possible digests. If that is too little text for `windows`
        windows of sequence_length + 1 tokens, the next documents follow, up to a tenth of the text. There is always
        enough for a single window, unless nothing would be left to train on.
        """
        window = (sequence_length + 1) * BYTES_PER_TOKEN
        enough = max(window, min(windows * window, int(self.total_bytes * MAX_HELD_OUT_SHARE)))
        chosen: set[bytes] = set()
        held = 0
        for digest in sorted(self.sizes)[:-1]:
            if held >= enough and int.from_bytes(digest) >= HELD_OUT_SHARE * 256 ** len(digest):
                break
            chosen.add(digest)
            held += self.sizes[digest]
        return chosen

    def sample(self, held_out: set[bytes], at_least: int) -> set[bytes]:
        """The digests of a uniform sample of the training documents, with `at_least` bytes, or of all of them."""
        chosen: set[bytes] = set()
        sampled = 0
        for digest in sorted(self.sizes.keys() - held_out):
            if sampled >= at_least:
                break
            chosen.add(digest)
            sampled += self.sizes[digest]
        return chosen
