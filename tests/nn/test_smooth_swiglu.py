"""Tests of smooth SwiGLU: the powers of two that divide channels and multiply weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.nn.smooth_swiglu import power_of_2_at_least, scale_columns


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_power_of_2_is_the_next_one_up(value):
    scale = power_of_2_at_least(torch.tensor(value)).item()
    assert math.frexp(scale)[0] == 0.5
    assert scale / 2 < value <= scale


def test_power_of_2_of_zero_is_one():
    assert power_of_2_at_least(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_power_of_2_leaves_a_power_of_two():
    exact = 2.0 ** torch.arange(-120, 120)
    assert torch.equal(power_of_2_at_least(exact), exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_power_of_2_propagates_nan_and_inf(bad):
    assert not power_of_2_at_least(torch.tensor([bad])).isfinite().any()


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(torch.tensor(60000.0).half(), 2.0**16), (torch.tensor(3e38), 2.0**127)],
    ids=["fp16", "fp32"],
)
def test_power_of_2_of_the_largest_values_of_a_dtype_is_finite(amax, expected):
    assert power_of_2_at_least(amax).item() == expected


def test_scaled_columns_equal_the_products_in_fp32():
    weight, scale = torch.randn(5, 7).bfloat16(), torch.exp2(torch.arange(7.0))
    assert torch.equal(scale_columns(weight, scale), weight.float() * scale)


def test_the_gradient_of_scaled_columns_is_scaled_and_has_the_weights_dtype():
    weight, scale = torch.randn(5, 7).bfloat16().requires_grad_(), torch.exp2(torch.arange(7.0))
    scale_columns(weight, scale).sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad.float(), scale.expand(5, 7))
