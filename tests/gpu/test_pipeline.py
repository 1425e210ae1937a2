"""Pipeline schedules on two GPUs, by NCCL, compared with one process: the cases of tests/parallel for two ranks."""

from collections.abc import Callable

import pytest
import torch

from tests.parallel import pipeline_cases
from tests.worlds import Failures, assert_passed, start_once, start_ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(pipeline_cases.run, (folder, "cuda"), world)

    return start_once(tmp_path_factory, "pipeline-on-gpus", start)


@pytest.mark.parametrize("name", [*pipeline_cases.cases({2: None}), *pipeline_cases.gpu_cases(None)])
def test_ranks(failures, name: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert_passed(failures(2), name)


def test_a_rank_with_both_ends_is_captured(tmp_path_factory: pytest.TempPathFactory):
    def start(world: int, folder: str) -> None:
        start_ranks(pipeline_cases.run_alone, (folder,), world)

    assert_passed(start_once(tmp_path_factory, "pipeline-on-a-gpu", start)(1), "dualpipev is captured")
