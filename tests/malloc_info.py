"""What glibc's malloc has, by its mallinfo2."""

import ctypes

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
LIBC = ctypes.CDLL(None)
HAS_MALLOC_INFO = hasattr(LIBC, "mallinfo2")  # since glibc 2.33


class MallocInfo(ctypes.Structure):
    """The structure of mallinfo2, in bytes: `uordblks` are in use, `fordblks` free, `hblkhd` in use and mapped."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def malloc_info() -> MallocInfo:
    """Return what malloc has now."""
    function = LIBC.mallinfo2
    function.restype = MallocInfo
    return function()
