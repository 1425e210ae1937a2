"""Tests of the norm before a mixture, which adds the gradients of the layers that read it."""

import pytest
import torch

from octile.nn import Gate, MoE, RMSNorm, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.fused import pre_norm as module
from octile.recipe import Recipe

D = 128


@pytest.mark.parametrize(("shared", "readers"), [(128, 3), (0, 2)], ids=["gate, experts, shared", "gate, experts"])
def test_the_norm_gets_the_gradient_of_each_layer_that_reads_it(shared, readers, monkeypatch):
    torch.manual_seed(0)
    norm, layer = RMSNorm(D), apply_recipe(MoE(Gate(D, 4, 2), D, 128, shared), Recipe.deepseek_v3())
    x = torch.randn(2, 6, D, dtype=torch.bfloat16, requires_grad=True)
    found, backward = [], module.rms_norm_backward

    def record(*arguments):
        result = backward(*arguments)
        found.append((arguments, result))
        return result

    monkeypatch.setattr(module, "rms_norm_backward", record)
    residual, normed = pre_norm(x, norm, layer)
    (residual + layer(normed)).sum().backward()
    [(arguments, (dx, _))] = found
    dy, x_TK, weight, rstd, add, *others = arguments
    assert len(others) == readers - 1
    assert torch.equal(x.grad, dx.view_as(x))
    of_sum = sum((t.float() for t in others), dy.float())
    with torch.no_grad():
        assert torch.equal(dx, backward(of_sum, x_TK, weight, rstd, add)[0])
