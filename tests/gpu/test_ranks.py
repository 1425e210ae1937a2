"""Runs and sharded state on two GPUs, over NCCL; see tests/train/rank_cases.py and tests/parallel/state_cases.py."""

from functools import cache

import pytest
import torch
import torch.multiprocessing as mp

from tests.parallel import state_cases
from tests.train import rank_cases
from tests.train.test_ranks import free_port
from tests.worlds import Failures, assert_passed, read_failures


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory):
    """Return what went wrong, by rank, in the cases of a part of the tests. Each part starts its ranks once."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    @cache
    def of_part(part: str) -> Failures:
        folder = str(tmp_path_factory.mktemp(part))
        if part == "state":
            mp.spawn(state_cases.run, (2, folder, "cuda"), 2)
        else:
            mp.spawn(rank_cases.run, (2, folder, str(store.folder), free_port(), "cuda"), 2)
        return read_failures(folder, 2)

    return of_part


@pytest.mark.parametrize("name", state_cases.cases(2))
def test_sharded_state(failures, name: str):
    assert_passed(failures("state"), name)


@pytest.mark.parametrize("name", rank_cases.gpu_cases())
def test_trainers(failures, name: str):
    assert_passed(failures("trainers"), name)
