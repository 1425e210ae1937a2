"""Messages between two GPUs, over NCCL; see tests/parallel/test_messages.py."""

import pytest
import torch

from tests.parallel.test_messages import messages_of_all, messages_of_one
from tests.worlds import Outcomes, Work, each_work

WORKS = (messages_of_all, messages_of_one)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return Outcomes(tmp_path_factory, "messages-on-gpus", WORKS, device="cuda")


@each_work(WORKS)
def test_on_two_gpus(outcomes: Outcomes, work: Work):
    outcomes.assert_passed(work)
