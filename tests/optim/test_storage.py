"""Tests of scaled tensors in optimizer states: quantization error and the smallest values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.optim.storage import Scaled

DTYPES = [torch.float8_e4m3fn, torch.float16]


def stored(x: torch.Tensor, dtype: torch.dtype, tiny: str = "nearest") -> Scaled:
    scaled = Scaled.zeros_like(x, dtype)
    scaled.store_(x, tiny)
    return scaled


@given(seed=st.integers(0, 2**32), exponent=st.integers(-30, 30), log2_range=st.integers(0, 12))
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_half_a_spacing(dtype, seed, exponent, log2_range):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(257, generator=generator) * torch.exp2(torch.randn(257, generator=generator) * log2_range)
    x = x * 2.0**exponent
    scaled = stored(x, dtype)
    limits = torch.finfo(dtype)
    half_spacing = torch.maximum(x.abs() * limits.eps, limits.smallest_normal * limits.eps * scaled.scale) / 2
    assert ((scaled.load() - x).abs() <= half_spacing * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", [3.0, 448.0, 65504.0, 1e-30, 1e30])
def test_largest_magnitude_lies_in_the_upper_half_of_the_range(dtype, amax):
    largest = stored(torch.tensor([0.0, -amax, 0.7 * amax]), dtype).data.float().abs().max()
    assert torch.finfo(dtype).max / 2 <= largest <= torch.finfo(dtype).max


@given(seed=st.integers(0, 2**32), larger=st.floats(1, 64))
@pytest.mark.parametrize("dtype", DTYPES)
def test_storing_again_under_another_scale_changes_nothing(dtype, seed, larger):
    limits = torch.finfo(dtype)
    x = torch.rand(100, generator=torch.Generator().manual_seed(seed)) * limits.max
    x = stored(x.clamp(min=limits.max * 2**-6), dtype).load()
    again = stored(torch.cat([x, x.max(0, keepdim=True).values * larger]), dtype).load()[:-1]
    assert torch.equal(again, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_with_a_finite_scale(dtype):
    scaled = stored(torch.zeros(5), dtype, "up")
    assert scaled.scale.isfinite()
    assert scaled.load().eq(0).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_values_are_never_hidden(dtype, broken):
    scaled = stored(torch.tensor([1.0, broken]), dtype)
    assert not scaled.scale.isfinite()
    assert scaled.load().isnan().all()


@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_toward_zero_never_grows_below_the_normal_range(dtype, seed):
    x = tiny_values(dtype, seed)
    assert (stored(x, dtype, "toward_zero").load().abs()[1:] <= x.abs()[1:] * (1 + 1e-6)).all()


@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_up_never_shrinks_below_the_normal_range(dtype, seed):
    x = tiny_values(dtype, seed).abs()
    assert (stored(x, dtype, "up").load()[1:] >= x[1:] * (1 - 1e-6)).all()


@pytest.mark.parametrize("tiny", ["toward_zero", "up"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_leaves_normal_numbers_alone(dtype, tiny):
    limits = torch.finfo(dtype)
    x = torch.rand(4000, generator=torch.Generator().manual_seed(0)) * limits.max * (1 - limits.eps)
    x = x.clamp(min=limits.smallest_normal)
    x[0] = 0.75 * limits.max  # the scale is 1
    assert torch.equal(stored(x, dtype, tiny).load(), stored(x, dtype).load())


def tiny_values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """One number that fixes the scale at 1, and 500 in the subnormal range."""
    limits = torch.finfo(dtype)
    x = (torch.rand(501, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * limits.smallest_normal
    x[0] = 0.75 * limits.max
    return x


@given(seed=st.integers(0, 2**32), exponent=st.integers(-20, 20))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_that_is_a_power_of_2_changes_the_scale_and_no_value(dtype, seed, exponent):
    """So FP8-LM's factor μ has nothing to do where no FP8 gradients are summed."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    once, factored = stored(x, dtype), stored(x * 2.0**exponent, dtype)
    assert torch.equal(factored.data.float(), once.data.float())
    assert factored.scale == once.scale * 2.0**exponent
