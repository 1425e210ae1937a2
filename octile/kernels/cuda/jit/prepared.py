"""Prepared kernels: a loaded kernel with its launch shape, whose launches are cached by their arguments.

GEMMs and quantizations launch through it. A step of training allocates the same addresses again, so most launches were
prepared before: then a launch costs one dictionary look-up and one call of the driver.
"""

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from octile.kernels.cuda.jit.driver import Kernel, Launch

Value = TypeVar("Value")
MAX_LAUNCHES = 16384  # some 2 kB each


class BoundedCache(dict[Hashable, Value | None], Generic[Value]):
    """Cache that holds the last `max_entries` entries that were used, and at most twice as many in all.

    `cache[key]` is the stored value, or None. Entries are stored in this dictionary, and when it is full they become
    the old ones; the previous old ones are dropped. An old entry that is read becomes young again. Reading a young
    entry is one dictionary look-up, without a Python function.

    Threads may share a cache: a thread that reads while another one writes gets the entry or None.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries
        self._old: dict[Hashable, Value | None] = {}

    def __missing__(self, key: Hashable) -> Value | None:
        """Return an old entry, and make it young; None: nothing is stored, or it was dropped."""
        found = self._old.get(key)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: Hashable, value: Value | None) -> None:
        if len(self) >= self._max_entries:
            self._old = self.copy()
            self.clear()
        super().__setitem__(key, value)


class Structures(NamedTuple):
    """A kernel's argument that is an array of structures.

    Attributes:
        form: a character of `struct` for each field; Q is an address and nothing else.
        capacity: structures that fit into the array.
        rows: the fields of the first ones; the others are zero.
    """

    form: str
    capacity: int
    rows: tuple[tuple[int, ...], ...]

    def pack(self, relocated: Callable[[int], int] = lambda address: address) -> bytes:
        """Return the bytes of the array, with `relocated` addresses."""
        row = struct.Struct(f"<{self.form}")
        packed = [
            row.pack(*(relocated(v) if code == "Q" else v for code, v in zip(self.form, values, strict=True)))
            for values in self.rows
        ]
        return b"".join(packed).ljust(self.capacity * row.size, b"\0")


def address_of(t: "Tensor | None") -> int:
    """Return the address of an operand, or 0 for none."""
    return 0 if t is None else t.data_ptr()


_launches: "BoundedCache[Launch]" = BoundedCache(MAX_LAUNCHES)


class PreparedKernel:
    """A kernel on one GPU with its launch shape."""

    def __init__(
        self, kernel: "Kernel", grid: int, cluster: int, threads: int, shared_bytes: int, programmatic: bool = False
    ) -> None:
        """Args as for `driver.Kernel.ready`."""
        self.kernel, self.programmatic = kernel, programmatic
        self.shape = (grid, cluster, threads, shared_bytes)

    def arguments(self, values: tuple[Any, ...]) -> Sequence[Any]:
        """Return the kernel's arguments for the values of a launch: the values themselves, structures as bytes."""
        return tuple(value.pack() if isinstance(value, Structures) else value for value in values)

    def launch_at(self, values: tuple[Any, ...]) -> "Launch":
        """Return the launch on the current stream; calling it starts the kernel.

        Args:
            values: numbers and addresses from which the arguments follow.
        """
        stream = self.kernel.current_stream()
        key = (self, values, stream)
        launch = _launches[key]
        if launch is None:
            launch = _launches[key] = self.kernel.ready(*self.shape, self.arguments(values), stream, self.programmatic)
        return launch
