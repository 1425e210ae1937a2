# mypy: allow-untyped-defs
"""A table of tensors on the device, so that one kernel works on many tensors: their addresses and sizes.

    table   int64: the first program of each tensor, then a row per tensor:
            elements | index in the caller's list | address in the first list | address in the second list | ...

A program works on a chunk of one tensor, which it finds by binary search (`find_tensor`). The table is built on the
host and copied to the device when an address changes. A CUDA graph copies it at each replay, from pinned memory that
must exist before the capture: whoever captures runs once before it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS: tl.constexpr = tl.constexpr(2)  # of a row, before the addresses
TRITON_DTYPES = {None: None, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ALIGNMENT = 16  # bytes of a vectorized access
PINNED_WORDS = 2**18  # 2 MiB, half of it for the next capture


class TensorTable(NamedTuple):
    """A table on the device.

    Attributes:
        words: the table.
        tensors, programs: the number of tensors, and of the programs that a launch needs.
        steps: steps of the binary search.
        is_aligned: whether all addresses are multiples of ALIGNMENT.
        dtypes: the dtype of each list, None for an empty one.
    """

    words: Tensor
    tensors: int
    programs: int
    steps: int
    is_aligned: bool
    dtypes: tuple[torch.dtype | None, ...]


def tables(lists: Sequence[Sequence[Tensor]], elements: int) -> Iterator[TensorTable]:
    """Yield a table for each combination of dtypes and alignment that occurs.

    Args:
        lists: contiguous tensors of one device; the tensors at one position of all lists have one shape. A list may be
            empty, and has no column then.
        elements: elements of a program.
    """
    device = lists[0][0].device
    groups: dict[tuple[bool, tuple[torch.dtype, ...]], list[tuple[int, ...]]] = {}
    for index, tensors in enumerate(zip(*filter(None, lists), strict=True)):
        addresses = [t.data_ptr() for t in tensors]
        is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
        if elements_of_tensor := tensors[0].numel():
            key = is_aligned, tuple(t.dtype for t in tensors)
            groups.setdefault(key, []).append((elements_of_tensor, index, *addresses))
    for (is_aligned, dtypes), rows in groups.items():
        found = iter(dtypes)
        counts = [triton.cdiv(row[0], elements) for row in rows]
        words = (*_starts(counts), *(word for row in rows for word in row))
        yield TensorTable(
            _on_device(words, device),
            len(rows),
            sum(counts),
            (len(rows) - 1).bit_length(),
            is_aligned,
            tuple(next(found) if tensors else None for tensors in lists),
        )


def _starts(counts: list[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        yield total
        total += count


def _on_device(words: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type != "cuda":  # Triton's interpreter, or compilation without a GPU
        return torch.tensor(words).to(device)
    if torch.cuda.is_current_stream_capturing():
        return _PINNED.carve(words).to(device, non_blocking=True)
    _PINNED.reserve(len(words))
    return _cached(words, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=32)
def _cached(words: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The words on the device, copied in a stream; a table depends on nothing but its words."""
    return torch.tensor(words, pin_memory=True).to(device, non_blocking=True)


class _PinnedForGraphs:
    """Pinned memory that CUDA graphs read at each replay. It is never freed, since graphs do not say when they end."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0  # of the last buffer

    def reserve(self, words: int) -> None:
        """Ensure that a capture finds capacity for many tables, some of this size."""
        if not self._buffers or len(self._buffers[-1]) - self._used < max(8 * words, PINNED_WORDS // 2):
            self._buffers.append(torch.empty(max(16 * words, PINNED_WORDS), dtype=torch.int64, pin_memory=True))
            self._used = 0

    def carve(self, words: tuple[int, ...]) -> Tensor:
        """Return the words in pinned memory.

        Raises:
            RuntimeError: there is no capacity; pinned memory cannot be allocated in a capture.
        """
        if not self._buffers or len(self._buffers[-1]) - self._used < len(words):
            raise RuntimeError("run the step at least once before its capture in a CUDA graph: it needs pinned memory")
        part = self._buffers[-1][self._used : self._used + len(words)]
        self._used += len(words)
        return part.copy_(torch.tensor(words))


_PINNED = _PinnedForGraphs()


@triton.jit
def find_tensor(table, tensors, program, STEPS: tl.constexpr):
    """The last tensor whose first program is not after `program`."""
    low = program * 0
    high = low + tensors
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_after = tl.load(table + middle) > program
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low


@triton.jit
def address(row, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of a row."""
    pointer = tl.load(row + COLUMNS + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer
