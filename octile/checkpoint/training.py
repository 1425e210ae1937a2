"""Checkpoints of a training run: one folder per step, written atomically, verified before use.

    checkpoints/step_00000100/tensors.safetensors       weights, moments, generator states, …
                              state.json                numbers and text
                              octile.json               checksums of both

A checkpoint is written as step_00000100.partial and renamed when it is on the disk. An existing checkpoint of the same
step is renamed to step_00000100.replaced first; it is read from there if a crash came between the two renames. Nothing
is pickled.
"""

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octile.checkpoint.files import RECORD, read_record, sync_folder, verify, write_json, write_record
from octile.checkpoint.tensor_file import TensorFile, TensorSpec, writing
from octile.validation import read_json

TENSORS, STATE = "tensors.safetensors", "state.json"
STEP_FOLDER = re.compile(r"step_(\d{8,})")
PARTIAL, REPLACED = ".partial", ".replaced"


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

    target = Path(folder) / f"step_{step:08d}"
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
    _prune(target.parent, step, keep)
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
        ValueError: there are checkpoints, but all are damaged.
    """
    steps = {step: path for step, path in _steps(Path(folder)).items() if up_to is None or step <= up_to}
    for path in reversed(steps.values()):
        try:
            _verify(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"checkpoint {path.name} cannot be used, trying the one before: {error}", stacklevel=2)
        else:
            return path
    if steps:
        raise ValueError(f"all {len(steps)} checkpoints in {folder} are damaged")
    return None


def load_checkpoint(path: str | Path, check: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors (to the CPU) and the state that `save_checkpoint` was given.

    Args:
        path: the checkpoint's folder.
        check: whether to compare the checksums first; `latest_checkpoint` has done so for the one that it returned.

    Raises:
        FileNotFoundError: path is not a checkpoint.
        ValueError: a file of it is damaged.
    """
    path = Path(path)
    if check:
        _verify(path)
    file = TensorFile(path / TENSORS)
    return {name: file.read(name) for name in file.specs}, read_json(path / STATE)


def _verify(path: Path) -> None:
    if not (path / RECORD).exists():
        raise FileNotFoundError(f"{path} is not a complete checkpoint: it has no {RECORD}")
    record = read_record(path)
    for name in (TENSORS, STATE):
        if name not in record:
            raise ValueError(f"{path / RECORD} is damaged: it has no checksum of {name}")
        verify(path / name, record[name])


def _replace_folder(partial: Path, target: Path) -> None:
    """Rename partial to target. An existing target is renamed first and deleted last."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(partial, target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` up to a step, and what interrupted writers left."""
    newest = [path for number, path in _steps(folder).items() if number <= step][-keep:]
    for path in folder.glob("step_*"):
        name = path.name.removesuffix(PARTIAL).removesuffix(REPLACED)
        if STEP_FOLDER.fullmatch(name) and path not in newest:
            shutil.rmtree(path)


def _steps(folder: Path) -> dict[int, Path]:
    """Return step → folder, oldest first. A .replaced folder counts if there is no other of its step."""
    found: dict[int, Path] = {}
    for suffix in (REPLACED, ""):
        for path in folder.glob(f"step_*{suffix}"):
            if match := STEP_FOLDER.fullmatch(path.name.removesuffix(suffix)):
                found[int(match[1])] = path
    return dict(sorted(found.items()))
