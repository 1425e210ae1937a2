"""On a GPU the choice of keys is the CPU's, ties too, and sparse attention is close, forward and backward."""

import math

import pytest
import torch

from octile.ops.sparse_attention import sparse_attention, sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from octile.ops.sparse_attention_weights import sparse_attention_weights
from octile.ops.top_keys import top_keys


def test_the_choice_of_keys_is_that_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-40, 40, (300, 5000), generator=generator).float()  # with ties
    logits[3, 7:90] = math.nan
    logits[5, 100:200] = -math.inf
    starts = torch.randint(-5, 2000, (300,), generator=generator, dtype=torch.int32)
    ends = torch.randint(0, 5500, (300,), generator=generator, dtype=torch.int32)
    top_k = top_keys(logits.cuda(), starts.cuda(), ends.cuda(), 2048)
    assert torch.equal(top_k.cpu(), top_keys(logits, starts, ends, 2048))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_sparse_attention_is_close_to_that_of_a_cpu(dtype: torch.dtype, rounding: float):
    generator = torch.Generator().manual_seed(0)
    q, latents = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((50, 16, 576), (3000, 576)))
    ends = torch.randint(1, 3000, (50,), generator=generator, dtype=torch.int32)
    positions = top_keys(torch.randn(50, 3000, generator=generator), ends * 0, ends, 512)
    found = sparse_attention(q.cuda(), latents.cuda(), positions.cuda(), 512, 0.05)
    expected = sparse_attention(q, latents, positions, 512, 0.05)
    torch.testing.assert_close(found.cpu(), expected, rtol=rounding, atol=rounding)


def training_operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """The gradient of o, q, latents and positions, with absent ones in between and outside."""
    generator = torch.Generator().manual_seed(0)
    shapes = (150, 16, 512), (150, 16, 576), (400, 576)
    do, q, latents = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    ends = torch.randint(0, 400, (150,), generator=generator, dtype=torch.int32)
    positions = top_keys(torch.randn(150, 400, generator=generator), ends * 0, ends, 128)
    positions[:, ::5] = -1
    return [do, q, latents, positions]


def trained(do: torch.Tensor, q: torch.Tensor, latents: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    o, lse = sparse_attention_with_lse(q, latents, positions, 512, 0.05)
    weights = sparse_attention_weights(q, latents, positions, lse, 512, 0.05)
    return [o, lse, weights, *sparse_attention_backward(do, q, latents, positions, o, lse, 512, 0.05)]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_the_operators_of_training_are_close_to_those_of_a_cpu(dtype: torch.dtype, rounding: float):
    operands = training_operands(dtype)
    on_gpu = [t.cuda() for t in operands]
    on_gpu[3] = torch.where(on_gpu[3] < 0, 400, on_gpu[3])  # outside, so absent as well
    for found, expected in zip(trained(*on_gpu), trained(*operands), strict=True):
        is_finite = expected.isfinite()
        assert torch.equal(found.isfinite().cpu(), is_finite)
        found, expected = (t.cpu().float().masked_fill(~is_finite, 0.0) for t in (found, expected))
        assert (found - expected).norm() <= rounding * expected.norm()


def test_gradients_in_float32_have_the_same_bits_at_every_call():
    on_gpu = [t.cuda() for t in training_operands(torch.float32)]
    first = trained(*on_gpu)
    for _ in range(10):
        assert all(torch.equal(*pair) for pair in zip(trained(*on_gpu), first, strict=True))
