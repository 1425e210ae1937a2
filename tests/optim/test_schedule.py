"""Tests of the learning rate in each phase of the schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.optim import WarmupConstantCosine

V3 = WarmupConstantCosine(peak=2.2e-4, warmup_steps=2000, constant_steps=5000, decay_steps=3000, floor=2.2e-5)


def test_first_step_already_learns():
    assert V3(0) == pytest.approx(2.2e-4 / 2000)


def test_warmup_is_linear():
    assert V3(999) == pytest.approx(1.1e-4)


@pytest.mark.parametrize("step", [1999, 2000, 4500, 6999, 7000])
def test_peak_lasts_from_the_end_of_warmup_to_the_start_of_the_decay(step):
    assert V3(step) == 2.2e-4


def test_half_of_the_decay_is_half_way():
    assert V3(8500) == pytest.approx((2.2e-4 + 2.2e-5) / 2)


@pytest.mark.parametrize("step", [10_000, 10_001, 10**9])
def test_floor_lasts_for_ever(step):
    assert V3(step) == 2.2e-5


@given(
    warmup=st.integers(0, 20),
    constant=st.integers(0, 20),
    decay=st.integers(0, 20),
    share=st.floats(0, 1),
    step=st.integers(0, 100),
)
def test_rises_then_falls_between_zero_and_peak(warmup, constant, decay, share, step):
    lr = WarmupConstantCosine(1.0, warmup, constant, decay, share)
    assert 0 <= lr(step) <= 1
    if step < warmup:
        assert lr(step) <= lr(step + 1) or decay + constant == 0
    else:
        assert lr(step) >= lr(step + 1)


@pytest.mark.parametrize("name", ["warmup_steps", "constant_steps", "decay_steps"])
def test_refuses_a_negative_phase(name):
    steps = {"warmup_steps": 1, "constant_steps": 1, "decay_steps": 1, name: -1}
    with pytest.raises(ValueError, match=f"{name} must be at least 0, not -1"):
        WarmupConstantCosine(peak=1.0, floor=0.0, **steps)


@pytest.mark.parametrize(("peak", "floor"), [(1.0, 2.0), (1.0, -0.1), (float("nan"), 0.0), (float("inf"), 0.0)])
def test_refuses_a_floor_outside_zero_and_peak(peak, floor):
    with pytest.raises(ValueError, match="0 <= floor <= peak"):
        WarmupConstantCosine(peak, 1, 1, 1, floor)


def test_refuses_a_negative_step():
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        V3(-1)
