import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.nn.norm import RMSNorm


def exact(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@given(st.integers(0, 2**31), st.integers(1, 64), st.floats(1e-3, 1e3))
def test_equals_the_formula(seed, dim, size):
    generator = torch.Generator().manual_seed(seed)
    norm = RMSNorm(dim)
    norm.weight.data.uniform_(-2, 2, generator=generator)
    x = torch.randn(5, dim, generator=generator) * size
    torch.testing.assert_close(norm(x).double(), exact(x, norm.weight, 1e-6), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_normalized_in_float32():
    norm = RMSNorm(256)
    x = (1000 + torch.arange(256.0)).bfloat16()[None]  # the sum of squares has 9 digits, BF16 keeps 3
    assert torch.equal(norm.bfloat16()(x), exact(x, norm.weight, 1e-6).bfloat16())


def test_autocast_does_not_lower_the_precision():
    norm, x = RMSNorm(64), torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert torch.equal(y, norm(x))
