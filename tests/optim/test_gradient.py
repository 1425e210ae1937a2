"""Gradients of several micro-batches are added in place."""

import pytest
import torch

from octile.nn.linear import Linear
from octile.optim.gradient import added_in_place
from octile.recipe import Recipe


def new_layer() -> Linear:
    torch.manual_seed(0)
    return Linear(256, 128, bias=False, recipe=Recipe.deepseek_v3())


def backward(layer: Linear, seed: int) -> None:
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(seed))
    layer(x).square().mean().backward()


def test_the_sum_is_that_of_autograd_in_the_memory_of_the_first_gradient():
    summed, in_place = new_layer(), new_layer()
    for layer in (summed, in_place):
        backward(layer, 1)
    first = in_place.weight.grad
    backward(summed, 2)
    with added_in_place(in_place.parameters()):
        assert in_place.weight.main_grad is first
        backward(in_place, 2)
    assert in_place.weight.grad is first
    torch.testing.assert_close(in_place.weight.grad, summed.weight.grad, rtol=1e-6, atol=1e-9)


def test_parameters_are_as_before_after_an_error():
    layer = new_layer()
    backward(layer, 1)
    with pytest.raises(KeyError), added_in_place(layer.parameters()):
        raise KeyError
    assert not hasattr(layer.weight, "main_grad")


def test_hooks_of_gradients_are_called():
    layer, found = new_layer(), []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: found.append(weight.grad))
    for seed in (1, 2):
        with added_in_place(layer.parameters()):
            backward(layer, seed)
    assert len(found) == 2


def test_a_gradient_that_is_not_float32_or_a_buffer_of_the_caller_stays():
    no_gradient, bf16, own = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    bf16.data = bf16.data.bfloat16()
    bf16.grad = torch.ones(2, dtype=torch.bfloat16)
    own.grad = torch.ones(2)
    own.main_grad = buffer = torch.ones(2)
    with added_in_place([no_gradient, bf16, own]):
        assert not hasattr(no_gradient, "main_grad")
        assert not hasattr(bf16, "main_grad")
    assert own.main_grad is buffer
