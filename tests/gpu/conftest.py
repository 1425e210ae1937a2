"""Tests on a GPU, from the operators up to training.

`pytest tests/gpu` runs all of them; without a GPU each is skipped, with the reason.
"""

import pytest
import torch

from octile.kernels.cuda.gemm import request as gemm_request
from tests.train.conftest import store, text  # noqa: F401  (fixtures)

if torch.cuda.is_available():
    import triton  # noqa: F401  (before tests/kernels/triton chooses the interpreter for the process)


@pytest.fixture(autouse=True)
def a_gpu_that_runs_the_kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"needs a GPU of sm_80 or later, not {torch.cuda.get_device_name()}")
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set in this process: run `pytest tests/gpu` by itself")


@pytest.fixture(params=["hopper", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with Hopper's CUDA kernels, and with the Triton kernels that every other GPU uses."""
    if request.param == "portable":
        monkeypatch.setattr(gemm_request, "why_not_on", lambda device: "the portable kernels are tested")
