"""The losses of a head in one function: those of its logits, and the gradients that these have, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octile.models import deepseek_v3 as model_module
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.nn.fused import cross_entropy as module
from octile.nn.fused.cross_entropy import cross_entropies
from octile.nn.linear import BatchInvariantHead
from octile.ops.cross_entropy import IGNORED
from octile.recipe import Recipe

TINY = ModelConfig.tiny()


def gradients(dtype: torch.dtype, with_labels: bool) -> tuple[Tensor, ...]:
    """Return the losses, and the gradients of what the head reads and of its weight."""
    torch.manual_seed(0)
    head = BatchInvariantHead(24, 50, bias=False).to(dtype)
    x, labels = torch.randn(3, 7, 24).to(dtype).requires_grad_(), torch.randint(50, (3, 7))
    labels[1, 2:5] = IGNORED
    losses = head(x, labels) if with_labels else cross_entropies(head(x), labels)
    losses.backward(torch.rand(3, 7))
    assert head.weight.grad is not None
    assert x.grad is not None
    return losses.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "can_use_kernel", module.can_use_operators)
    for found, expected in zip(gradients(dtype, True), gradients(dtype, False), strict=True):
        assert torch.equal(found, expected)


def test_it_has_no_second_derivative():
    head, x = BatchInvariantHead(8, 5, bias=False), torch.randn(2, 8, requires_grad=True)
    loss = head(x, torch.tensor([1, 2])).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_model_has_the_loss_of_its_logits(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = apply_recipe(DeepseekV3(TINY), Recipe.exact())
    tokens = torch.randint(TINY.vocab_size, (2, 9))

    def loss_and_gradients() -> list[Tensor]:
        loss = model(tokens, tokens)
        return [loss.detach(), *torch.autograd.grad(loss, [model.lm_head.weight, model.model.norm.weight])]

    expected, log_probs = loss_and_gradients(), model.log_probs(tokens)
    monkeypatch.setattr(model_module, "can_use_kernel", module.can_use_operators)
    seen = []
    monkeypatch.setattr(BatchInvariantHead, "forward", seeing(BatchInvariantHead.forward, seen))
    for found, of_logits in zip(loss_and_gradients(), expected, strict=True):
        torch.testing.assert_close(found, of_logits, rtol=1e-5, atol=1e-7)
    assert torch.equal(model.log_probs(tokens), log_probs)
    assert all(seen)
    seen.clear()
    model.lm_head.register_forward_hook(lambda *_: None)  # which is to see logits
    model(tokens, tokens)
    assert not any(seen)


def seeing(forward: Callable[..., Tensor], seen: list[bool]) -> Callable[..., Tensor]:
    """Wrap a head's forward pass, and note whether it was given labels."""

    def wrapped(head: BatchInvariantHead, x: Tensor, labels: Tensor | None = None) -> Tensor:
        seen.append(labels is not None)
        return forward(head, x, labels)

    return wrapped
