"""On a GPU the choice of keys is the CPU's, ties too, and sparse attention is close to the CPU's."""

import math

import pytest
import torch

from octile.ops.sparse_attention import sparse_attention
from octile.ops.top_keys import top_keys


def test_the_choice_of_keys_is_that_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-40, 40, (300, 5000), generator=generator).float()  # with ties
    logits[3, 7:90] = math.nan
    logits[5, 100:200] = -math.inf
    starts = torch.randint(-5, 2000, (300,), generator=generator, dtype=torch.int32)
    ends = torch.randint(0, 5500, (300,), generator=generator, dtype=torch.int32)
    chosen = top_keys(logits.cuda(), starts.cuda(), ends.cuda(), 2048)
    assert torch.equal(chosen.cpu(), top_keys(logits, starts, ends, 2048))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_sparse_attention_is_close_to_that_of_a_cpu(dtype: torch.dtype, rounding: float):
    generator = torch.Generator().manual_seed(0)
    q, latents = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((50, 16, 576), (3000, 576)))
    ends = torch.randint(1, 3000, (50,), generator=generator, dtype=torch.int32)
    positions = top_keys(torch.randn(50, 3000, generator=generator), ends * 0, ends, 512)
    found = sparse_attention(q.cuda(), latents.cuda(), positions.cuda(), 512, 0.05)
    expected = sparse_attention(q, latents, positions, 512, 0.05)
    torch.testing.assert_close(found.cpu(), expected, rtol=rounding, atol=rounding)
