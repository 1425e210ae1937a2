"""Checkpoints of many ranks: each writes what it holds while training goes on, and any number of ranks reads them.

    checkpoints = DistributedCheckpoints("run/checkpoints")        # or s3://…: any file system of fsspec
    checkpoints.save(step, tensors, state)                          # on all ranks; returns when the tensors are copied
    checkpoints.wait()

    path = checkpoints.latest()
    load_tensors(path, targets, check=False)                        # on 1, 2, 8 … ranks, with other chunks
    ShardedCheckpoint(path).rows("model.norm.weight", 0, 4)         # on one, without a process group

Tensors are copied to host memory, pinned if they are on a GPU, and a thread writes them. Errors go to all ranks, by a
gloo group of its own. A chunk that several ranks hold is copied and written by one of them. `sharded.py` has the
format. `torch.distributed.checkpoint` does the same, but its ranks pickle what they tell each other.

**A kill at any time loses nothing.** Every save goes to a new folder. Its octile.json, which makes it a checkpoint, is
written last, by rank 0, when all files of all ranks are on the disk. Only then are older checkpoints removed.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from octile.checkpoint.files import RECORD
from octile.checkpoint.sharded import (
    Chunk,
    ShardedCheckpoint,
    ShardWriter,
    Sizes,
    WrittenChunk,
)
from octile.checkpoint.step_folders import (
    check_records,
    finished_steps,
    newest_intact,
    next_folder,
    prune,
    verify_files,
    why_unusable,
)
from octile.checkpoint.store import Store
from octile.checkpoint.tensor_file import TensorSpec
from octile.parallel.ranks import gather_outcomes, gather_results

T = TypeVar("T")


@dataclass(frozen=True)
class _Piece:
    """What a rank tells the others of a chunk that it holds."""

    name: str
    whole: TensorSpec
    offset: Sizes
    numel: int
    nbytes: int


class DistributedCheckpoints:
    """The checkpoints of a run on many ranks, or of one process where torch.distributed is not initialized.

    All ranks make it and call its methods, in the same order.

    Args:
        folder: the run's `checkpoints/`, a path or a URL that fsspec knows, the same for all ranks; created if it does
            not exist.
        keep: number of checkpoints to keep, at least 1.
        timeout: after which a rank that waits for another one's part raises RuntimeError; None: gloo's, half an hour.

    Raises:
        ValueError: keep is below 1, or fsspec knows no such protocol.
        ImportError: fsspec needs a package for this protocol that is not installed.
    """

    def __init__(self, folder: str | Path, keep: int = 2, timeout: timedelta | None = None):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.store, self.keep = Store(folder), keep
        self._group = own_group(timeout)
        self._stager = HostStager()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor | Chunk], state: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint of a step. The tensors may change when this returns; a thread writes copies.

        It waits for the save before it. When the checkpoint is complete, all others but the `keep` - 1 before it are
        removed; so are those of later steps, from which the run was not resumed.

        Args:
            step: number of finished steps, at least 0.
            tensors: name → what this rank holds: a tensor, of which every rank that names it holds all; a chunk; or a
                DTensor. All chunks of a name together must make the whole tensor.
            state: a value that JSON can represent; that of rank 0 is written.

        Raises:
            ValueError: step is negative; the chunks of a tensor are not the whole tensor, or ranks disagree about its
                shape or dtype. On all ranks, before anything is written.
            TypeError: JSON cannot represent state, or safetensors has no such dtype as a tensor's.
            OSError, RuntimeError: the save before this one failed, on any rank. Earlier checkpoints are unchanged.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        chunks: dict[str, Chunk] = {}
        content = b""
        rank, _ = rank_of(self._group)

        def describe() -> tuple[str, list[_Piece]]:
            nonlocal content
            chunks.update({name: Chunk.of(name, tensor) for name, tensor in tensors.items()})
            pieces = [_piece(name, chunk) for name, chunk in chunks.items()]
            if rank > 0:
                return "", pieces
            content = json.dumps(state, indent=2, ensure_ascii=False).encode() + b"\n"
            return next_folder(self.store, step), pieces

        described = gather_results(self._group, describe, tuple[str, list[_Piece]])
        target, pieces = described[0][0], [pieces for _, pieces in described]
        own = share_out(pieces)[rank]
        copies = self._stager.copy({name: chunks[name] for name in own})
        specs = {piece.name: piece.whole for rank_pieces in pieces for piece in rank_pieces}
        writer = ShardWriter(self.store.folder(target), step, content)
        self._pending = self._thread.submit(self._write, target, writer, copies, specs)

    def _write(
        self, target: str, writer: ShardWriter, chunks: Mapping[str, Chunk], specs: Mapping[str, TensorSpec]
    ) -> None:
        """Write this rank's part of a checkpoint and, on rank 0, complete it; on a thread of each rank."""
        rank, n_ranks = rank_of(self._group)

        def complete() -> None:
            if rank == 0:
                writer.complete(specs, [chunk for rank_pieces in written for chunk in rank_pieces])
                prune(self.store, target, self.keep)

        written = self._together(writer.folder, lambda: writer.write(chunks, rank, n_ranks), list[WrittenChunk])
        self._together(writer.folder, complete)

    def _together(self, folder: Store, work: Callable[[], T], kind: Any = None) -> list[T]:
        """Return the results of all ranks; if one has failed, remove what all have written, and raise its exception.

        What ranks have written that are lost, and may still write, remains: the next save removes it.
        """
        outcomes = gather_outcomes(self._group, work, kind)
        for failed, (_, failure) in enumerate(outcomes):
            if failure is not None:
                if rank_of(self._group)[0] == 0 and RECORD not in folder.names():
                    with suppress(OSError):
                        folder.remove()
                failure.add_note(f"it failed on rank {failed}")
                raise failure
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def wait(self) -> None:
        """Wait until the last save is complete. To be called before the program ends.

        Raises:
            OSError, RuntimeError: it failed, on any rank. Earlier checkpoints are unchanged.
        """
        if self._pending is None:
            return
        future, self._pending = self._pending, None
        future.result()

    def latest(self, up_to: int | None = None) -> str | None:
        """Find the newest checkpoint whose checksums are right; ranks share the files out and return the same.

        A damaged checkpoint causes a warning on rank 0 that names the file, and the one before it is tried.

        Args:
            up_to: the last step to be considered; None: all.

        Returns:
            The path or URL of the checkpoint, or None where there are none.

        Raises:
            ValueError: there are checkpoints, but all are damaged, or their octile.json are gone.
            OSError, RuntimeError: the last save failed, or a store cannot be reached or read, on any rank.
        """
        self.wait()
        rank, _ = rank_of(self._group)

        def find() -> dict[int, str]:
            check_records(self.store)
            return finished_steps(self.store)

        found = gather_results(self._group, lambda: find() if rank == 0 else {}, dict[int, str])[0]
        steps = [(step, name) for step, name in found.items() if up_to is None or step <= up_to]
        name = newest_intact(self.store, steps, lambda folder: _problem(folder, self._group), warn=rank == 0)
        return None if name is None else self.store.path_of(name)

    def close(self) -> None:
        """Wait until the last save is complete, and free the host memory for copies and the process group.

        Raises:
            OSError, RuntimeError: the last save failed, on any rank.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._stager.close()
            if self._group is not None:
                dist.destroy_process_group(self._group)


class HostStager:
    """Copies chunks to host memory, pinned if they are on a GPU, which the next save uses again."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def copy(self, chunks: Mapping[str, Chunk]) -> dict[str, Chunk]:
        """Return copies, which are complete; the memory of tensors that are no longer saved is freed."""
        before, self._copies = self._copies, {}
        for name, chunk in chunks.items():
            tensor, copy = chunk.local.detach(), before.pop(name, None)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = copy.copy_(tensor, non_blocking=True)
        for device in {chunk.local.device for chunk in chunks.values() if chunk.local.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: replace(chunk, local=self._copies[name]) for name, chunk in chunks.items()}

    def close(self) -> None:
        """Free the memory."""
        self._copies.clear()


def load_tensors(path: str | Path, targets: Mapping[str, Tensor | Chunk], check: bool = True) -> None:
    """Overwrite tensors in place with those of a checkpoint, on all ranks together. Each reads what it needs.

    Args:
        path: the checkpoint's folder, a path or URL; of any number of ranks, or of `save_checkpoint`.
        targets: name → what this rank is to hold, on any device: a whole tensor, a chunk or a DTensor. Ranks may have
            other chunks than those that wrote the checkpoint. `ShardedCheckpoint(path).specs` has the names.
        check: whether to compare all checksums first, shared out over the ranks; not necessary for what
            `DistributedCheckpoints.latest` has just returned.

    Raises:
        FileNotFoundError: path is not a checkpoint, or a file of it is missing. On all ranks.
        ValueError: a file is damaged; the checkpoint lacks a tensor, or has it in another shape or dtype. On all ranks,
            before any tensor is changed.
    """
    group = own_group()

    def open_checked() -> tuple[ShardedCheckpoint, dict[str, Chunk]]:
        checkpoint = ShardedCheckpoint(path, check=False)
        chunks = checkpoint.check(targets)
        if check:
            verify_files(checkpoint.folder, *rank_of(group))
        return checkpoint, chunks

    opened: list[tuple[ShardedCheckpoint, dict[str, Chunk]]] = []
    try:
        gather_results(group, lambda: opened.append(open_checked()))
        ((checkpoint, chunks),) = opened
        gather_results(group, lambda: checkpoint.fill(chunks))
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def share_out(held: list[list[_Piece]]) -> list[list[str]]:
    """Decide which rank writes which chunk: one of those that hold it, so that all write about as many bytes.

    Args:
        held: the chunks that each rank holds.

    Returns:
        The names of the tensors whose chunks each rank writes.

    Raises:
        ValueError: ranks disagree about a tensor, or its chunks are not the whole tensor.
    """
    holders: dict[str, dict[Sizes, list[int]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, tuple[int, _Piece]] = {}
    sizes: dict[tuple[str, Sizes], _Piece] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            other, same = first.setdefault(piece.name, (rank, piece))
            if same.whole != piece.whole:
                raise ValueError(
                    f"{piece.name} is {same.whole.dtype} {list(same.whole.shape)} on rank {other}, but "
                    f"{piece.whole.dtype} {list(piece.whole.shape)} on rank {rank}"
                )
            if piece.numel or not piece.whole.numel:
                if sizes.setdefault((piece.name, piece.offset), piece) != piece:
                    raise ValueError(f"ranks hold chunks of {piece.name} that begin alike and end differently")
                holders[piece.name][piece.offset].append(rank)
    for name, (_, piece) in first.items():
        found = sum(sizes[name, offset].numel for offset in holders[name])
        if found != piece.whole.numel:
            raise ValueError(
                f"the chunks of {name} on all ranks have {found:,} elements together, but the tensor "
                f"{list(piece.whole.shape)} has {piece.whole.numel:,}"
            )
    written: list[list[str]] = [[] for _ in held]
    load = [0] * len(held)
    for (name, offset), piece in sorted(sizes.items(), key=lambda entry: (-entry[1].nbytes, entry[0])):
        rank = min(holders[name][offset], key=lambda rank: (load[rank], rank))
        load[rank] += piece.nbytes
        written[rank].append(name)
    return written


def own_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks, for the objects that they exchange; None where there is a single process."""
    if dist.is_available() and dist.is_initialized():
        return dist.new_group(backend="gloo", timeout=timeout)
    return None


def rank_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _problem(folder: Store, group: dist.ProcessGroup | None) -> str | None:
    return why_unusable(folder, lambda: gather_results(group, lambda: verify_files(folder, *rank_of(group))))


def _piece(name: str, chunk: Chunk) -> _Piece:
    local = chunk.local
    return _Piece(name, TensorSpec.of(local.dtype, chunk.shape), chunk.offset, local.numel(), local.nbytes)
