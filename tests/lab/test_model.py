"""Tests of training and evaluating a model inside `octile.lab.tensor_core`."""

import pytest
import torch

import octile
from octile.lab import tensor_core, tensor_core_matmul
from octile.nn.observer import observe_quantization
from octile.scaled import ScaledTensor
from tests.lab.matrices import gemms_of_a_layer

PER_TENSOR = octile.Recipe.per_tensor()


def layer(recipe):
    torch.manual_seed(0)
    return octile.nn.Linear(256, 192, bias=False, recipe=recipe)


def gradients(recipe, tokens=300):
    linear = layer(recipe)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = linear(x)
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return y.detach(), x.grad, linear.weight.grad


@pytest.mark.parametrize("product", [0, 1, 2], ids=["fprop", "dgrad", "wgrad"])
def test_every_gemm_of_a_layer_is_modeled(product):
    recipe = octile.Recipe.deepseek_v3()
    plain = gradients(recipe)[product]
    with tensor_core("sm_90", promote_every=128):
        promoted = gradients(recipe)[product]
    with tensor_core("sm_90"):
        alone = gradients(recipe)[product]
    error = [(y - plain).square().mean().sqrt() / plain.square().mean().sqrt() for y in (promoted, alone)]
    assert 0 < error[0] < error[1] < 0.01


@pytest.mark.parametrize("promote_every", [None, 128])
@pytest.mark.parametrize("recipe", ["deepseek_v3", "per_tensor", "hybrid_e5m2"])
def test_the_output_and_gradients_are_the_gemms_of_their_operands(recipe, promote_every):
    operands: dict[str, ScaledTensor] = {}
    with observe_quantization(operands.__setitem__), tensor_core("sm_90", promote_every):
        found = gradients(octile.Recipe.named(recipe))
    for actual, expected in zip(found, gemms_of_a_layer(operands, promote_every), strict=True):
        assert torch.equal(actual, expected)


def test_the_output_of_a_layer_is_the_gemm_of_its_operands():
    linear, x = layer(PER_TENSOR), torch.randn(10, 256)
    with torch.no_grad(), tensor_core("sm_90"):
        y = linear(x)
    a, b = (octile.quantize(t, (None, None)) for t in (x, linear.weight.detach()))
    assert torch.equal(y, tensor_core_matmul(a.data, b.data) * (a.scale * b.scale))


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_compiled_layer_is_modeled_too():
    linear, x = layer(octile.Recipe.deepseek_v3()), torch.randn(10, 256)
    compiled = torch.compile(linear, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(x)
        with tensor_core("sm_90"):
            modeled = compiled(x)
            assert torch.equal(modeled, linear(x))
    assert not torch.equal(modeled, plain)


def test_layers_in_other_formats_are_not_modeled():
    linear, x = torch.nn.Linear(256, 64), torch.randn(10, 256)
    plain = linear(x)
    with tensor_core("sm_90"):
        assert torch.equal(linear(x), plain)


def test_an_architecture_without_fp8_is_refused_before_anything_runs():
    with pytest.raises(TypeError, match="sm_80 has no"), tensor_core("sm_80"):
        pass
