"""FSDP2 with an FP8 all-gather, and tensor parallelism, on two GPUs: the cases of tests/parallel and tests/nn."""

import pytest
import torch

from tests.compatibility.processes import RANKS
from tests.nn import tensor_parallel_cases
from tests.parallel import fsdp_cases
from tests.worlds import Outcomes, Work

WORKS = (
    *(fsdp_cases.bits, fsdp_cases.training, fsdp_cases.bf16, fsdp_cases.accumulated, fsdp_cases.recomputed),
    *(fsdp_cases.unfused, fsdp_cases.compiled, fsdp_cases.fewer_bytes, fsdp_cases.saved),
    *(tensor_parallel_cases.column_and_row, tensor_parallel_cases.sequence, tensor_parallel_cases.swiglu),
    *(tensor_parallel_cases.optimizer, tensor_parallel_cases.autocast),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    return Outcomes(tmp_path_factory, "fsdp-on-gpus", WORKS, RANKS, "cuda")


@pytest.mark.parametrize("work", WORKS)
def test_ranks(work: Work, outcomes: Outcomes):
    outcomes.assert_passed(work)
