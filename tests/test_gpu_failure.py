"""Which exceptions report that a GPU has failed, and what is said of them."""

import pytest
import torch

from octile.checkpoint.files import explaining_failures
from octile.gpu_failure import gpu_failure, is_gpu_failure


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.AcceleratorError("CUDA error: misaligned address\nSearch for …"), "misaligned address"),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
            "Triton Error [CUDA]: an illegal",
        ),
        (
            RuntimeError("gate.cu: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
            "gate.cu: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
        ),
    ],
    ids=["torch", "Triton", "octile"],
)
def test_it_is_recognized_whoever_has_launched_the_kernel(error, said):
    assert is_gpu_failure(error)
    assert gpu_failure(error).startswith(f"the GPU has failed: {said}")
    assert "\n" not in gpu_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: invalid argument"),
        ValueError("misaligned address"),
    ],
    ids=["out of memory", "wrong argument", "octile's own check"],
)
def test_other_errors_are_none(error):
    assert not is_gpu_failure(error)
    with pytest.raises(type(error)) as raised, explaining_failures(lambda: "to continue: …"):
        raise error
    assert not hasattr(raised.value, "__notes__")
