"""Configurations that were measured to be faster than the chosen ones, stored in a file of the user's cache folder.

    {"<rounded problem, SMs and GPU>": {"config": {…}, "microseconds": 12.3}}

`octile bench tune` writes the file. An entry that is no longer a valid configuration is ignored. A file that cannot be
read is not used, which the logger `octile` says, and is renamed when something is stored.
"""

import functools
import json
import logging
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from octile.extras import require
from octile.kernels import disk_cache
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip, Problem

log = logging.getLogger("octile")
ENUMS = {"a_scales": Scales, "b_scales": Scales, "schedule": Schedule, "store": Store}


def lookup(problem: Problem, chip: Chip) -> GemmConfig | None:
    """Return the configuration that was measured for a rounded problem, or None."""
    return _load(path(), _stamp(path())).get(_key(problem, chip))


def store(problem: Problem, chip: Chip, config: GemmConfig, microseconds: float) -> None:
    """Store a configuration for a rounded problem, in place of an earlier one.

    Raises:
        ImportError: filelock is not installed.
        OSError: the file cannot be read or written.
    """
    require("filelock", extra="cuda")
    from filelock import FileLock

    path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(path().with_suffix(".lock"), mode=0o600):
        try:
            entries = _read(path())
        except ValueError as error:
            damaged = path().with_suffix(".damaged")
            path().replace(damaged)
            log.warning("%s is damaged (%s): it is renamed to %s", path(), error, damaged.name)
            entries = {}
        entries[_key(problem, chip)] = {"config": asdict(config), "microseconds": microseconds}
        disk_cache.write_locked(path(), json.dumps(entries, indent=1, sort_keys=True).encode())


def path() -> Path:
    """Return the path of the file."""
    return disk_cache.folder() / "tuned.json"


def _key(problem: Problem, chip: Chip) -> str:
    """The key of all problems that a kernel serves: what is done with rows past the groups changes its options alone.

    Groups are measured with multiples of 128 rows, and others take the same kernel.
    """
    named = asdict(replace(problem, zero_rest=True, row_invariant=False))
    values = " ".join(f"{name}={int(value)}" for name, value in named.items() if name != "alignment")
    return f"{values} multiprocessors={chip.multiprocessors} device={chip.name}"


def _stamp(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(1)
def _load(file: Path, stamp: int) -> dict[str, GemmConfig]:
    try:
        entries = _read(file)
    except (OSError, ValueError) as error:
        log.warning("kernels that octile bench tune has measured are not used: %s: %s", file, error)
        return {}
    found = {}
    for key, entry in entries.items():
        try:
            found[key] = _config(entry["config"])
        except (KeyError, TypeError, ValueError):  # written by an earlier version
            continue
    return found


def _config(values: dict[str, int | bool]) -> GemmConfig:
    names = {field.name for field in fields(GemmConfig)}
    if set(values) != names:
        raise ValueError(f"an entry must name {sorted(names)}")
    return GemmConfig(**{name: ENUMS[name](value) if name in ENUMS else value for name, value in values.items()})  # type: ignore[arg-type]


def _read(file: Path) -> dict[str, Any]:
    """Return the entries of a file, or none if there is no file.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON object.
    """
    try:
        entries = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(entries, dict):
        raise ValueError(f"it must be a JSON object, not {type(entries).__name__}")
    return entries
