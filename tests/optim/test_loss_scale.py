"""Tests of dynamic loss scaling: it doubles, halves, and does not change gradients."""

import pytest
import torch

from octile.optim import DynamicLossScale
from octile.optim.gradient import gradient_of, load, store_scaled
from octile.optim.loss_scale import GROWTH_INTERVAL, MAX_SCALE


def parameter(gradient: float) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.full((3,), gradient)
    return param


def step(scale: DynamicLossScale, gradient: float) -> bool:
    finite = scale.unscale_([parameter(gradient)])
    scale.update()
    return finite


def test_scaled_and_unscaled_gradients_equal_plain_ones_bit_for_bit():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    unscaled, scaled = torch.nn.Parameter(x.clone()), torch.nn.Parameter(x.clone())
    unscaled.pow(3).sum().backward()
    scale = DynamicLossScale()
    scale.scale(scaled.pow(3).sum()).backward()
    assert scale.unscale_([scaled])
    assert torch.equal(scaled.grad, unscaled.grad)


def test_saves_what_fp16_would_lose():
    x = torch.full((4,), 2.0**-30, dtype=torch.float32)
    w = torch.nn.Parameter(torch.ones(4))
    scale = DynamicLossScale()
    scale.scale((w.half() * x).sum()).backward()
    assert scale.unscale_([w])
    assert torch.equal(w.grad, x)


def test_unscales_main_gradients():
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    param.main_grad = torch.full((2,), 2.0**17)
    assert DynamicLossScale().unscale_([param])
    assert param.main_grad.eq(2.0).all()


@pytest.mark.parametrize(("factor", "finite"), [(2.0**17, True), (float("inf"), False), (float("nan"), False)])
def test_unscales_scaled_gradients(factor, finite):
    param = torch.nn.Parameter(torch.ones(2))
    store_scaled(param, torch.float8_e4m3fn)
    (param * factor).sum().backward()
    assert DynamicLossScale().unscale_([param]) is finite
    assert not finite or load(gradient_of(param)).eq(2.0).all()


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_overflow_halves_and_is_reported(broken):
    scale = DynamicLossScale()
    assert step(scale, broken) is False
    assert scale.value == 2.0**15


def test_never_falls_below_one():
    scale = DynamicLossScale()
    for _ in range(20):
        step(scale, float("inf"))
    assert scale.value == 1


def test_doubles_after_enough_good_steps_in_a_row():
    scale = DynamicLossScale()
    step(scale, 1.0)
    step(scale, float("inf"))
    for _ in range(GROWTH_INTERVAL - 1):
        step(scale, 1.0)
    assert scale.value == 2.0**15
    step(scale, 1.0)
    assert scale.value == 2.0**16


def test_stops_growing_where_nothing_overflows():
    scale = DynamicLossScale()
    scale.load_state_dict({"value": MAX_SCALE, "good_steps": GROWTH_INTERVAL - 1})
    step(scale, 1.0)
    assert scale.value == MAX_SCALE


def test_continues_from_its_state():
    scale, resumed = DynamicLossScale(), DynamicLossScale()
    step(scale, float("inf"))
    step(scale, 1.0)
    resumed.load_state_dict(scale.state_dict())
    assert (resumed.value, resumed.good_steps) == (2.0**15, 1)


def test_refuses_to_unscale_twice():
    scale, param = DynamicLossScale(), parameter(1.0)
    scale.unscale_([param])
    with pytest.raises(RuntimeError, match="unscaled already"):
        scale.unscale_([param])


def test_refuses_to_update_without_gradients_seen():
    with pytest.raises(RuntimeError, match="call unscale_"):
        DynamicLossScale().update()


@pytest.mark.parametrize(
    "state",
    [
        {"value": 3.0, "good_steps": 0},
        {"value": 0.5, "good_steps": 0},
        {"value": float("nan"), "good_steps": 0},
        {"value": 2.0, "good_steps": GROWTH_INTERVAL},
        {"value": 2.0},
    ],
)
def test_refuses_a_damaged_state(state):
    with pytest.raises(ValueError, match=r"value|good_steps"):
        DynamicLossScale().load_state_dict(state)
