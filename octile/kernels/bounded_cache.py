"""A bounded memory of what was made for a key."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Keeps the `most` entries used last, and at most twice as many; to look one up costs one dictionary's get.

    What is stored or found goes into a young dictionary. When that is full it becomes the old one, and the entries that
    were not used since the last such change are forgotten. Nothing has to be put in order at a look-up.

    Threads may share it: one that looks up while another stores finds its entry, or nothing and makes it again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}

    def get(self, key: Hashable) -> Value | None:
        """What was stored; None: nothing was, or it is forgotten."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self[key] = found
        return found

    def __setitem__(self, key: Hashable, value: Value) -> None:
        if len(self._young) >= self._most:
            self._young, self._old = {}, self._young
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
