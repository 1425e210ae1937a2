"""Global memory between inaccessible pages, so that a kernel which reads or writes outside of a tensor faults.

Each tensor's storage is copied to memory that ends at an inaccessible page, and copied back after the launch.
"""

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

ALIGNMENT = 16  # bytes, of a storage: as vector loads and tensor maps need
INACCESSIBLE = 1 << 28  # bytes on either side: a wrong index is often far off
CANARY = b"\xcd"
MAP_NORESERVE, MAP_FAILED = 0x4000, 2**64 - 1  # of Linux
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """Copies of the storages of tensors for one launch."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.copies = {start: _Copy(start, size) for start, size in storages.items() if size}

    def address(self, pointer: int) -> int:
        """The address of the copy of a byte; the byte's own address where its storage was not given."""
        for start, copy in self.copies.items():
            if start <= pointer < start + copy.size:
                return copy.start + pointer - start
        return pointer

    def describe(self, address: int) -> str:
        """Describe an invalid address by its distance from the storage of the nearest tensor."""
        for start, copy in self.copies.items():
            if copy.low <= address < copy.low + copy.length:
                return f"byte {address - copy.start} of a storage of {copy.size} bytes (the one at {start:#x})"
        return "no tensor is near"

    def copy_back(self) -> None:
        """Copy all storages back to their tensors.

        Raises:
            MemoryError: the bytes just before a storage, or between its end and the inaccessible page, were written.
        """
        for start, copy in self.copies.items():
            ctypes.memmove(start, copy.start, copy.size)
            if not copy.is_intact():
                raise MemoryError(
                    f"the kernel wrote within {mmap.PAGESIZE} bytes outside of a storage of {copy.size} bytes"
                )

    def close(self) -> None:
        for copy in self.copies.values():
            copy.close()


class _Copy:
    """A copy of one storage: inaccessible pages, canary bytes, the copy, up to 15 canary bytes, inaccessible pages."""

    def __init__(self, source: int, size: int) -> None:
        page = mmap.PAGESIZE
        room = -(-(size + ALIGNMENT) // page) * page
        self.size, self.room, self.length = size, room, room + 2 * INACCESSIBLE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.low = _libc.mmap(None, self.length, 0, flags, -1, 0)
        self.middle = middle = self.low + INACCESSIBLE
        if self.low == MAP_FAILED or _libc.mprotect(middle, room, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), f"no memory for a copy of {size} bytes")
        self.start = (middle + room - size) // ALIGNMENT * ALIGNMENT
        self.before = self.start - middle
        self.after = room - size - self.before
        ctypes.memset(middle, CANARY[0], room)
        ctypes.memmove(self.start, source, size)

    def is_intact(self) -> bool:
        before = ctypes.string_at(self.start - self.before, self.before)
        after = ctypes.string_at(self.start + self.size, self.after)
        return before + after == CANARY * (self.before + self.after)

    def close(self) -> None:
        _libc.munmap(self.low, self.length)
