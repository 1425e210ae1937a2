"""ZeRO-1 on 2 and 4 gloo ranks compared with one process, bit for bit; see state_cases.py."""

import os
from functools import cache

import pytest
import torch
import torch.multiprocessing as mp
from filelock import FileLock

from tests.parallel import state_cases

NAMES = {world: list(state_cases.cases(world)) for world in (2, 4)}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory):
    """Return what went wrong in a world, by rank. It starts once, also for several workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of_world(world: int) -> list[dict[str, str]]:
        folder = base / f"state-on-{world}"
        with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
            if not folder.exists():
                folder.mkdir()
                patch.setenv("OMP_NUM_THREADS", "1")
                mp.spawn(state_cases.run, (world, str(folder)), world)
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]

    return of_world


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_ranks(failures, world: int, name: str):
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures(world)) if of_rank[name]]
    assert not failed, "\n".join(failed)
