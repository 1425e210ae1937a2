"""A checkpoint whose tensors lie in pieces in several safetensors files, as torch.distributed.checkpoint sees it.

    tensors-00000-of-00004.safetensors, …    the chunks that each rank wrote, under the names of their tensors
    index.json     {"tensors": {name: {"dtype", "shape", "chunks": [{"file", "begin", "offset", "shape"}, …]}}}
    state.json     numbers and text
    octile.json    the checksums of all these files, and of itself; written last

torch.distributed.checkpoint plans what a rank reads. What it has for several ranks pickles, and is not used: each reads
alone what it needs (`ShardedCheckpoint.fill`), and `distributed.py` carries errors from one rank to all. A checkpoint
of one process, with a single `tensors.safetensors`, is read as a sharded one of one file. Nothing is pickled, and
nothing in a file is executed.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.futures import Future

from octile.checkpoint.files import RECORD
from octile.checkpoint.step_folders import INDEX, STATE, TENSORS, UNFINISHED, checksums
from octile.checkpoint.store import Store
from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorSpec, encode_header, read_header
from octile.validation import with_checksum

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A range of indices in each dimension of a tensor, which one rank or several hold.

    Attributes:
        local: the elements, of any dtype, on any device.
        shape: shape of the whole tensor.
        offset: the first index in each dimension of the whole tensor.

    Raises:
        ValueError: the chunk reaches beyond the tensor.
    """

    local: Tensor
    shape: Sizes
    offset: Sizes

    def __post_init__(self) -> None:
        sizes = tuple(self.local.shape)
        fits = len(sizes) == len(self.shape) == len(self.offset) and all(
            0 <= begin <= begin + size <= total
            for begin, size, total in zip(self.offset, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"a chunk {list(sizes)} at {list(self.offset)} is not part of a tensor {list(self.shape)}")

    @classmethod
    def rows(cls, local: Tensor, start: int, total: int) -> "Chunk":
        """The rows of a tensor with `total` rows that begin at row `start`."""
        return cls(local, (total, *local.shape[1:]), (start, *(0 for _ in local.shape[1:])))

    @classmethod
    def of(cls, name: str, tensor: "Tensor | Chunk") -> "Chunk":
        """The chunk of a tensor that this rank holds: all of it, or its part of a DTensor.

        Raises:
            ValueError: `name` is a DTensor that is yet to be summed over ranks, or whose local part is several chunks.
        """
        if isinstance(tensor, Chunk):
            return tensor
        if not isinstance(tensor, DTensor):
            return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} is a partial DTensor, {tensor.placements}: redistribute it first")
        if tensor.device_mesh.get_coordinate() is None:  # this rank is not in its mesh
            return cls.rows(tensor.to_local().new_empty(0, *tensor.shape[1:]), 0, tensor.shape[0])
        chunks = tensor.__create_chunk_list__()
        if len(chunks) != 1:
            raise ValueError(
                f"{name} is a DTensor, {tensor.placements}, whose local part is {len(chunks)} chunks, not one"
            )
        return cls(tensor.to_local(), tuple(tensor.shape), tuple(chunks[0].offsets))


@dataclass(frozen=True)
class StoredChunk:
    """Where a chunk of a tensor lies in a checkpoint.

    Attributes:
        file: the name of the file.
        begin: its first byte in the file.
        offset: the first index in each dimension of the whole tensor.
        shape: shape of the chunk.
    """

    file: str
    begin: int
    offset: Sizes
    shape: Sizes


class WrittenChunk(NamedTuple):
    """What a rank tells rank 0 of a chunk that it wrote.

    Attributes:
        name: name of the tensor.
        chunk: where it lies.
        n_bytes, sha256: size and checksum of its file.
    """

    name: str
    chunk: StoredChunk
    n_bytes: int
    sha256: str


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Plans to fill chunks from whatever chunks a checkpoint has. The state_dict has their local tensors."""

    def __init__(self, chunks: Mapping[str, Chunk]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = chunks

    def create_local_plan(self) -> LoadPlan:
        """Plan one item for each stored chunk that overlaps with a chunk of this rank."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, chunk in self._chunks.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [_dcp_chunk(chunk.offset, chunk.local.shape)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a local tensor that an item fills."""
        tensor: Tensor = self.state_dict[read_item.dest_index.fqn]
        return _narrow(tensor, read_item.dest_offsets, read_item.lengths)


class ShardWriter:
    """Writes one safetensors file for each rank that has chunks; rank 0 then writes the other files.

    Args:
        folder: the new checkpoint; a name that nothing else has written to. It appears with its first file.
        step: step of the checkpoint.
        state: the content of state.json, on rank 0.
    """

    def __init__(self, folder: Store, step: int, state: bytes):
        self.folder, self._step, self._state = folder, step, state

    def write(self, chunks: Mapping[str, Chunk], rank: int, n_ranks: int) -> list[WrittenChunk]:
        """Write the file of a rank, whose checksum is computed on the way."""
        if not chunks:
            return []
        file_name = f"tensors-{rank:05d}-of-{n_ranks:05d}.safetensors"
        specs = {name: TensorSpec.of(chunk.local.dtype, tuple(chunk.local.shape)) for name, chunk in chunks.items()}
        header, begins = encode_header(specs, {})
        with self.folder.writing(file_name) as file:
            out = _HashedFile(file)
            out.write(header)
            for name in begins:
                out.write(_bytes(chunks[name].local))
        return [
            WrittenChunk(name, StoredChunk(file_name, begins[name], chunk.offset, specs[name].shape), *out.checksum())
            for name, chunk in chunks.items()
        ]

    def complete(self, specs: Mapping[str, TensorSpec], written: Iterable[WrittenChunk]) -> None:
        """Write index.json and state.json and, when everything is on the disk, octile.json.

        Args:
            specs: name → dtype and shape of the whole tensor.
            written: the chunks of all ranks.
        """
        files: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Any]] = {
            name: {"dtype": spec.dtype, "shape": spec.shape, "chunks": []} for name, spec in specs.items()
        }
        for name, chunk, n_bytes, sha256 in written:
            tensors[name]["chunks"].append(asdict(chunk))
            files[chunk.file] = {"bytes": n_bytes, "sha256": sha256}
        self.folder.write(UNFINISHED, b"")
        for name, content in ((INDEX, json.dumps({"tensors": tensors}).encode()), (STATE, self._state)):
            self.folder.write(name, content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        record = {"step": self._step, "files": files}
        content = json.dumps(with_checksum(record), indent=2).encode()
        self.folder.write(RECORD, content + b"\n")
        self.folder.remove_file(UNFINISHED)


class ShardReader(StorageReader):
    """Reads ranges of rows of the chunks of a checkpoint.

    Args:
        checkpoint: an open one.
    """

    def __init__(self, checkpoint: "ShardedCheckpoint"):
        self._checkpoint = checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which chunks there are and where they lie."""
        return self._checkpoint.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan needs, one file after another, each from its beginning to its end."""
        per_file: dict[str, list[tuple[StoredChunk, ReadItem]]] = {}
        for item in plan.items:
            stored: StoredChunk = self._checkpoint.metadata.storage_data[item.storage_index]
            per_file.setdefault(stored.file, []).append((stored, item))
        for name, items in sorted(per_file.items()):
            with self._checkpoint.open(name) as file:
                for stored, item in sorted(items, key=lambda pair: (pair[0].begin, pair[1].storage_offsets)):
                    spec = self._checkpoint.specs[item.storage_index.fqn]
                    rows = _read_rows(file, self._checkpoint.folder.path_of(name), stored, item, spec.dtype)
                    target = planner.resolve_tensor(item)
                    target.copy_(_narrow(rows, (0, *item.storage_offsets[1:])[: rows.ndim], item.lengths))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a reader is made for its checkpoint."""
        return False


class ShardedCheckpoint:
    """A checkpoint that is open to be read: of several ranks, or of one process (`save_checkpoint`).

    index.json and state.json are checked when it is opened. The checksum of a file with tensors is compared before its
    first tensor is read.

    Args:
        path: the checkpoint's folder, a path or a URL.
        check: whether to compare checksums of tensors; not necessary for a checkpoint that was just found intact.

    Attributes:
        folder: where the files lie.
        specs: tensor name → dtype, shape and size of the whole tensor.
        state: the content of state.json.
        metadata: the same for torch.distributed.checkpoint, with a `StoredChunk` for each chunk.

    Raises:
        FileNotFoundError: path is not a checkpoint, or a file of it is missing.
        ValueError: a file of it is damaged.
    """

    def __init__(self, path: str | Path, check: bool = True):
        self.folder = Store(path)
        self._unverified = checksums(self.folder)
        self.state = self._read_json(STATE)
        tensors = self._read_json(INDEX)["tensors"] if INDEX in self._unverified else self._single_file()
        self.specs: dict[str, TensorSpec] = {}
        listed: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage: dict[MetadataIndex, StoredChunk] = {}
        for name, entry in tensors.items():
            dtype, shape = TORCH_DTYPES[entry["dtype"]], tuple(entry["shape"])
            self.specs[name] = TensorSpec.of(dtype, shape)
            chunks = [
                StoredChunk(chunk["file"], chunk["begin"], tuple(chunk["offset"]), tuple(chunk["shape"]))
                for chunk in entry["chunks"]
            ]
            stored = [_dcp_chunk(chunk.offset, chunk.shape) for chunk in chunks]
            listed[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), stored)
            storage |= {MetadataIndex(name, torch.Size(chunk.offset)): chunk for chunk in chunks}
        self.metadata = Metadata(listed, storage_data=storage)
        if not check:
            self._unverified = {}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return TORCH_DTYPES[self.specs[name].dtype]

    def open(self, name: str) -> BinaryIO:
        """Open a file of it, whose checksum is compared if it was not before.

        Raises:
            FileNotFoundError: the file is missing.
            ValueError: it is damaged.
        """
        if name in self._unverified:
            self.folder.verify(name, self._unverified[name])
            del self._unverified[name]
        return self.folder.open(name)

    def read(self, name: str) -> Tensor:
        """Read a whole tensor, to the CPU, from all files that have a part of it.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged.
        """
        spec = self.specs[name]
        return self._read(name, (0,) * len(spec.shape), spec.shape)

    def read_parts(self, rows: Mapping[str, slice | None]) -> dict[str, Tensor]:
        """Read tensors, or rows of them, to the CPU. Each file is opened once, so that a store gets few requests.

        Args:
            rows: name of a tensor → the rows start … stop − 1 of it, or None: the whole tensor.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged, or a tensor has fewer rows.
        """
        chunks = {}
        for name, part in rows.items():
            shape, dtype = tuple(self.specs[name].shape), self.dtype(name)
            if part is None:
                chunks[name] = Chunk.of(name, torch.empty(shape, dtype=dtype))
            else:
                local = torch.empty((part.stop - part.start, *shape[1:]), dtype=dtype)
                chunks[name] = Chunk.rows(local, part.start, shape[0])
        self.fill(chunks)
        return {name: chunk.local for name, chunk in chunks.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows start … stop − 1 of a tensor of at least one dimension, to the CPU.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged, or the tensor has fewer rows.
        """
        below = self.specs[name].shape[1:]
        return self._read(name, (start, *(0 for _ in below)), (stop - start, *below))

    def fill(self, targets: Mapping[str, Tensor | Chunk]) -> None:
        """Overwrite tensors, or this rank's chunks of them, in place. Other ranks need not take part.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged; or the checkpoint lacks a tensor, or has it in another shape or dtype.
        """
        chunks = self.check(targets)
        planner, reader = ChunkLoadPlanner(chunks), ShardReader(self)
        planner.set_up_planner(local_tensors(chunks), self.metadata)
        reader.read_data(planner.create_local_plan(), planner).wait()

    def check(self, targets: Mapping[str, Tensor | Chunk]) -> dict[str, Chunk]:
        """Check that tensors can be filled from this checkpoint, and return the chunks of this rank.

        Raises:
            ValueError: the checkpoint lacks a tensor, or has it in another shape or dtype.
        """
        chunks = {name: Chunk.of(name, tensor) for name, tensor in targets.items()}
        for name, chunk in chunks.items():
            if name not in self.specs:
                raise ValueError(f"the checkpoint {self.folder.url} lacks the tensor {name}")
            stored, needed = self.specs[name], TensorSpec.of(chunk.local.dtype, chunk.shape)
            if stored != needed:
                raise ValueError(
                    f"{name} is {stored.dtype} {list(stored.shape)} in the checkpoint {self.folder.url}, "
                    f"but {needed.dtype} {list(needed.shape)} here"
                )
        return chunks

    def _read(self, name: str, offset: Sizes, sizes: Sizes) -> Tensor:
        local = torch.empty(sizes, dtype=self.dtype(name))
        self.fill({name: Chunk(local, self.specs[name].shape, offset)})
        return local

    def _read_json(self, name: str) -> dict[str, Any]:
        self.folder.verify(name, self._unverified.pop(name))
        return self.folder.read_json(name)

    def _single_file(self) -> dict[str, Any]:
        """The index of a checkpoint of one process, from the header of its file."""
        with self.open(TENSORS) as file:
            header, data_begin = read_header(file)
        header.pop("__metadata__", None)
        return {
            name: {**entry, "chunks": [_whole(TENSORS, data_begin + entry["data_offsets"][0], entry["shape"])]}
            for name, entry in header.items()
        }


def local_tensors(chunks: Mapping[str, Chunk]) -> dict[str, Tensor]:
    """Return the local tensors of chunks, without what autograd and others attach to them."""
    return {name: chunk.local.detach() for name, chunk in chunks.items()}


def _dcp_chunk(offset: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))


def _whole(file: str, begin: int, shape: Sizes) -> dict[str, Any]:
    return asdict(StoredChunk(file, begin, (0,) * len(shape), shape))


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return data


def _narrow(tensor: Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
    ranges = tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))
    return tensor[ranges] if ranges else tensor


def _read_rows(file: BinaryIO, path: str, stored: StoredChunk, item: ReadItem, dtype_name: str) -> Tensor:
    """Read the rows of a stored chunk that an item needs; all of a tensor without dimensions."""
    dtype, below = TORCH_DTYPES[dtype_name], stored.shape[1:]
    start, n_rows = (item.storage_offsets[0], item.lengths[0]) if stored.shape else (0, 1)
    row_bytes = math.prod(below) * dtype.itemsize
    data = torch.empty(n_rows * row_bytes, dtype=torch.uint8)
    file.seek(stored.begin + start * row_bytes)
    found = file.readinto(data.numpy().data)  # type: ignore[attr-defined]
    if found != len(data):
        raise ValueError(f"{path} is damaged: {found} bytes of {item.storage_index.fqn} found, {len(data)} expected")
    return data.view(dtype).reshape((n_rows, *below) if stored.shape else ())


class _HashedFile:
    """Passes what is written on to a file, and computes the checksum of it."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)
        self._size += len(data)

    def checksum(self) -> tuple[int, str]:
        """The number of bytes, and their SHA-256."""
        return self._size, self._digest.hexdigest()
