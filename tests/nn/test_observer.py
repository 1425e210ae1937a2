"""An observer sees each GEMM once, with its operands, and only inside its context."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octile.nn import observer
from octile.nn.functional import grouped_linear, linear
from octile.nn.observer import ObservedGemm, Observer, observe, observe_gemms, observe_quantization
from octile.ops.groups import align_groups
from octile.recipe import GEMMS, Recipe
from octile.scaled import matmul_nt, quantize

T, K, N = 40, 72, 24
OFFS = torch.tensor([10, 30, 40], dtype=torch.int32)


@pytest.fixture
def x():
    return torch.randn(T, K, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def w():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Seen(dict):
    """An observer that stores GEMMs by name, and the weight."""

    def __call__(self, weight, fprop):
        self.weight, self[fprop.name] = weight, fprop
        return lambda product: self.__setitem__(product.name, product)


def see(x, w, recipe=None, dy=None):
    seen = Seen()
    with observe_gemms(seen):
        y = linear(x, w, None, recipe or Recipe.deepseek_v3())
    y.backward(torch.ones_like(y) if dy is None else dy)
    return seen, y


def test_the_observed_gemms_are_those_that_ran(x, w):
    seen, y = see(x, w)
    assert torch.equal(y, matmul_nt(seen["fprop"].a, seen["fprop"].b, torch.float32))
    assert torch.equal(x.grad, matmul_nt(seen["dgrad"].a, seen["dgrad"].b, torch.float32))
    assert torch.equal(w.grad, matmul_nt(seen["wgrad"].a, seen["wgrad"].b, torch.float32))


def test_operands_are_observed_before_quantization_too(x, w):
    dy = torch.randn(T, N, generator=torch.Generator().manual_seed(2))
    seen, _ = see(x, w, dy=dy)
    assert seen.weight is w
    assert torch.equal(seen["fprop"].before, x)
    assert torch.equal(seen["dgrad"].before, dy)
    assert torch.equal(seen["wgrad"].before, dy.mT)
    assert torch.equal(quantize(x, (1, 128), scale="power_of_2").data.float(), seen["fprop"].a.data.float())


def test_experts_are_observed_with_their_offsets(x):
    w = torch.randn(len(OFFS), N, K, requires_grad=True)
    seen = Seen()
    with observe_gemms(seen):
        y = grouped_linear(x, w, OFFS, Recipe.deepseek_v3())
    y.sum().backward()
    assert list(seen) == list(GEMMS)
    for gemm in seen.values():
        tiles, offs = align_groups(OFFS, len(x)) if gemm.name == "wgrad" else (None, OFFS)
        assert torch.equal(gemm.offs, offs)
        assert gemm.tiles is None if tiles is None else torch.equal(gemm.tiles, tiles)


def test_gemms_in_high_precision_are_observed_without_quantized_operands(x, w):
    seen, _ = see(x, w, Recipe.bf16())
    assert list(seen) == list(GEMMS)
    assert all(product.a is None and product.b is None for product in seen.values())


@pytest.mark.parametrize(("frozen", "made"), [("x", {"fprop", "wgrad"}), ("w", {"fprop", "dgrad"})])
@pytest.mark.parametrize("name", ["deepseek_v3", "bf16"])
def test_gemms_that_do_not_run_are_not_observed(x, w, frozen, made, name):
    operands = {"x": x, "w": w}
    operands[frozen] = operands[frozen].detach()
    assert set(see(**operands, recipe=Recipe.named(name))[0]) == made


def test_operands_without_gradients_are_not_observed(x, w):
    seen = Seen()
    with observe_gemms(seen):
        linear(x.detach(), w.detach(), None, Recipe.deepseek_v3())
    assert not seen


def test_an_observer_that_returns_nothing_sees_no_backward_gemms(x, w):
    shown: list[ObservedGemm] = []
    with observe_gemms(lambda weight, product: shown.append(product)):
        linear(x, w, None, Recipe.deepseek_v3()).sum().backward()
    assert [product.name for product in shown] == ["fprop"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_pass_has_one_backward_pass(x, w, reentrant):
    backward: list[str] = []
    with observe_gemms(lambda weight, fprop: lambda product: backward.append(product.name)):
        recipe = Recipe.deepseek_v3()
        checkpoint(lambda t: linear(t, w, None, recipe), x, use_reentrant=reentrant).sum().backward()
    assert backward == ["dgrad", "wgrad"]


def test_nothing_is_observed_outside_of_the_context(x, w):
    seen = Seen()
    with observe_gemms(seen):
        assert observer.has_gemm_observers()
    assert not observer.has_gemm_observers()
    linear(x, w, None, Recipe.deepseek_v3()).sum().backward()
    assert not seen


def test_both_events_have_one_list_of_observers(x, w):
    events: list[str] = []
    both = Observer(
        gemm=lambda weight, fprop: events.append(fprop.name), quantization=lambda operand, q: events.append(operand)
    )
    with observe(both):
        linear(x, w, None, Recipe.deepseek_v3()).sum().backward()
    assert events == ["x", "w", "fprop", "dy", "wgrad_dy", "wgrad_x"]


def test_quantization_alone_asks_for_no_gemms(x, w):
    with observe_quantization(lambda operand, q: None):
        assert not observer.has_gemm_observers()
