"""A gate's GEMM on the tensor cores is as accurate as one in FP32."""

import pytest
import torch

from octile.ops.gate import gate_logits, gate_logits_backward

T, E, D = 300, 64, 7168


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_as_accurate_as_a_gemm_in_float32(weight: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(size, generator=generator) for size in ((T, D), (E, D), (T, E)))
    x, w, dy = x.bfloat16().cuda(), w.to(weight).cuda(), dy.cuda()
    logits, (dx, dw) = gate_logits(x, w), gate_logits_backward(dy, x, w)
    assert (logits.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    exact = x.double() @ w.double().mT, dy.double().mT @ x.double()
    for found, true in zip((logits, dw), exact, strict=True):
        # Tensor cores truncate where FP32 rounds: D / 16 times by up to 2⁻²³ of the accumulator.
        assert (found.double() - true).norm() <= 1e-5 * true.norm()
    true = dy.double() @ w.double()
    assert (dx.double() - true).norm() <= 1.01 * (true.bfloat16().double() - true).norm()
