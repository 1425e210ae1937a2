"""The folders of a run's checkpoints, one for each step: which there are, which are whole, which are removed.

    step_00000100             the checkpoint of step 100
    step_00000100.1           the same, written again by several ranks: a folder in an object store cannot be renamed
    step_00000100.partial     being written by one process, or left by one that was killed
    step_00000100.replaced    moved aside by one process while it writes that step again

octile.json, with the checksums of the other files, is the last file of a folder. A folder of several ranks that has
none is not finished and counts as absent. The file `unfinished` is in it from before all others but octile.json are
there until octile.json is.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from octile.checkpoint.files import RECORD
from octile.checkpoint.store import Store
from octile.validation import take_checksum

TENSORS, STATE, INDEX = "tensors.safetensors", "state.json", "index.json"
UNFINISHED = "unfinished"
STEP_FOLDER = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
PARTIAL, REPLACED = ".partial", ".replaced"


def folder_name(step: int, attempt: int = 0) -> str:
    """The name of a step's folder; attempts after the first have a number."""
    return f"step_{step:08d}" + (f".{attempt}" if attempt else "")


def next_folder(store: Store, step: int) -> str:
    """The name of a folder of a step that does not exist, and is newer than all of that step."""
    matches = [STEP_FOLDER.fullmatch(name) for name in store.names()]
    attempts = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
    return folder_name(step, max(attempts, default=-1) + 1)


def finished_steps(store: Store) -> dict[int, str]:
    """Return step → folder of all finished checkpoints, damaged or not, oldest first."""
    found: dict[int, tuple[int, str]] = {}
    for name in store.names():
        match = STEP_FOLDER.fullmatch(name.removesuffix(REPLACED))
        if match and not {RECORD, TENSORS}.isdisjoint(store.folder(name).names()):
            attempt = -1 if name.endswith(REPLACED) else int(match[2] or 0)
            step = int(match[1])
            found[step] = max(found.get(step, (-2, "")), (attempt, name))
    return {step: name for step, (_, name) in sorted(found.items())}


def check_records(store: Store) -> None:
    """Refuse a folder in which checkpoints lack only their octile.json, and none has one.

    A save that was killed leaves a folder without it, too, but this one lacks another file or is marked as unfinished.

    Raises:
        ValueError: it is so; a run would begin anew where one was.
    """
    if finished_steps(store):
        return
    whole = [
        name for name in store.names() if STEP_FOLDER.fullmatch(name) and _lacks_its_record_only(store.folder(name))
    ]
    if whole:
        raise ValueError(
            f"no checkpoint in {store.url} has its {RECORD}, which only a complete one has, but {whole[-1]} has all "
            f"other files: bring {RECORD} back, or remove the folder to begin anew"
        )


def _lacks_its_record_only(folder: Store) -> bool:
    names = set(folder.names())
    if not {INDEX, STATE} <= names or UNFINISHED in names:
        return False
    try:
        tensors = folder.read_json(INDEX)["tensors"].values()
        return {chunk["file"] for tensor in tensors for chunk in tensor["chunks"]} <= names
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged
        return False


def newest_intact(
    store: Store, steps: Iterable[tuple[int, str]], problem: Callable[[Store], str | None], warn: bool = True
) -> str | None:
    """Return the folder of the last of some checkpoints that has no problem, or None where there are none.

    Args:
        store: the folder of the checkpoints.
        steps: what `finished_steps` found, or a part of it.
        problem: returns why a checkpoint cannot be used, or None.
        warn: whether those that cannot be used cause warnings.

    Raises:
        ValueError: there are checkpoints, but all are damaged.
    """
    problems: dict[str, str] = {}
    names = [name for _, name in steps]
    for name in reversed(names):
        reason = problem(store.folder(name))
        if reason is None:
            for unusable, why in problems.items() if warn else ():
                warnings.warn(f"checkpoint {unusable} cannot be used, trying the one before: {why}", stacklevel=3)
            return name
        problems[name] = reason
    if names:
        raise ValueError(f"all {len(names)} checkpoints in {store.url} are damaged; {names[-1]}: {problems[names[-1]]}")
    return None


def verify_files(folder: Store, rank: int = 0, n_ranks: int = 1) -> None:
    """Compare the files of a checkpoint with their checksums; several ranks share them out.

    Raises:
        FileNotFoundError: it is not a checkpoint, or a file of it is missing.
        ValueError: a file of it is damaged.
    """
    for name, expected in list(checksums(folder).items())[rank::n_ranks]:
        folder.verify(name, expected)


def why_unusable(folder: Store, verify: Callable[[], object]) -> str | None:
    """Return why a checkpoint cannot be used, as `verify` raises it, or None.

    Raises:
        OSError: a store cannot be reached or read. What it has may be whole, and must not be passed over.
    """
    try:
        verify()
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    except OSError as error:
        if not folder.is_local:
            raise
        return str(error)  # a disk that cannot read a sector
    return None


def why_state_unusable(folder: Store) -> str | None:
    """Return why the state.json of a checkpoint cannot be used, or None.

    Raises:
        OSError: as for `why_unusable`.
    """
    return why_unusable(folder, lambda: folder.verify(STATE, checksums(folder)[STATE]))


def checksums(folder: Store) -> dict[str, dict[str, Any]]:
    """Return the checksum of each file of a checkpoint, the largest files first.

    Raises:
        FileNotFoundError: it is not a checkpoint.
        ValueError: octile.json is damaged.
    """
    try:
        record = folder.read_record()
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder.url} is not a complete checkpoint: it has no {RECORD}") from None
    if take_checksum(record):  # of one process, it has none
        raise ValueError(f"{folder.path_of(RECORD)} is damaged: its content is not that of its own SHA-256")
    files: dict[str, dict[str, Any]] = record["files"]
    for name in (STATE, INDEX if INDEX in files else TENSORS):
        if name not in files:
            raise ValueError(f"{folder.path_of(RECORD)} is damaged: it has no checksum of {name}")
    return dict(sorted(files.items(), key=lambda entry: -entry[1]["bytes"]))


def prune(store: Store, written: str, keep: int) -> None:
    """Remove all checkpoints but one just written and the `keep` - 1 before it, and what killed writers left.

    Checkpoints of later steps are removed, too: the run was resumed before them and no longer leads there.
    """
    step = _step(written)
    before = [name for number, name in finished_steps(store).items() if number < step]
    kept = {written, *before[max(len(before) - keep + 1, 0) :]}
    for name in store.names():
        if STEP_FOLDER.fullmatch(name.removesuffix(PARTIAL).removesuffix(REPLACED)) and name not in kept:
            store.folder(name).remove()


def _step(name: str) -> int:
    match = STEP_FOLDER.fullmatch(name)
    assert match is not None
    return int(match[1])
