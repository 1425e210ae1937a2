"""One safetensors file, read and written tensor by tensor or in ranges of rows.

    ┌ u64 n ┬ {"name": {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, …}  n bytes ┬ data ┐

The `safetensors` package reads: it checks the header when a file is opened, and its `pread` backend brings only the
rows that are asked for into memory. It has no writer for parts of a tensor, so `TensorFileWriter` is ours: the header
is written first, then each tensor as a whole or in ranges of rows. Nothing in a file is executed.
Source: the description of the format at https://github.com/huggingface/safetensors.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octile.atomic_files import atomic_write

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
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package


@dataclass(frozen=True)
class TensorSpec:
    """The dtype, shape and size of a stored tensor. `dtype` is the file's name for it, which torch may lack ("F4")."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> "TensorSpec":
        """The spec of a tensor with a torch dtype.

        Raises:
            TypeError: safetensors has no such dtype.
        """
        if dtype not in DTYPE_NAMES:
            raise TypeError(f"dtype must be one that safetensors stores, not {dtype}")
        return cls(DTYPE_NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class TensorFile:
    """A safetensors file, checked when opened, read by tensors or by ranges of rows.

    Attributes:
        path: the file.
        specs: name → TensorSpec, in the order of the data.
        metadata: the header's `__metadata__`, text by name.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ValueError: it is no safetensors file, or it is damaged: its length or its header is wrong.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, "pt", backend="pread")
        except FileNotFoundError:  # safetensors' error also of a file that may not be read
            path.open("rb").close()
            raise
        except SafetensorError as error:
            raise ValueError(f"{path} is {_damage(path, error)}") from None
        self.metadata: dict[str, str] = self._file.metadata() or {}
        with open(path, "rb") as file:
            header, data_begin = read_header(file)
        header.pop("__metadata__", None)
        self.specs: dict[str, TensorSpec] = {}
        self._begins: dict[str, int] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            self.specs[name] = TensorSpec(entry["dtype"], tuple(entry["shape"]), end - begin)
            self._begins[name] = data_begin + begin

    def read(self, name: str) -> Tensor:
        """Read a whole tensor, to the CPU.

        Raises:
            ValueError: torch has no such dtype, or the file was damaged since it was opened.
        """
        self._check_dtype(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path} is damaged: {name} cannot be read: {error}") from None
        return tensor

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows start … stop − 1 of a tensor of at least one dimension; fewer if it ends before.

        Raises:
            ValueError: as for `read`.
        """
        return self._range(name, 0, start, stop)

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Read columns start … stop − 1 of a matrix, contiguous; fewer if it ends before.

        Raises:
            ValueError: as for `read`.
        """
        return self._range(name, 1, start, stop)

    def _range(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        self._check_dtype(name)
        spec = self.specs[name]
        stop = min(stop, spec.shape[dim])
        if spec.nbytes == 0 or stop <= start:  # the library refuses empty ranges
            shape = *spec.shape[:dim], max(stop - start, 0), *spec.shape[dim + 1 :]
            return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype])
        try:
            part: Tensor = self._file.get_slice(name)[(*dim * (slice(None),), slice(start, stop))]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path} is damaged: {name} cannot be read: {error}") from None
        return part

    def read_bytes(self, name: str, start: int, stop: int) -> Tensor:
        """Read bytes start … stop − 1 of a tensor of any dtype, uint8."""
        data = torch.empty(stop - start, dtype=torch.uint8)
        with open(self.path, "rb") as file:
            file.seek(self._begins[name] + start)
            found = file.readinto(data.numpy().data)
        if found != stop - start:
            raise ValueError(f"{self.path} is damaged: {found} bytes of {name} found, {stop - start} expected")
        return data

    def _check_dtype(self, name: str) -> None:
        dtype = self.specs[name].dtype
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"{name} in {self.path} is of type {dtype}, which torch does not have")


class TensorFileWriter:
    """Writes the tensors of a new file, whole or in ranges of rows, in any order. Made by `writing`."""

    def __init__(self, file: BinaryIO, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]):
        self._file = file
        self._specs = specs
        self._missing = {name: spec.nbytes for name, spec in specs.items()}
        header, self._begins = encode_header(specs, metadata)
        file.write(header)

    def write(self, name: str, tensor: Tensor, row: int = 0) -> None:
        """Write a tensor, or rows of it that begin at `row`.

        Raises:
            TypeError: the tensor's dtype is not the one in its spec.
            ValueError: it has more bytes than its spec.
        """
        spec = self._specs[name]
        if DTYPE_NAMES.get(tensor.dtype) != spec.dtype:
            raise TypeError(f"{name} must be {spec.dtype}, not {tensor.dtype}")
        start = row * (spec.nbytes // max(spec.shape[0], 1)) if row else 0
        self.write_bytes(name, start, tensor.detach().cpu().contiguous().flatten().view(torch.uint8))

    def write_bytes(self, name: str, start: int, data: Tensor) -> None:
        """Write uint8 data at byte `start` of a tensor.

        Raises:
            ValueError: it reaches beyond the tensor's bytes.
        """
        if start + data.numel() > self._specs[name].nbytes:
            raise ValueError(f"{name} must have {self._specs[name].nbytes} bytes, not {start + data.numel()}")
        self._file.seek(self._begins[name] + start)
        self._file.write(data.numpy().data)
        self._missing[name] -= data.numel()

    def check_complete(self) -> None:
        """Check that every tensor was written in full.

        Raises:
            RuntimeError: bytes of a tensor are missing.
        """
        for name, missing in self._missing.items():
            if missing:
                raise RuntimeError(f"{name} was announced, but {missing} of its bytes were not written")


@contextmanager
def writing(
    path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> Iterator[TensorFileWriter]:
    """Context manager that writes a safetensors file. The file appears under its name when the block ends.

    Args:
        path: the file; one that exists is replaced.
        specs: name → dtype, shape and size of every tensor to be written.
        metadata: text by name for the header's `__metadata__`.

    Raises:
        RuntimeError: bytes of a tensor were not written. The file does not appear then.
        OSError: the disk is full.
    """
    with atomic_write(path) as file:
        out = TensorFileWriter(file, specs, metadata or {})
        yield out
        out.check_complete()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of tensors at hand, and the folders above it; see `writing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    specs = {name: TensorSpec.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with writing(path, specs, metadata) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the byte at which each tensor begins, in the order of the data.

    Wide dtypes come first, so that every tensor is aligned to its element size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}  # transformers requires "pt"
    offset, offsets = 0, {}
    for name in sorted(specs, key=lambda n: -_itemsize(specs[n])):
        spec, offsets[name] = specs[name], offset
        offset += spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offsets[name], offset)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begins = {name: 8 + len(text) + begin for name, begin in offsets.items()}
    return struct.pack("<Q", len(text)) + text, begins


def _itemsize(spec: TensorSpec) -> int:
    return TORCH_DTYPES[spec.dtype].itemsize if spec.dtype in TORCH_DTYPES else 1


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Read the JSON header of a file, without checking it, and the byte at which its data begins."""
    length = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(min(length, MAX_HEADER))), 8 + length


def _damage(path: Path, error: SafetensorError) -> str:
    """What a file is that safetensors refuses: no such file, or damaged in its length, if known, or in its header."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(LFS_POINTER):
        return "a Git LFS pointer in place of the file: run git lfs pull"
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page in place of the file: download it again"
    length, begin = int.from_bytes(start[:8], "little"), start[8:9]
    if length > MAX_HEADER:
        return f"no safetensors file: it would have a header of more than {MAX_HEADER:,} bytes"
    if begin not in (b"{", b""):
        return f"no safetensors file: its header begins with the byte {begin[0]:#04x} instead of {{"
    expected, least = 8 + max(length, 2), "at least "  # a header is at least {}
    if size >= expected:
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError), open(path, "rb") as file:
            header, data_begin = read_header(file)
            header.pop("__metadata__", None)
            expected = data_begin + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
            least = ""
    return f"damaged: {f'{size} bytes found, {least}{expected} expected' if size != expected else error}"
