"""One safetensors file: eight bytes with the header's length, a JSON header, then the tensors without gaps.

    ┌ u64 n ┬ {"name": {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, …}  n bytes ┬ data ┐

The header says how long the file must be, so a truncated file is told before anything is read. Offsets are known
before the data, so a tensor can be read and written in pieces: rows of it, while the rest never is in memory. That is
why the format is read and written here by hand; the `safetensors` package, which our tests read back with, wants whole
files. Nothing in a file is executed.  Source: the format's description at https://github.com/huggingface/safetensors.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from octile.checkpoint.files import atomic_write

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the limit of other readers


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor. `dtype` is the file's own word, which torch need not know."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> "TensorSpec":
        """Raises TypeError for a dtype that safetensors does not have."""
        if dtype not in DTYPE_NAMES:
            raise TypeError(f"dtype must be one that safetensors stores, not {dtype}")
        return cls(DTYPE_NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorFile:
    """A safetensors file, checked when opened, read tensor by tensor or row by row.

    Attributes:
        path: the file.
        specs: name → TensorSpec, in the order of the data.
        metadata: what else its writer noted, text by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged: truncated, or its header makes no sense.
    """

    def __init__(self, path: Path):
        self.path = path
        self.specs, self._begins, self.metadata = _read_header(path)

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        spec = self.specs[name]
        return self.read_bytes(name, 0, spec.nbytes).view(self._torch_dtype(name)).view(spec.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start … stop − 1 of a tensor of at least one dimension."""
        spec = self.specs[name]
        count, *inner = spec.shape
        row = spec.nbytes // max(count, 1)
        stop = min(stop, count)
        data = self.read_bytes(name, start * row, stop * row)
        return data.view(self._torch_dtype(name)).view(stop - start, *inner)

    def read_bytes(self, name: str, start: int, stop: int) -> Tensor:
        """Bytes start … stop − 1 of a tensor's data, uint8."""
        data = torch.empty(stop - start, dtype=torch.uint8)
        with open(self.path, "rb") as file:
            file.seek(self._begins[name] + start)
            found = file.readinto(data.numpy().data)
        if found != stop - start:
            raise ValueError(f"{self.path} is damaged: {found} bytes of {name} found, {stop - start} expected")
        return data

    def _torch_dtype(self, name: str) -> torch.dtype:
        dtype = self.specs[name].dtype
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"{name} in {self.path} is of type {dtype}, which torch does not have")
        return TORCH_DTYPES[dtype]


class TensorFileWriter:
    """The tensors of a file that is being written: each can be written in pieces, in any order. See `writing`."""

    def __init__(self, file: BinaryIO, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]):
        self._file = file
        self._specs = specs
        self._missing = {name: spec.nbytes for name, spec in specs.items()}
        self._begins = _write_header(file, specs, metadata)

    def write(self, name: str, tensor: Tensor, row: int = 0) -> None:
        """Writes a tensor, or rows of it from `row` on.

        Raises:
            TypeError: the tensor's dtype is not the announced one.
        """
        spec = self._specs[name]
        if DTYPE_NAMES.get(tensor.dtype) != spec.dtype:
            raise TypeError(f"{name} must be {spec.dtype}, not {tensor.dtype}")
        start = row * (spec.nbytes // max(spec.shape[0], 1)) if row else 0
        self.write_bytes(name, start, tensor.detach().cpu().contiguous().flatten().view(torch.uint8))

    def write_bytes(self, name: str, start: int, data: Tensor) -> None:
        """Writes uint8 data from byte `start` of a tensor on."""
        if start + data.numel() > self._specs[name].nbytes:
            raise ValueError(f"{name} must have {self._specs[name].nbytes} bytes, not {start + data.numel()}")
        self._file.seek(self._begins[name] + start)
        self._file.write(data.numpy().data)
        self._missing[name] -= data.numel()

    def check_complete(self) -> None:
        """Raises RuntimeError if a tensor was not written in full."""
        for name, missing in self._missing.items():
            if missing:
                raise RuntimeError(f"{name} was announced, but {missing} of its bytes were not written")


@contextmanager
def writing(
    path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> Iterator[TensorFileWriter]:
    """Writes a safetensors file with these tensors; it takes its name when the block ends and all are written."""
    with atomic_write(path) as file:
        out = TensorFileWriter(file, specs, metadata or {})
        yield out
        out.check_complete()


def _write_header(file: BinaryIO, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> dict[str, int]:
    """Returns where each tensor begins. Wide types come first, so that every tensor is aligned to its type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}  # "pt" is what transformers asks for
    offset, offsets = 0, {}
    for name in sorted(specs, key=lambda n: -_itemsize(specs[n])):
        spec, offsets[name] = specs[name], offset
        offset += spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offsets[name], offset)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + begin for name, begin in offsets.items()}


def _itemsize(spec: TensorSpec) -> int:
    return TORCH_DTYPES[spec.dtype].itemsize if spec.dtype in TORCH_DTYPES else 1


def _read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, str]]:
    """Every tensor's spec and where in the file it begins, and the metadata; the file is as long as it says."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + max(length, 2):
            raise ValueError(f"{path} is damaged: {size} bytes found, {8 + max(length, 2)} expected for its header")
        if length > MAX_HEADER:
            raise ValueError(f"{path} is damaged: its header claims {length} bytes, {MAX_HEADER} are the limit")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = {str(name): str(text) for name, text in header.pop("__metadata__", {}).items()}
        begins, specs = _parse(header)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: its header is not that of a safetensors file") from None
    end = _check_offsets(path, begins, specs)
    if size != 8 + length + end:
        raise ValueError(f"{path} is damaged: {size} bytes found, {8 + length + end} expected")
    return specs, {name: 8 + length + begin for name, begin in begins.items()}, metadata


def _parse(header: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, TensorSpec]]:
    """Where each tensor begins, and its spec, in the order of the data."""
    begins, specs = {}, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (index(offset) for offset in entry["data_offsets"])
        shape = tuple(index(extent) for extent in entry["shape"])
        if not isinstance(entry["dtype"], str) or min(shape, default=0) < 0:
            raise ValueError
        begins[name], specs[name] = begin, TensorSpec(entry["dtype"], shape, end - begin)
    return begins, specs


def _check_offsets(path: Path, begins: Mapping[str, int], specs: Mapping[str, TensorSpec]) -> int:
    """Tensors must follow one another and be as large as their shapes say. Returns where the last one ends."""
    position = 0
    for name, spec in specs.items():
        needed = spec.numel * TORCH_DTYPES[spec.dtype].itemsize if spec.dtype in TORCH_DTYPES else spec.nbytes
        if begins[name] != position or not 0 <= needed == spec.nbytes:
            raise ValueError(
                f"{path} is damaged: {name} {spec.dtype} {list(spec.shape)} needs bytes {position} to "
                f"{position + needed}, its header says {begins[name]} to {begins[name] + spec.nbytes}"
            )
        position += needed
    return position
