"""Cases that several ranks check together, in processes that start once for all tests of a file."""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock

Failures = Sequence[Mapping[str, str]]


def run_cases(cases: Mapping[str, Callable[[], None]], folder: str, rank: int) -> None:
    """Run all cases as one rank, and write what went wrong in each."""
    failures = {}
    for name, case in cases.items():
        failures[name] = ""
        try:
            case()
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    torch.save(failures, Path(folder) / f"{rank}.pt")


def read_failures(folder: str | Path, world: int) -> Failures:
    """Return what went wrong in the cases, by rank."""
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def start_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, start: Callable[[int, str], object]
) -> Callable[[int], Failures]:
    """Return what went wrong in a world of so many ranks. It starts once, also for several workers of pytest.

    Args:
        tmp_path_factory: pytest's.
        name: of the folder, and so of the tests.
        start: start(world, folder) runs the ranks of a world, whose cases end in `run_cases`.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of_world(world: int) -> Failures:
        folder = base / f"{name}-on-{world}"
        with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
            if not folder.exists():
                folder.mkdir()
                patch.setenv("OMP_NUM_THREADS", "1")
                start(world, str(folder))
        return read_failures(folder, world)

    return of_world


def assert_passed(failures: Failures, name: str) -> None:
    """Fail with what went wrong in a case, on each rank."""
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if of_rank[name]]
    assert not failed, "\n".join(failed)
