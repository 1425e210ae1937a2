"""The loss experiment's GEMM without promotion equals the tensor core model."""

import pytest
import torch

from experiments.loss.recipes import raw_accumulator
from octile.kernels.cuda.gemm.request import why_not_on
from octile.lab import tensor_core_scaled_matmul
from octile.ops.quantize import quantize


@pytest.mark.parametrize("shape", [(8256, 384, 1536), (1536, 8201, 70), (3, 15, 1)])
def test_gemms_without_promotion_equal_the_tensor_core_model(shape):
    if reason := why_not_on(torch.device("cuda")):
        pytest.skip(f"the product kernel does not run here: {reason}")
    m, k, n = shape
    operands = []
    for rows in (m, n):
        data, scale = quantize(torch.randn(rows, k, device="cuda").abs(), rows, k, "e4m3", False)
        operands += [data, scale, (rows, k)]
    assert torch.equal(raw_accumulator(*operands), tensor_core_scaled_matmul(*operands, promote_every=None))
