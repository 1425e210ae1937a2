import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from octile.nn import functional
from octile.nn.convert import convert
from octile.nn.mlp import MLP, power_of_2
from octile.recipe import Recipe


def layer(seed=0):
    torch.manual_seed(seed)
    return MLP(32, 48)


def test_equals_the_formula():
    mlp, x = layer(), torch.randn(2, 5, 32)
    gate, up, down = (p.weight for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_power_of_2_is_the_next_one_up(value):
    scale = power_of_2(torch.tensor(value)).item()
    assert math.frexp(scale)[0] == 0.5
    assert scale / 2 < value <= scale


def test_power_of_2_of_zero_is_one():
    assert power_of_2(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_power_of_2_leaves_a_power_of_two():
    exact = 2.0 ** torch.arange(-120, 120)
    assert torch.equal(power_of_2(exact), exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_power_of_2_does_not_hide(bad):
    assert not power_of_2(torch.tensor([bad])).isfinite().any()


def without_quantisation(mlp, x, monkeypatch):
    """The layer's output with exact products, and the operands of the last of them, the down-projection."""
    seen = {}

    def linear(h, weight, bias, recipe, history):
        seen.update(h=h, weight=weight)
        return F.linear(h, weight)

    monkeypatch.setattr(functional, "linear", linear)
    return mlp(x), seen


def test_smooth_swiglu_changes_nothing_before_quantisation(monkeypatch):
    plain, x = layer(), torch.randn(7, 32)
    expected = plain(x)
    smooth = convert(layer(), Recipe.smooth_swiglu())
    actual, _ = without_quantisation(smooth, x, monkeypatch)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_smooth_swiglu_makes_the_channels_alike(monkeypatch):
    smooth, x = convert(layer(), Recipe.smooth_swiglu()), torch.randn(7, 32)
    smooth.up_proj.weight.data[3] *= 1e4
    _, seen = without_quantisation(smooth, x, monkeypatch)
    amax = seen["h"].abs().amax(0)
    assert (amax <= 1).all()
    assert (amax > 0.5).all()


def test_smooth_swiglu_keeps_the_gradients(monkeypatch):
    plain, x = layer(), torch.randn(7, 32)
    plain(x).square().sum().backward()
    smooth = convert(layer(), Recipe.smooth_swiglu())
    without_quantisation(smooth, x, monkeypatch)[0].square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), smooth.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=name)
