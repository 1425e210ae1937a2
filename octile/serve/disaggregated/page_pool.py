"""Pages that one process fills and another reads: on a CPU in POSIX shared memory, on a GPU by CUDA IPC.

The process that fills them owns the memory, and knows which pages are free. The page that it fills for another process
is that process's until it is returned.

What opens the memory in another process is pickled. It travels by pipes that `octile.serve.disaggregated.router` makes
for its children, which no other user can open; what comes by a socket is never unpickled.

Shapes: S pages of the pool, N pages that are handed over, Q bytes of a page in all layers.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # registers tensors with ForkingPickler
from torch import Tensor

from octile.serve.runner.kv_cache import PageBytes

MAX_COPIED = 64  # pages at a time: a copy takes up to twice their memory


class PagePool:
    """Pages to fill.

    Args:
        n_pages: S.
        cache: the pages that are copied here.

    Attributes:
        bytes_SQ: uint8 [S, Q].
    """

    def __init__(self, n_pages: int, cache: PageBytes):
        self._cache = cache
        self.bytes_SQ = torch.zeros(n_pages, cache.bytes_per_page, dtype=torch.uint8, device=cache.device)
        if cache.device.type == "cpu":
            self.bytes_SQ.share_memory_()
        self._free = list(reversed(range(n_pages)))

    @property
    def n_free(self) -> int:
        """Pages that can be filled."""
        return len(self._free)

    def fill(self, pages: Sequence[int]) -> list[int]:
        """Copy pages of the cache to free pages of the pool, wait until they are there, and return their numbers.

        Raises:
            ValueError: there are more pages than are free.
        """
        if len(pages) > len(self._free):
            raise ValueError(f"pages must be at most the {len(self._free)} free ones of the pool, not {len(pages)}")
        filled = [self._free.pop() for _ in pages]
        for i in range(0, len(pages), MAX_COPIED):
            to = torch.tensor(filled[i : i + MAX_COPIED], device=self.bytes_SQ.device)
            self.bytes_SQ[to] = self._cache.read(pages[i : i + MAX_COPIED])
        if self.bytes_SQ.is_cuda:
            torch.cuda.current_stream(self.bytes_SQ.device).synchronize()
        return filled

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        self._free.extend(pages)

    def share(self) -> bytes:
        """Return what `open_pool` needs in another process, once."""
        return bytes(ForkingPickler.dumps(self.bytes_SQ))


def open_pool(shared: bytes) -> Tensor:
    """Open the pool of another process: uint8 [S, Q]."""
    opened = pickle.loads(shared)
    assert isinstance(opened, Tensor)
    return opened


class FilledPages:
    """The latents of a prompt in another process's pool, for `octile.serve.engine.engine.Engine.adopt`.

    Args:
        pool_SQ: uint8 [S, Q], of `open_pool`.
        pages: N pages of the pool, in the order of positions.
        cache: the pages of this process.
    """

    def __init__(self, pool_SQ: Tensor, pages: Sequence[int], cache: PageBytes):
        self._pool_SQ, self._pages, self._cache = pool_SQ, pages, cache
        self._copied: torch.cuda.Event | None = None
        self._is_released = False

    def write(self, pages: Sequence[int], first: int) -> None:
        """Copy the pages from number `first` on to pages of the cache, and release all."""
        for i in range(first, len(self._pages), MAX_COPIED):
            part = self._pages[i : i + MAX_COPIED]
            wanted = torch.tensor(part, device=self._pool_SQ.device)
            self._cache.write(pages[i : i + len(part)], self._pool_SQ[wanted])
        if self._pool_SQ.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._cache.device))
        self._is_released = True

    def release(self) -> None:
        """Return the pages unread."""
        self._is_released = True

    @property
    def is_free(self) -> bool:
        """Whether the pages can be filled anew: they are copied, or nobody wants them."""
        return self._is_released and (self._copied is None or self._copied.query())
