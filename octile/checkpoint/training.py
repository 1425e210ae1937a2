"""Checkpoints of a training run: a folder a step, complete or not there, checked before use.

    checkpoints/step_00000100/tensors.safetensors       weights, moments, generator states, …
                              state.json                numbers and text
                              octile.json               checksums of both

A checkpoint is written as step_00000100.partial and renamed once it is on the disk. One of the same step moves aside to
step_00000100.replaced first, and is read from there if a crash came between the two renames. Nothing is pickled.
"""

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octile.checkpoint.files import RECORD, read_json, read_record, sync_folder, verify, write_json, write_record
from octile.checkpoint.tensor_file import TensorFile, TensorSpec, writing

TENSORS, STATE = "tensors.safetensors", "state.json"
STEP_FOLDER = re.compile(r"step_(\d{8,})")
PARTIAL, REPLACED = ".partial", ".replaced"


def save_checkpoint(
    folder: str | Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Writes the checkpoint of a step; only it and the `keep` - 1 before it stay.

    Checkpoints of later steps are removed: a run that resumed before them has left that future.

    Args:
        folder: the run's `checkpoints/`; made if it is not there.
        step: number of finished steps, at least 0.
        tensors: name → tensor of any shape, dtype (BF16, FP8, integers, …) and device.
        state: what JSON can hold; floats come back bit for bit.
        keep: checkpoints to keep, at least 1, this one included.

    Returns:
        The checkpoint's folder, `step_00000100`.

    Raises:
        ValueError: step is negative or keep below 1.
        TypeError: state holds what JSON can't, or a tensor's dtype is unknown to safetensors.
        OSError: the disk is full or not writable. Earlier checkpoints are untouched, and this one is not there.
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
    """The newest checkpoint (of a step up to `up_to`) whose checksums are right, or None where there is none at all.

    A damaged one is named in a warning and the one before it is tried.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
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
    """Reads the tensors (on the CPU) and the state that `save_checkpoint` was given.

    Args:
        path: the checkpoint's folder.
        check: compare the checksums first; `latest_checkpoint` has done so for the one that it found.

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
    """Renames partial to target. A checkpoint of the same step moves aside first and is deleted last."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(partial, target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Leaves the newest `keep` checkpoints up to a step, and nothing that an interrupted writer left."""
    kept = [path for number, path in _steps(folder).items() if number <= step][-keep:]
    for path in folder.glob("step_*"):
        name = path.name.removesuffix(PARTIAL).removesuffix(REPLACED)
        if STEP_FOLDER.fullmatch(name) and path not in kept:
            shutil.rmtree(path)


def _steps(folder: Path) -> dict[int, Path]:
    """Step → folder, oldest first. One that moved aside counts where nothing took its place."""
    found: dict[int, Path] = {}
    for suffix in (REPLACED, ""):
        for path in folder.glob(f"step_*{suffix}"):
            if match := STEP_FOLDER.fullmatch(path.name.removesuffix(suffix)):
                found[int(match[1])] = path
    return dict(sorted(found.items()))
