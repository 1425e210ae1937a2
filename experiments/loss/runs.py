"""Read and write the results of runs: FOLDER/JOB.json.gz for each."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".json.gz"


def result_file(folder: Path, name: str) -> Path:
    """Return the path of a job's result."""
    return folder / f"{name}{SUFFIX}"


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Replace the file in one step, so that readers never see half of it. The same result gives the same bytes."""
    partial = file.with_suffix(".part")
    partial.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
    partial.replace(file)


def read_result(file: Path) -> dict[str, Any]:
    """Read a run's result."""
    return json.loads(gzip.decompress(file.read_bytes()))


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, sorted by the names of their jobs."""
    return [read_result(file) for file in sorted(folder.glob(f"*{SUFFIX}"))]
