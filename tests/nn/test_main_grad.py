"""A main_grad that a weight gets after the forward pass is checked before a gradient is added to it."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from octile.nn import Linear
from octile.nn.deferred_wgrad import defer_wgrads
from octile.nn.smooth_swiglu import scale_columns
from octile.recipe import Recipe


def pass_back(y: Tensor, weight: nn.Parameter, main_grad: Tensor, deferred: bool = False) -> None:
    weight.main_grad = main_grad
    with defer_wgrads() if deferred else nullcontext() as wgrads:
        y.sum().backward()
    if wgrads is not None:
        wgrads.compute()


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "error"), [((64, 64), torch.bfloat16, TypeError), ((3, 64, 64), torch.float32, ValueError)]
)
def test_a_main_grad_of_another_dtype_or_shape_is_refused(recipe, deferred, shape, dtype, error):
    layer = Linear(64, 64, bias=False, recipe=Recipe.named(recipe))
    main_grad = torch.zeros(shape, dtype=dtype)
    with pytest.raises(error, match=r"weight\.main_grad must be"):
        pass_back(layer(torch.randn(5, 64)), layer.weight, main_grad, deferred)
    assert not main_grad.any()


def test_columns_of_a_scaled_weight_add_to_it():
    weight, scale, main_grad = nn.Parameter(torch.ones(3, 4)), torch.arange(4.0), torch.ones(3, 4)
    pass_back(scale_columns(weight, scale), weight, main_grad)
    assert weight.grad is None
    assert torch.equal(main_grad, 1 + scale.expand(3, 4))
