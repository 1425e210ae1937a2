"""`octile train` on a pipeline of two GPUs, over NCCL, compared with one; see tests/train/pipeline_cases.py."""

import pytest
import torch

from tests.train import pipeline_cases
from tests.train.test_ranks import free_port
from tests.worlds import Failures, assert_passed, read_failures, start_ranks


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    """What went wrong, by rank."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = str(tmp_path_factory.mktemp("pipelined"))
    start_ranks(pipeline_cases.run, (2, folder, str(store.folder), free_port(), "cuda"), 2)
    return read_failures(folder, 2)


@pytest.mark.parametrize("name", pipeline_cases.gpu_cases())
def test_trainers(failures, name: str):
    assert_passed(failures, name)
