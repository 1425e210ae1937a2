"""Hopper's GEMMs of BF16 operands on a GPU have the bits of Triton's, with which they compute the same rows."""

import pytest
import torch

from octile.kernels.cuda.gemm import bf16, request
from octile.kernels.triton import row_invariant


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("groups", "m", "n", "k"),
    [(1, 128, 2048, 64), (1, 3001, 32000, 2048), (1, 300, 4104, 72), (16, 1024, 512, 128), (3, 2047, 136, 512)],
)
def test_bits(groups: int, m: int, n: int, k: int, dtype: torch.dtype):
    torch.manual_seed(m)
    a, b = torch.randn(m, groups, k, device="cuda").bfloat16(), torch.randn(groups, n, k, device="cuda").bfloat16()
    found, expected = torch.full((2, m, groups, n), float("nan"), device="cuda").to(dtype)
    operands = a.transpose(0, 1), b
    assert bf16.why_unsupported(found.transpose(0, 1), *operands) is None
    bf16.launch(found.transpose(0, 1), *operands)
    row_invariant.launch_out(expected.transpose(0, 1), *operands)
    assert torch.equal(found, expected)
