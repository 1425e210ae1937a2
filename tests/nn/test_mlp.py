import torch
import torch.nn.functional as F

from octile.nn import functional
from octile.nn.conversion import convert
from octile.nn.delayed_scaling import end_step
from octile.nn.mlp import MLP
from octile.recipe import Recipe


def layer(seed=0):
    torch.manual_seed(seed)
    return MLP(32, 48)


def test_equals_the_formula():
    mlp, x = layer(), torch.randn(2, 5, 32)
    gate, up, down = (p.weight for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


def without_quantization(mlp, x, monkeypatch):
    """The layer's output with exact products, and the operands of the last of them, the down-projection."""
    seen = {}

    def linear(h, weight, bias, recipe, history):
        seen.update(h=h, weight=weight)
        return F.linear(h, weight)

    monkeypatch.setattr(functional, "linear", linear)
    return mlp(x), seen


def test_smooth_swiglu_changes_nothing_before_quantization(monkeypatch):
    reference, x = layer(), torch.randn(7, 32)
    expected = reference(x)
    smooth = convert(layer(), Recipe.smooth_swiglu())
    actual, _ = without_quantization(smooth, x, monkeypatch)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_smooth_swiglu_equalizes_the_channels(monkeypatch):
    smooth, x = convert(layer(), Recipe.smooth_swiglu()), torch.randn(7, 32)
    smooth.up_proj.weight.data[3] *= 1e4
    _, seen = without_quantization(smooth, x, monkeypatch)
    amax = seen["h"].abs().amax(0)
    assert (amax <= 1).all()
    assert (amax > 0.5).all()


def test_smooth_swiglu_does_not_change_the_gradients(monkeypatch):
    reference, x = layer(), torch.randn(7, 32)
    reference(x).square().sum().backward()
    smooth = convert(layer(), Recipe.smooth_swiglu())
    without_quantization(smooth, x, monkeypatch)[0].square().sum().backward()
    for (name, p), q in zip(reference.named_parameters(), smooth.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_smooth_swiglu_accumulates_the_same_gradient_in_main_grad():
    smooth, x = convert(layer(), Recipe.smooth_swiglu()).eval(), torch.randn(7, 32)
    weight = smooth.down_proj.weight
    smooth(x).square().sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones_like(weight)
    smooth(x).square().sum().backward()
    assert weight.grad is None
    assert torch.equal(weight.main_grad, 1 + expected)


def test_main_grad_of_a_bf16_weight_is_not_rounded_to_bf16():
    smooth = convert(layer().bfloat16(), Recipe.smooth_swiglu())
    weight = smooth.down_proj.weight
    weight.main_grad = torch.zeros(weight.shape)
    smooth(torch.randn(7, 32, dtype=torch.bfloat16)).square().sum().backward()
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())


def test_hooks_of_the_down_projection_are_called_under_smooth_swiglu():
    smooth, calls = convert(layer(), Recipe.smooth_swiglu()), []
    smooth.down_proj.register_forward_hook(lambda *_: calls.append(1))
    smooth(torch.randn(7, 32))
    assert calls == [1]


def test_the_smoothed_weight_does_not_saturate_when_a_channel_grows():
    """The weight times the channels' scales then has an amax that no step before had."""
    down, x = convert(layer(), Recipe.smooth_swiglu()).down_proj, torch.randn(64, 48)
    for _ in range(2):
        down(x, torch.ones(48))
        end_step(down)
    scale = torch.ones(48)
    scale[3] = 1024.0
    expected = x @ (down.weight * scale).T
    assert (down(x, scale) - expected).norm() < 0.06 * expected.norm()
