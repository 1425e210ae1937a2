"""The tokens of a .npy file in an object store, of which a batch reads the bytes that it needs.

fsspec reads the windows of a batch at the same time where the file system can (S3, GCS, Azure, HTTP). A thread prepares
the batches of a GPU ahead of their steps (`PreparedBatches`), so that a step does not wait for the network.
"""

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from octile.checkpoint.store import Store

HEADER_BYTES = 4096  # that hold the header of a .npy file with one dimension


class StreamedTokens:
    """A token array [T] that is read by ranges.

    Args:
        store: the folder of the file.
        name: the name of the file, which NumPy's format 1.0 describes.
        length: T.
        vocab_size: all tokens are below it.

    Attributes:
        dtype: uint16 or uint32.
        shape, ndim: (T,) and 1.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not hold T tokens.
    """

    def __init__(self, store: Store, name: str, length: int, vocab_size: int):
        self._store, self._name, self._vocab_size = store, name, vocab_size
        self._path = store.path_of(name)
        size = store.size(name)
        header = io.BytesIO(store.read_ranges(name, [0], min(size, HEADER_BYTES))[0])
        try:
            if np.lib.format.read_magic(header) != (1, 0):
                raise ValueError("its format is not 1.0")
            shape, _, self.dtype = np.lib.format.read_array_header_1_0(header)
        except ValueError as error:
            raise ValueError(f"{self._path} is damaged: {error}") from None
        self._begin = header.tell()
        if shape != (length,) or size != self._begin + length * self.dtype.itemsize:
            raise ValueError(f"{self._path} is damaged: {size} bytes for {list(shape)} tokens, {length} expected")
        self.shape, self.ndim = (length,), 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> npt.NDArray[np.unsignedinteger]:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens of {self._path} are read in ranges, not in steps of {step}")
        return self.windows(np.array([start]), max(stop - start, 0))[0]

    def windows(self, begin_B: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.unsignedinteger]:
        """Read `length` tokens at each of B positions: [B, length].

        Raises:
            ValueError: the file ends before, or a token is not in the vocabulary.
        """
        begins = [int(self._begin + begin * self.dtype.itemsize) for begin in begin_B]
        found = self._store.read_ranges(self._name, begins, length * self.dtype.itemsize)
        tokens_BS: npt.NDArray[Any] = np.frombuffer(b"".join(found), self.dtype).reshape(len(begins), length)
        if tokens_BS.size and tokens_BS.max() >= self._vocab_size:
            raise ValueError(
                f"{self._path} is damaged: it holds the token {tokens_BS.max()}, the vocabulary has {self._vocab_size}"
            )
        return tokens_BS
