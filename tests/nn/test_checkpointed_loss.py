"""Under activation checkpointing the balance loss has the gradient that it has without, in both of torch's modes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octile.nn import Gate, MoE, RMSNorm, pre_norm
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe

B, S, D = 2, 6, 128
every_mode = pytest.mark.parametrize("use_reentrant", [False, True])
Call = Callable[[nn.Module, Tensor], Tensor]


class Half(nn.Module):
    """Half a block: an MoE with its norm and residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.moe = RMSNorm(D), MoE(Gate(D, 4, 2), D, D, D, alpha=3.0)

    def forward(self, x: Tensor) -> Tensor:
        x, normed = pre_norm(x, self.norm, self.moe)
        return x + self.moe(normed)


def gradients(half: Half, call: Call, scale: float = 1.0, weight: float = 1.0) -> dict[str, Tensor]:
    """The gradients of scale · (a loss + weight · the balance loss), and the balance loss."""
    half.zero_grad()
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = call(half, x)
    balance = half.moe.pop_balance_loss()
    (scale * (y.square().mean() + weight * balance)).backward()
    assert half.moe.pop_balance_loss() == 0, "a loss of the recomputation is left behind"
    found = {name: p.grad.clone() for name, p in half.named_parameters()}
    return found | {"x": x.grad, "balance": torch.as_tensor(balance).detach()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.one_case
@every_mode
@pytest.mark.parametrize("recipe", [None, "bf16", "deepseek_v3"])
@pytest.mark.parametrize(("scale", "weight"), [(1.0, 1.0), (1024.0, 0.25)])
def test_gradients_are_those_without_checkpointing(recipe, scale, weight, use_reentrant):
    half = Half() if recipe is None else apply_recipe(Half(), Recipe.named(recipe))
    found = gradients(half, lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant), scale, weight)
    assert_same(found, gradients(half, lambda m, x: m(x), scale, weight))


@every_mode
def test_the_gate_gets_a_gradient_of_the_balance_loss_alone(use_reentrant):
    half = Half()
    x = torch.randn(B, S, D, requires_grad=True)
    y = checkpoint(half, x, use_reentrant=use_reentrant)
    (0 * y.sum() + half.moe.pop_balance_loss()).backward()
    assert half.moe.gate.weight.grad.any()


@every_mode
def test_two_micro_batches_accumulate(use_reentrant):
    half, other = Half(), Half()
    for m, call in ((half, lambda x: checkpoint(half, x, use_reentrant=use_reentrant)), (other, other)):
        for seed in range(2):
            y = call(torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed)).requires_grad_())
            (y.square().mean() + m.moe.pop_balance_loss()).backward()
    for (name, p), expected in zip(half.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


@every_mode
def test_a_balance_loss_that_is_not_added_has_no_gradient(use_reentrant):
    half = Half()
    found = gradients(half, lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant), weight=0.0)
    assert_same(found, gradients(half, lambda m, x: m(x), weight=0.0))


def test_two_reentrant_runs_before_one_backward_are_refused():
    half = Half()
    x = torch.randn(B, S, D, requires_grad=True)
    total = sum(checkpoint(half, x, use_reentrant=True).sum() + half.moe.pop_balance_loss() for _ in range(2))
    with pytest.raises(RuntimeError, match="MoE ran 2 times under reentrant checkpointing"):
        total.backward()


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)])
def test_a_compiled_layer_keeps_its_gradients_or_says_that_it_does_not(recipe):
    half = Half() if recipe is None else apply_recipe(Half(), Recipe.named(recipe))
    compiled = torch.compile(half, backend="aot_eager")
    found = gradients(half, lambda _, x: checkpoint(compiled, x, use_reentrant=False))
    assert_same(found, gradients(half, lambda m, x: m(x)))
    with pytest.raises(
        RuntimeError, match=r"balance_loss of a compiled MoE .* use checkpoint\(…, use_reentrant=False\)"
    ):
        gradients(half, lambda _, x: checkpoint(compiled, x, use_reentrant=True))


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_compiled_layer_may_run_without_gradients():
    half = Half()
    compiled = torch.compile(half, backend="aot_eager")
    with torch.no_grad():
        compiled(torch.randn(B, S, D))
        assert half.moe.pop_balance_loss() > 0


def test_a_forward_pass_without_gradients_in_between_changes_nothing():
    half, expected = Half(), Half()
    with torch.no_grad():
        half(torch.randn(B, S, D))
    half.moe.pop_balance_loss()
    reentrant: Call = lambda m, x: checkpoint(m, x, use_reentrant=True)  # noqa: E731
    assert_same(gradients(half, reentrant), gradients(expected, lambda m, x: m(x)))


def test_a_module_is_copied_after_a_reentrant_run():
    half = Half()
    checkpoint(half, torch.randn(B, S, D, requires_grad=True), use_reentrant=True)
    half.moe.pop_balance_loss()
    copy.deepcopy(half)


class Inside(nn.Module):
    """A function under a checkpoint that adds or returns the layer's loss itself."""

    def __init__(self, how: str):
        super().__init__()
        self.block, self.how = Half(), how

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y, moe = self.block(x), self.block.moe
        if self.how == "returned":
            return y, moe.balance_loss
        loss = moe.pop_balance_loss() if self.how == "popped" else moe.balance_loss
        return y.square().mean() + loss

    def total(self, result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return result[0].square().mean() + result[1] if isinstance(result, tuple) else result


@every_mode
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["returned", "popped", "read"])
def test_a_checkpointed_function_may_add_the_loss_itself(how: str, use_reentrant: bool):
    torch.manual_seed(0)
    checkpointed = Inside(how)
    expected = copy.deepcopy(checkpointed)
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))
    result = checkpoint(checkpointed, x.clone().requires_grad_(), use_reentrant=use_reentrant)
    checkpointed.total(result).backward()
    expected.total(expected(x.clone().requires_grad_())).backward()
    for (name, p), other in zip(checkpointed.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@every_mode
def test_a_loss_that_is_read_stays_after_the_backward_pass(use_reentrant: bool):
    half = Half()
    y = checkpoint(half, torch.randn(B, S, D, requires_grad=True), use_reentrant=use_reentrant)
    before = half.moe.balance_loss
    (y.square().mean() + before).backward()
    assert half.moe.balance_loss is before


def test_losses_of_earlier_reentrant_runs_may_be_held():
    half, other, held = Half(), Half(), []
    for seed in range(2):
        x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed))
        y = checkpoint(half, x.clone().requires_grad_(), use_reentrant=True)
        held.append(half.moe.pop_balance_loss())
        (y.square().mean() + held[-1]).backward()
        (other(x.clone().requires_grad_()).square().mean() + other.moe.pop_balance_loss()).backward()
    for (name, p), expected in zip(half.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected[1].grad, msg=lambda text, name=name: f"{name}: {text}")


@every_mode
def test_a_backward_pass_that_raised_does_not_disturb_the_next(use_reentrant: bool):
    half = Half()

    def fail(gradient: Tensor) -> None:
        raise ValueError("from a hook")

    handle = half.norm.weight.register_hook(fail)
    x = torch.randn(B, S, D, requires_grad=True)
    with pytest.raises(ValueError, match="from a hook"):
        checkpoint(half, x, use_reentrant=use_reentrant).sum().backward()
    handle.remove()
    gradients(half, lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant))  # checks what is left behind
