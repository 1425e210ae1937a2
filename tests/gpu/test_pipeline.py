"""Pipeline schedules on two GPUs, by NCCL, compared with one process: the cases of tests/parallel for two ranks."""

import pytest
import torch
import torch.multiprocessing as mp

from tests.parallel import pipeline_cases
from tests.worlds import Failures, assert_passed, read_failures


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    """What went wrong, by rank."""
    folder = tmp_path_factory.mktemp("pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS needs to be deterministic
        mp.spawn(pipeline_cases.run, (str(folder), "cuda"), 2)
    return read_failures(folder, 2)


@pytest.mark.parametrize("name", pipeline_cases.cases({2: None}))
def test_ranks(name: str, request: pytest.FixtureRequest):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert_passed(request.getfixturevalue("failures"), name)
