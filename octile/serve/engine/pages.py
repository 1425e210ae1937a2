"""Pages of the cache: which are free, how many requests hold each, and which have a prefix that others can share.

The cache is cut into pages of `page_size` positions. A full page has a key: the hash of its tokens and of the key of
the page before it, so that equal keys mean equal prefixes. A request whose prompt begins with cached pages holds these
pages together with the others and computes nothing for them. A page that nobody holds stays cached until it is needed
for something else; the one unused for the longest time goes first.

Source: Kwon et al., PagedAttention (arXiv 2309.06180) §4.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

NO_KEY = b""  # the key before the first page


def page_key(before: bytes, tokens: array[int]) -> bytes:
    """Return the key of a full page: a hash of the key of the page before it, or NO_KEY, and of its tokens.

    A cryptographic hash: nobody can make a prompt whose key is that of another prompt.
    """
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()


class PageAllocator:
    """Counts the holders of each page of a cache.

    Args:
        n_pages: pages, numbered from 0.
    """

    def __init__(self, n_pages: int):
        if n_pages < 1:
            raise ValueError(f"n_pages must be at least 1, not {n_pages}")
        self.n_pages = n_pages
        self._holders = [0] * n_pages
        self._keys: list[bytes | None] = [None] * n_pages
        self._page_of: dict[bytes, int] = {}
        self._empty = list(reversed(range(n_pages)))  # nobody holds them and they have no key
        self._cached: OrderedDict[int, None] = OrderedDict()  # nobody holds them, they have a key; the oldest first

    @property
    def n_free(self) -> int:
        """Pages that `allocate` can return: those that nobody holds."""
        return len(self._empty) + len(self._cached)

    @property
    def n_cached(self) -> int:
        """Pages that nobody holds and whose content can be shared."""
        return len(self._cached)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages that have these keys, up to the first key that no page has. Nobody holds them yet."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def n_free_without(self, pages: Sequence[int]) -> int:
        """Pages that `allocate` can return after `share(pages)`."""
        return self.n_free - sum(self._holders[page] == 0 for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of the pages that `find` returned."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def allocate(self, n: int) -> list[int]:
        """Return n pages with one holder each and no key; cached ones lose their content, least recently used first.

        Raises:
            ValueError: n is more than n_free.
        """
        if not 0 <= n <= self.n_free:
            raise ValueError(f"n must be from 0 to the {self.n_free} free pages, not {n}")
        pages = []
        for _ in range(n):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                key = self._keys[page]
                assert key is not None
                del self._page_of[key]
                self._keys[page] = None
            self._holders[page] = 1
            pages.append(page)
        return pages

    def cache(self, page: int, key: bytes) -> None:
        """Give a full page, which the caller holds, its key. If another page has that key, nothing changes."""
        if self._keys[page] is None and key not in self._page_of:
            self._keys[page] = key
            self._page_of[key] = page

    def forget_keys(self) -> None:
        """Let no page be shared with further requests: those that nobody holds lose their content."""
        self._empty.extend(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._keys = [None] * self.n_pages

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let the pages with these keys, where there are some, be shared with no further request."""
        for page in [self._page_of.pop(key) for key in keys if key in self._page_of]:
            self._keys[page] = None
            if self._holders[page] == 0:
                del self._cached[page]
                self._empty.append(page)

    def free(self, pages: Sequence[int]) -> None:
        """Remove a holder from each page of a request, in the order of their positions.

        The last pages are reused first: without the pages before it, a page cannot be shared.

        Raises:
            ValueError: nobody holds a page.
        """
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._keys[page] is None:
                    self._empty.append(page)
                else:
                    self._cached[page] = None
