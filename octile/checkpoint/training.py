"""Checkpoints of a training run: one folder per step, written atomically, verified before use.

    checkpoints/step_00000100/tensors.safetensors       weights, moments, generator states, …
                              state.json                numbers and text
                              octile.json               checksums of both

A checkpoint is written as step_00000100.partial and renamed when it is on the disk. An existing checkpoint of the same
step is renamed to step_00000100.replaced first; it is read from there if a crash came between the two renames. Nothing
is pickled. `distributed.py` writes the checkpoints of several ranks into the same folders, and both are read alike.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octile.atomic_files import sync_folder, write_json
from octile.checkpoint.files import write_record
from octile.checkpoint.step_folders import (
    PARTIAL,
    REPLACED,
    STATE,
    TENSORS,
    check_records,
    finished_steps,
    folder_name,
    newest_intact,
    prune,
    verify_files,
    why_unusable,
)
from octile.checkpoint.store import Store
from octile.checkpoint.tensor_file import TensorSpec, writing


def save_checkpoint(
    folder: str | Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write the checkpoint of a step, and delete all others but the `keep` - 1 before it.

    Checkpoints of later steps are deleted, too: the run was resumed before them and no longer leads there.

    Args:
        folder: the run's `checkpoints/`; created if it does not exist.
        step: number of finished steps, at least 0.
        tensors: name → tensor of any shape, dtype (BF16, FP8, integers, …) and device.
        state: a value that JSON can represent; floats are restored bit for bit.
        keep: number of checkpoints to keep, at least 1, including this one.

    Returns:
        The checkpoint's folder, `step_00000100`.

    Raises:
        ValueError: step is negative or keep below 1.
        TypeError: JSON cannot represent state, or safetensors has no such dtype as a tensor's.
        OSError: the disk is full or not writable. Earlier checkpoints are unchanged, and this one does not exist.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, not {step} and {keep}")
    specs = {name: TensorSpec.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    target = Path(folder) / folder_name(step)
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_json(partial / STATE, state)
        with writing(partial / TENSORS, specs) as out:
            for name, tensor in tensors.items():
                out.write(name, tensor)
        write_record(partial, (TENSORS, STATE), {"step": step})
        _replace_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    prune(Store(target.parent), target.name, keep)
    return target


def latest_checkpoint(folder: str | Path, up_to: int | None = None) -> Path | None:
    """Find the newest checkpoint whose checksums are right.

    A damaged checkpoint causes a warning that names it, and the one before it is tried.

    Args:
        folder: the run's `checkpoints/`.
        up_to: the last step to be considered; None: all.

    Returns:
        The checkpoint's folder, or None where there are no checkpoints.

    Raises:
        ValueError: there are checkpoints, but all are damaged, or their octile.json are gone.
    """
    found = find_latest(Store(folder), up_to)
    return None if found is None else Path(folder) / found.name


def find_latest(store: Store, up_to: int | None = None) -> Store | None:
    """Find the newest checkpoint whose checksums are right, as `latest_checkpoint` does, also under a URL.

    Returns:
        The folder of the checkpoint, or None where there are no checkpoints.

    Raises:
        ValueError: there are checkpoints, but all are damaged, or their octile.json are gone.
        OSError: a store cannot be reached or read.
    """
    check_records(store)
    steps = [(step, name) for step, name in finished_steps(store).items() if up_to is None or step <= up_to]
    name = newest_intact(store, steps, _problem)
    return None if name is None else store.folder(name)


def _problem(folder: Store) -> str | None:
    return why_unusable(folder, lambda: verify_files(folder))


def load_checkpoint(path: str | Path, check: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors (to the CPU) and the state that `save_checkpoint` or `DistributedCheckpoints.save` was given.

    Args:
        path: the checkpoint's folder.
        check: whether to compare the checksums first; `latest_checkpoint` has done so for the one that it returned.

    Raises:
        FileNotFoundError: path is not a checkpoint.
        ValueError: a file of it is damaged.
    """
    from octile.checkpoint.sharded import ShardedCheckpoint  # it takes a second to import

    checkpoint = ShardedCheckpoint(path, check)
    return checkpoint.read_parts(dict.fromkeys(checkpoint.specs)), checkpoint.state


def _replace_folder(partial: Path, target: Path) -> None:
    """Rename partial to target. An existing target is renamed first and deleted last."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(partial, target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
