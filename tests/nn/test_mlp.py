import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from octile.nn import functional
from octile.nn.conversion import apply_recipe, convert
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


# Modules of other libraries, whose activation somebody replaces after the conversion

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "pad_token_id": 0}


class WithFunction(nn.Module):
    """torchtitan's names of the layers, and an activation that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((32, 128), (32, 128), (128, 32)))
        self.act = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


def llama_formula(m: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return m.down_proj(activation(m.gate_proj(x)) * m.up_proj(x))


def phi3_formula(m: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = m.gate_up_proj(x).chunk(2, dim=-1)
    return m.down_proj(activation(gate) * up)


def formula_of_function(m: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return m.w2(activation(m.w1(x)) * m.w3(x))


OTHERS = {  # how each is made, its activation's name, another activation, and its formula
    "Llama": (lambda: LlamaMLP(LlamaConfig(**SIZES)), "act_fn", nn.GELU(), llama_formula),
    "Phi3": (lambda: Phi3MLP(Phi3Config(**SIZES)), "activation_fn", nn.GELU(), phi3_formula),
    "function": (WithFunction, "act", F.gelu, formula_of_function),
}
every_module = pytest.mark.parametrize("name", OTHERS)


def converted(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return apply_recipe(OTHERS[name][0]()), torch.randn(6, 32)


@every_module
def test_an_activation_that_is_replaced_after_the_conversion_is_used(name):
    (module, x), (_, attribute, new, formula) = converted(name), OTHERS[name]
    fused, old = module(x), getattr(module, attribute)
    setattr(module, attribute, new)
    assert module.fusion() is None
    assert torch.equal(module(x), formula(module, x, F.gelu))
    setattr(module, attribute, old)
    assert module.fusion() is not None
    assert torch.equal(module(x), fused)


def test_an_activation_is_called_as_long_as_it_has_a_hook():
    (module, x), calls = converted("Llama"), []
    hook = module.act_fn.register_forward_hook(lambda *_: calls.append(1))
    module(x)
    hook.remove()
    module(x)
    assert calls == [1]


@every_module
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_has_the_activation_that_it_was_converted_with(name, copied):
    module, x = converted(name)
    other = copied(module)
    assert other.fusion() is not None
    assert torch.equal(other(x), module(x))


@pytest.mark.oldest_torch
@pytest.mark.slow
@every_module
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_activation_that_is_replaced_before_or_after_the_compilation_is_used(name, before):
    (module, x), (_, attribute, new, formula) = converted(name), OTHERS[name]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    if not before:
        compiled(x)
    setattr(module, attribute, new)
    torch.testing.assert_close(compiled(x), formula(module, x, F.gelu), rtol=1e-6, atol=1e-6)


class WithMethod(WithFunction):
    """An activation that is a function of the class."""

    act = staticmethod(F.silu)

    def __init__(self) -> None:
        super().__init__()
        del self.__dict__["act"]


class WithNested(WithFunction):
    """An activation in a module in a module."""

    def __init__(self) -> None:
        super().__init__()
        del self.__dict__["act"]
        self.act = nn.Sequential(nn.SiLU())


def test_an_activation_that_takes_the_place_of_one_of_the_class_is_used():
    module, x = apply_recipe(WithMethod()), torch.randn(6, 32)
    assert module.fusion() is not None
    module.act = F.gelu
    assert torch.equal(module(x), formula_of_function(module, x, F.gelu))


def test_an_activation_within_another_module_that_is_replaced_is_used():
    module, x = apply_recipe(WithNested()), torch.randn(6, 32)
    assert module.fusion() is not None
    module.act[0] = nn.GELU()
    assert torch.equal(module(x), formula_of_function(module, x, F.gelu))


@pytest.mark.parametrize("name", ["projections", "fusion", "_down"])
def test_a_module_that_has_a_name_of_octiles_class_keeps_its_forward_pass(name):
    module, x = WithFunction(), torch.randn(6, 32)
    setattr(module, name, module.act)
    converted = apply_recipe(module)
    assert type(converted) is WithFunction
    assert torch.equal(converted(x), formula_of_function(converted, x, F.silu))


def test_a_converted_module_has_the_class_and_the_methods_that_it_had():
    module, _ = converted("Llama")
    assert isinstance(module, LlamaMLP)
    assert isinstance(module, MLP)
    assert type(module).__name__ == "LlamaMLP"
