"""Tests of the learning rate in each phase of the schedule, and of the batch ramp."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.optim import BatchRamp, WarmupConstantCosine

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


TAILED = WarmupConstantCosine(1.0, 2, 3, 5, floor=0.5, floor_steps=4, last=0.25)


@pytest.mark.parametrize(("step", "rate"), [(9, 0.5477), (10, 0.5), (13, 0.5), (14, 0.25), (10**9, 0.25)])
def test_the_floor_ends_and_the_last_rate_follows(step, rate):
    assert TAILED(step) == pytest.approx(rate, rel=1e-4)


def test_refuses_a_last_rate_above_the_floor():
    with pytest.raises(ValueError, match=r"0 <= last <= floor, not last=0\.6 floor=0\.5"):
        WarmupConstantCosine(1.0, 1, 1, 1, 0.5, 1, 0.6)


ramps = st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(0, 50)).map(
    lambda drawn: BatchRamp(drawn[0], drawn[0] + drawn[1], drawn[2])
)


@given(ramp=ramps, step=st.integers(0, 100))
def test_the_sequences_before_a_step_are_those_of_all_steps_before_it(ramp, step):
    assert ramp.before(step) == sum(map(ramp.size, range(step)))


@given(ramp=ramps, step=st.integers(0, 100))
def test_a_batch_grows_from_the_first_size_to_the_last(ramp, step):
    assert ramp.initial <= ramp.size(step) <= ramp.size(step + 1) <= ramp.final
    assert ramp.size(ramp.steps) == ramp.final


def test_the_published_ramp_has_469_billion_tokens():
    ramp = BatchRamp(3072, 15360, 12424)
    assert ramp.before(12424) * 4096 == pytest.approx(469e9, rel=1e-3)


@pytest.mark.parametrize(("initial", "final"), [(0, 4), (5, 4)])
def test_a_ramp_to_a_smaller_batch_is_refused(initial, final):
    with pytest.raises(ValueError, match="1 <= initial <= final must hold"):
        BatchRamp(initial, final, 10)


def test_refuses_a_negative_step():
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        V3(-1)
