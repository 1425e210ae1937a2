import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.ops.sigmoid import sigmoid, silu

X = 4 * torch.randn(70_000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", [sigmoid, silu])
@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 40), n=st.one_of(st.integers(1, 100), st.integers(32_000, 69_000)))
def test_the_bits_of_an_element_depend_on_it_alone(function, first, n):
    assert torch.equal(function(X[first : first + n].clone()), function(X)[first : first + n])


@pytest.mark.parametrize(("function", "of_torch"), [(sigmoid, torch.sigmoid), (silu, torch.nn.functional.silu)])
def test_values_are_torchs_but_for_rounding(function, of_torch):
    torch.testing.assert_close(function(X), of_torch(X), rtol=2**-21, atol=0)


def test_limits():
    x = torch.tensor([float("-inf"), -200.0, 0.0, 200.0, float("inf"), float("nan")])
    assert torch.equal(sigmoid(x)[:-1], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert torch.equal(silu(x)[1:-1], torch.tensor([0.0, 0.0, 200.0, float("inf")]))
    assert sigmoid(x).isnan().tolist() == [False] * 5 + [True]
    assert silu(x).isnan().tolist() == [True, *[False] * 4, True]
