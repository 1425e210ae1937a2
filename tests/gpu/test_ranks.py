"""Runs and sharded state on two GPUs, over NCCL: train/strategy/rank_cases.py and parallel/state_cases.py."""

from collections.abc import Callable

import pytest
import torch

from tests.parallel import state_cases
from tests.train.strategy import rank_cases
from tests.train.strategy.test_ranks import free_port
from tests.worlds import Failures, assert_passed, start_once, start_ranks


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture(scope="module")
def of_state(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong with sharded state, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(state_cases.run, (world, folder, "cuda"), world)

    return start_once(tmp_path_factory, "state-on-gpus", start)


@pytest.fixture(scope="module")
def of_trainers(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong with trainers, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(rank_cases.run, (world, folder, str(store.folder), free_port(), "cuda"), world)

    return start_once(tmp_path_factory, "trainers-on-gpus", start)


@pytest.mark.parametrize("name", state_cases.cases(2))
def test_sharded_state(of_state, name: str):
    assert_passed(of_state(2), name)


@pytest.mark.parametrize("name", rank_cases.gpu_cases())
def test_trainers(of_trainers, name: str):
    assert_passed(of_trainers(2), name)
