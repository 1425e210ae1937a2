"""`octile train` on 2 and 4 gloo ranks: equal to one process, refused, killed, hanging; see rank_cases.py."""

import os
import socket
from functools import cache

import pytest
import torch
import torch.multiprocessing as mp
from filelock import FileLock

from tests.train import rank_cases

NAMES = {world: list(rank_cases.cases(world)) for world in (2, 4)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory):
    """Return what went wrong in a world, by rank. It starts once, also for several workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of_world(world: int) -> list[dict[str, str]]:
        folder = base / f"trainers-on-{world}"
        with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
            if not folder.exists():
                folder.mkdir()
                patch.setenv("OMP_NUM_THREADS", "1")
                mp.spawn(rank_cases.run, (world, str(folder), str(store.folder), free_port()), world)
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]

    return of_world


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_trainers(failures, world: int, name: str):
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures(world)) if of_rank[name]]
    assert not failed, "\n".join(failed)
