"""The sizes and digests of a corpus's documents, and the choice of held-out documents.

The digest of a document decides whether it is held out: the smallest 2% of all possible digests are never trained on.
Adding or removing documents therefore does not move other documents between the parts, and a document is in the same
part in every corpus. At most a tenth of the text is held out; where documents are too few for this, `span` says into
what spans they are to be cut.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from octile.train.data.corpus import Corpus, LeftOut, span_length

HELD_OUT_SHARE = 0.02
MAX_HELD_OUT_SHARE = 0.1  # of the bytes, if HELD_OUT_SHARE is too little for the requested windows
MIN_FULFILLED = 0.5  # of the text that the windows need; whole documents that give less are cut into spans
BYTES_PER_TOKEN = 8  # more than a token of usual text has, so that the windows are available in any case


@dataclass(frozen=True)
class CorpusIndex:
    """The documents of a corpus, without their text.

    Attributes:
        sizes: the UTF-8 bytes of each document by its digest, in reading order.
        left_out: the files and texts that are no documents.
    """

    sizes: Mapping[bytes, int]
    left_out: Sequence[LeftOut]

    @classmethod
    def of(cls, corpus: Corpus) -> Self:
        """Read a corpus and build its index."""
        left_out = list(corpus.left_out)
        sizes = {document.digest: len(document.text.encode()) for document in corpus.documents(left_out)}
        return cls(sizes, left_out)

    @property
    def total_bytes(self) -> int:
        """The UTF-8 bytes of all documents."""
        return sum(self.sizes.values())

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all digests in order, which identifies the text of a token store."""
        return hashlib.sha256(b"".join(self.sizes)).hexdigest()

    def hold_out(self, sequence_length: int, windows: int) -> set[bytes]:
        """The digests of the documents that are never trained on: at most a tenth of the text.

        These are the documents among the smallest 2% of possible digests. If that is too little text for `windows`
        windows of sequence_length + 1 tokens, the next documents follow, up to a tenth of the text. A document that
        would exceed the tenth is passed over.
        """
        enough, most = self._enough(sequence_length, windows), self._max_held_out
        chosen: set[bytes] = set()
        held = 0
        for digest in sorted(self.sizes):
            if held >= enough and int.from_bytes(digest) >= HELD_OUT_SHARE * 256 ** len(digest):
                break
            if held + self.sizes[digest] <= most:
                chosen.add(digest)
                held += self.sizes[digest]
        return chosen

    def span(self, sequence_length: int, windows: int) -> int | None:
        """The characters of the spans into which the documents are to be cut; None if they are held out whole."""
        held = sum(self.sizes[digest] for digest in self.hold_out(sequence_length, windows))
        if held >= MIN_FULFILLED * self._enough(sequence_length, windows):
            return None
        return span_length(self.total_bytes)

    @property
    def _max_held_out(self) -> int:
        """The bytes that may be held out."""
        return int(self.total_bytes * MAX_HELD_OUT_SHARE)

    def _enough(self, sequence_length: int, windows: int) -> int:
        """The bytes to hold out: what the windows need, or as much as may be held out."""
        return min(windows * (sequence_length + 1) * BYTES_PER_TOKEN, self._max_held_out)

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
