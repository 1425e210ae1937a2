"""Rows across nodes by NVSHMEM on two GPUs of one host, each a node of its own: the cases of tests/parallel.

NVSHMEM is then the backend of all symmetric memory of the process, also of the kernels inside a node, and cannot be
changed: these ranks are others than those of test_experts.py.
"""

from collections.abc import Callable

import pytest
import torch

from tests.parallel import expert_cases
from tests.parallel.expert_cases import E, K, Tokens
from tests.train.strategy import rank_cases
from tests.train.strategy.test_ranks import free_port
from tests.worlds import Failures, assert_passed, start_once, start_ranks

WORLD = 2
ON_PEERS = ("gate-fp8-peers", "many_exchanges-peers", "decoding-peers", "in_flight-peers", "captured-peers")
NAMES = [
    *(
        name
        for name in expert_cases.cases(WORLD, [], dict.fromkeys(["nvshmem_peers"]))
        if name.endswith("-nvshmem_peers")
    ),
    *ON_PEERS,
]


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong on so many GPUs, by rank."""

    def start(world: int, folder: str) -> None:
        drawn = [
            Tokens([[[(r + t + k) % E for k in range(K)] for t in range(3 * n)] for r in range(world)])
            for n in range(4)
        ]
        start_ranks(expert_cases.run, (world, folder, drawn, "cuda", NAMES), world)

    return start_once(tmp_path_factory, "experts-by-nvshmem", start)


@pytest.fixture(scope="module")
def of_trainers(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong with trainers, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(rank_cases.run, (world, folder, str(store.folder), free_port(), "cuda", True), world)

    return start_once(tmp_path_factory, "trainers-by-nvshmem", start)


@pytest.mark.parametrize("name", NAMES)
def test_experts(failures, name: str):
    assert_passed(failures(WORLD), name)


@pytest.mark.parametrize("name", rank_cases.nvshmem_cases())
def test_trainers(of_trainers, name: str):
    assert_passed(of_trainers(WORLD), name)
