"""A cache that is bounded in size and costs one dictionary look-up when it is read."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Cache of the `max_entries` entries used last, and of at most twice as many.

    Entries are stored and found in a young dictionary. When it is full it becomes the old one, and the entries that
    were not used since the last such change are dropped. Reading reorders nothing, so it is as fast as a dictionary.

    Threads may share it: a thread that reads while another one writes finds its entry, or None and recomputes it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}

    def get(self, key: Hashable) -> Value | None:
        """The stored value, or None where nothing is stored or the entry was dropped."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self[key] = found
        return found

    def __setitem__(self, key: Hashable, value: Value) -> None:
        if len(self._young) >= self._max_entries:
            self._young, self._old = {}, self._young
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
