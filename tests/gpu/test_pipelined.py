"""`octile train` on a pipeline of two GPUs, over NCCL, compared with one: tests/train/strategy/pipeline_cases.py."""

from collections.abc import Callable

import pytest
import torch

from tests.train.strategy import pipeline_cases
from tests.train.strategy.test_ranks import free_port
from tests.worlds import Failures, assert_passed, start_once, start_ranks

pytestmark = pytest.mark.timeout(400, method="thread")  # the first test runs all cases


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong, by rank."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def start(world: int, folder: str) -> None:
        start_ranks(pipeline_cases.run, (world, folder, str(store.folder), free_port(), "cuda"), world)

    return start_once(tmp_path_factory, "pipelined-on-gpus", start)


@pytest.mark.parametrize("name", pipeline_cases.gpu_cases())
def test_trainers(failures, name: str):
    assert_passed(failures(2), name)
