"""Weight gradients that are computed after the backward pass: the same bits, none of them earlier, for every layer."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from octile.models.config import PRESETS
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.nn.deferred_wgrad import DeferrableLinears, defer_wgrads
from octile.nn.linear import Linear
from octile.recipe import Recipe

CONFIG = replace(PRESETS["tiny"](), vocab_size=97, num_nextn_predict_layers=1)


def model_of(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return apply_recipe(DeepseekV3(CONFIG), Recipe.named(recipe))


def losses(model: nn.Module) -> list[Tensor]:
    """Of two micro-batches, so that the second adds to the gradients of the first."""
    tokens = torch.randint(97, (2, 1, 20), generator=torch.Generator().manual_seed(1))
    return [model(batch, batch) for batch in tokens]


def backward(losses: list[Tensor], deferred: bool) -> None:
    for loss in losses:
        if not deferred:
            loss.backward()
            continue
        with defer_wgrads() as wgrads:
            loss.backward()
        wgrads.compute()


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


FURTHER = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("smooth_swiglu", "fp16_loss_scaling")]


@pytest.mark.one_case
@pytest.mark.parametrize("recipe", ["deepseek_v3", "delayed", "bf16", *FURTHER])
def test_gradients_are_those_of_a_backward_pass_bit_for_bit(recipe: str):
    model = model_of(recipe)
    at_once = copy.deepcopy(model)
    backward(losses(at_once), deferred=False)
    backward(losses(model), deferred=True)
    assert_same_bits(gradients(model), gradients(at_once))


def test_a_weight_that_is_used_twice_gets_the_bits_of_a_backward_pass():
    torch.manual_seed(0)
    layer, x = Linear(64, 64), torch.randn(3, 5, 64)
    at_once = copy.deepcopy(layer)
    backward([at_once(at_once(part)).square().sum() for part in x], deferred=False)
    backward([layer(layer(part)).square().sum() for part in x], deferred=True)
    assert_same_bits(gradients(layer), gradients(at_once))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_layers_of_torch_get_the_bits_of_a_backward_pass(dtype: torch.dtype, bias: bool, autocast: bool):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(40, 30, bias, dtype=dtype), nn.Tanh(), nn.Linear(30, 20, bias, dtype=dtype))
    at_once, x = copy.deepcopy(layers), torch.randn(3, 2, 7, 40, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = [at_once(part).sum() for part in x]
        with DeferrableLinears():
            found = [layers(part).sum() for part in x]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    backward(expected, deferred=False)
    with defer_wgrads() as wgrads:
        found[0].backward()
    assert layers[0].weight.grad is layers[2].weight.grad is None
    wgrads.compute()
    backward(found[1:], deferred=True)
    assert_same_bits(gradients(layers), gradients(at_once))


def test_a_linear_layer_of_torch_that_is_used_twice_gets_the_bits_of_a_backward_pass_under_autocast():
    """Autocast casts the weight once, so that autograd adds both gradients in BF16, before it casts them."""
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 40), torch.randn(3, 7, 40)
    at_once = copy.deepcopy(layer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = [at_once(at_once(part)).square().sum() for part in x]
        with DeferrableLinears():
            found = [layer(layer(part)).square().sum() for part in x]
    backward(expected, deferred=False)
    backward(found, deferred=True)
    assert torch.equal(layer.weight.grad, at_once.weight.grad)


def test_main_grad_buffers_get_the_bits_of_a_backward_pass():
    torch.manual_seed(0)
    layers, x = [Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)], torch.randn(3, 5, 64)
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, deferred in zip(layers, (False, True), strict=True):
        layer.weight.main_grad = torch.zeros(64, 64)
        backward([layer(part.bfloat16()).square().sum() for part in x], deferred)
        assert layer.weight.grad is None
    assert torch.equal(layers[1].weight.main_grad, layers[0].weight.main_grad)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16", pytest.param("smooth_swiglu", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_are_added_to_a_main_grad_that_weights_get_after_the_forward_pass(recipe: str, deferred: bool):
    """As in a pipeline, whose later forward passes may run before the first gradient, to which theirs are added."""
    model = model_of(recipe)
    at_once, weights = copy.deepcopy(model), weights_of_layers(model)
    backward(losses(at_once), deferred=False)
    computed = losses(model)
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    backward(computed, deferred)
    assert {p for p in model.parameters() if p.grad is None} == weights
    found = {name: p.main_grad for name, p in model.named_parameters() if p in weights}
    assert_same_bits(found | gradients(model), gradients(at_once))


def weights_of_layers(model: nn.Module) -> set[nn.Parameter]:
    """Those of octile's linear layers and experts."""
    linear = {m.weight for m in model.modules() if type(m) is Linear}
    return linear | {p for moe in model.moe_layers().values() for p in moe.experts.parameters()}


def test_weights_of_linear_layers_and_experts_wait_and_others_do_not():
    model = model_of("deepseek_v3")
    with defer_wgrads() as wgrads:
        losses(model)[0].backward()
    assert {p for p in model.parameters() if p.grad is None} == weights_of_layers(model)
    assert len(wgrads) > 0
    wgrads.compute()
    assert len(wgrads) == 0
    assert all(p.grad is not None for p in model.parameters())


def test_hooks_of_a_weight_see_its_gradient_once():
    layer, seen = Linear(64, 64), []
    layer.weight.register_hook(seen.append)
    backward([layer(torch.randn(5, 64)).sum()], deferred=True)
    assert len(seen) == 1
    assert torch.equal(seen[0], layer.weight.grad)


def test_a_hook_that_a_weight_gets_after_the_forward_pass_is_called_for_its_gradient():
    layer, seen = Linear(64, 64), []
    loss = layer(torch.randn(5, 64)).sum()
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    backward([loss], deferred=True)
    assert seen[-1] is not None


def test_a_first_gradient_has_the_strides_of_its_weight():
    layer = nn.Linear(40, 30)
    layer.weight = nn.Parameter(torch.randn(40, 30).mT)
    with DeferrableLinears():
        loss = layer(torch.randn(7, 40)).sum()
    backward([loss], deferred=True)
    assert layer.weight.grad.stride() == layer.weight.stride() == (1, 30)


def test_a_first_gradient_has_the_dtype_that_its_weight_asks_for():
    layer = Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    backward([layer(torch.randn(5, 64).bfloat16()).sum()], deferred=True)
    assert layer.weight.grad.dtype == torch.float32
