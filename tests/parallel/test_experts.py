"""Experts on 2 and 4 gloo ranks compared with one process, bit for bit; see expert_cases.py."""

import os
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.multiprocessing as mp
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.nn import Gate, MoE
from octile.parallel import shard_experts
from tests.parallel import expert_cases
from tests.parallel.expert_cases import E, K, Tokens

MESHES = {2: ["ranks", "peers"], 4: ["ranks", "peers", "nodes"]}
NAMES = {world: list(expert_cases.cases(world, [], dict.fromkeys(meshes))) for world, meshes in MESHES.items()}


def draw(world: int) -> list[Tokens]:
    """Distributions of tokens: any number on each rank, any experts from a part of them."""
    found: list[Tokens] = []

    @settings(max_examples=8)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        used = data.draw(st.lists(st.integers(0, E - 1), min_size=K, max_size=E, unique=True))
        token = st.permutations(used).map(lambda order: order[:K])
        found.append(Tokens([data.draw(st.lists(token, max_size=6)) for _ in range(world)]))

    collect()
    return found


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, str]]]:
    """Return what went wrong in a world, by rank. It starts once, also for several workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of_world(world: int) -> list[dict[str, str]]:
        folder = base / f"experts-on-{world}"
        with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
            if not folder.exists():
                folder.mkdir()
                patch.setenv("OMP_NUM_THREADS", "1")
                mp.spawn(expert_cases.run, (world, str(folder), draw(world)), world)
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]

    return of_world


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_ranks(failures, world: int, name: str):
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures(world)) if of_rank[name]]
    assert not failed, "\n".join(failed)


def test_without_a_process_group_the_error_says_so():
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialized"):
        shard_experts(MoE(Gate(16, 4, 2), 16, 8))
