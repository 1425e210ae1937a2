"""Tests of fused feed-forward layers: every operand of every GEMM is quantized by the recipe.

Shapes: T tokens, D model, I intermediate, E experts, K chosen experts.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from octile.nn.conversion import apply_recipe
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.functional import linear
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.feed_forward import Routed, experts_feed_forward, feed_forward, sorted_experts_feed_forward
from octile.nn.fused.pre_norm import pre_norm
from octile.nn.gate import Gate
from octile.nn.mlp import MLP
from octile.nn.moe import MoE
from octile.nn.norm import RMSNorm
from octile.nn.observer import ObservedGemm, observe_gemms, observe_quantization
from octile.ops.groups import align_groups, take_tiles
from octile.ops.swiglu import silu
from octile.recipe import GEMMS, Recipe
from octile.scaled import ScaledTensor, grouped_matmul_nt, grouped_wgrad, matmul_nt, quantize

T, D, I, E, K = 70, 200, 256, 6, 3
SAVED = Recipe.deepseek_v3()
RECOMPUTED = replace(SAVED, swiglu_inputs="recomputed")

both_settings = pytest.mark.parametrize("recipe", [SAVED, RECOMPUTED], ids=["saved", "recomputed"])
every_fused = pytest.mark.parametrize(
    "recipe",
    [SAVED, RECOMPUTED, Recipe.hybrid_e5m2(), Recipe.int8_tiles(), Recipe.wgrad_x_blocks()],
    ids=["saved", "recomputed", "e5m2", "int8", "blocks"],
)


def randomized(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def mlp(recipe: Recipe | None = SAVED) -> MLP:
    built = randomized(MLP(D, I))
    return apply_recipe(built, recipe) if recipe else built


def moe(recipe: Recipe | None = SAVED, shared: int = 128) -> MoE:
    built = randomized(MoE(Gate(D, E, K), D, I, shared))
    return apply_recipe(built, recipe) if recipe else built


def layer_norm() -> RMSNorm:
    norm = RMSNorm(D)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def x_of(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, T // 2, D, generator=torch.Generator().manual_seed(1))
    x[..., 7] *= 30
    return x.to(dtype).requires_grad_()


def after_norm(m: nn.Module, x: Tensor, norm: RMSNorm) -> Tensor:
    """The module of norm(x), which is fused with it where it can be."""
    return m(pre_norm(x, norm, m)[1])


def gradients(module: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None, *more: object) -> list[Tensor]:
    """The output and the gradients of one pass, from the input's to the last parameter's."""
    module.zero_grad()
    y = (call or module)(x, *more)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    dx, x.grad = x.grad, None
    return [y.detach(), dx, *(p.grad.clone() for p in module.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


class Seen(dict):
    """An observer that stores GEMMs by weight and name."""

    def __call__(self, weight: Tensor, fprop: ObservedGemm) -> Callable[[ObservedGemm], None]:
        self[id(weight), "fprop"] = fprop
        return lambda product: self.__setitem__((id(weight), product.name), product)

    def of(self, weight: Tensor) -> list[ObservedGemm]:
        return [self[id(weight), name] for name in GEMMS]


def observed_gemms(module: nn.Module, x: Tensor) -> tuple[Seen, Tensor]:
    """The observed GEMMs of one pass, and its result."""
    module.zero_grad()
    with observe_gemms(seen := Seen()):
        y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return seen, y.detach()


def assert_quantized(
    found: ScaledTensor, before: Tensor, block: tuple[int, int], fmt: object, scale: str = "float32"
) -> None:
    expected = quantize(before, block, fmt, scale)
    assert torch.equal(found.dequantize(), expected.dequantize())


# A dense layer


@every_fused
def test_results_of_a_dense_layer_equal_the_gemms_of_the_observed_operands(recipe):
    m, x = mlp(recipe), x_of()
    seen, y = observed_gemms(m, x)
    gate, up, down = (seen.of(p.weight) for p in (m.gate_proj, m.up_proj, m.down_proj))
    assert torch.equal(y.flatten(0, 1), matmul_nt(down[0].a, down[0].b, torch.float32))
    for layer, (_, _, wgrad) in ((m.gate_proj, gate), (m.up_proj, up), (m.down_proj, down)):
        assert torch.equal(layer.weight.grad, matmul_nt(wgrad.a, wgrad.b, torch.float32))
    dx = matmul_nt(gate[1].a, gate[1].b, torch.float32) + matmul_nt(up[1].a, up[1].b, torch.float32)
    torch.testing.assert_close(x.grad.flatten(0, 1), dx, rtol=1e-5, atol=1e-5)


@every_fused
def test_operands_of_a_dense_layer_are_quantized_by_the_recipe(recipe):
    m, x = mlp(recipe), x_of()
    seen, _ = observed_gemms(m, x)
    gate, up, down = (seen.of(p.weight) for p in (m.gate_proj, m.up_proj, m.down_proj))
    c = recipe.formats
    dy = torch.randn(2, T // 2, D, generator=torch.Generator().manual_seed(2)).flatten(0, 1)
    x_TD = x.detach().flatten(0, 1)
    assert_quantized(gate[0].a, x_TD, (1, 128), c.x.fmt, "power_of_2")
    assert_quantized(gate[2].b.mT, gate[0].a.dequantize(), c.wgrad_x.block, c.x.fmt, "power_of_2")
    assert_quantized(down[1].a, dy, (1, 128), c.dy.fmt)
    assert_quantized(down[2].a.mT, dy, (128, 1), c.dy.fmt)
    h_gate, h_up = (matmul_nt(p[0].a, p[0].b, torch.float32) for p in (gate, up))
    assert_quantized(down[0].a, silu(h_gate) * h_up, (1, 128), c.x.fmt, "power_of_2")

    if recipe.swiglu_inputs != "recomputed":  # backward reads the saved values
        h_gate, h_up = (quantize(t, (1, 128), recipe.swiglu_inputs.fmt).dequantize() for t in (h_gate, h_up))
    dh = matmul_nt(down[1].a, down[1].b, torch.float32)
    assert_quantized(down[2].b.mT, silu(h_gate) * h_up, c.wgrad_x.block, c.x.fmt, "power_of_2")
    both = torch.ops.aten.silu_backward(dh * h_up, h_gate), dh * F.silu(h_gate)
    for layer, d in zip((gate, up), both, strict=True):
        assert_quantized(layer[1].a, d, (1, 128), c.dy.fmt)
        assert_quantized(layer[2].a.mT, d, (128, 1), c.dy.fmt)
        assert torch.equal(layer[1].before, d)
        assert torch.equal(layer[2].before, d.mT)


def test_a_recomputed_dense_layer_equals_the_unfused_one():
    """The results are equal except for h, which the unfused layer quantizes twice before wgrad."""
    fused, steps = mlp(RECOMPUTED), mlp(RECOMPUTED)
    steps.up_proj.register_forward_hook(lambda *_: None)
    found, expected = gradients(fused, x := x_of()), gradients(steps, x)
    assert same(found[:1] + found[2:4], expected[:1] + expected[2:4])
    torch.testing.assert_close(found[1], expected[1])  # the sum of two GEMMs, in another order
    torch.testing.assert_close(found[4], expected[4], rtol=1e-2, atol=1e-2)


# Experts


@every_fused
def test_results_of_experts_equal_the_gemms_of_the_observed_operands(recipe):
    m, x = moe(recipe).experts, x_of().detach().flatten(0, 1).requires_grad_()
    generator, way = torch.Generator().manual_seed(3), LocalDispatcher()
    experts_TK = torch.rand(T, E, generator=generator).topk(K).indices
    weights_TK = torch.rand(T, K, generator=generator).requires_grad_()
    add, dy = torch.randn(T, D, generator=generator).requires_grad_(), torch.randn(T, D, generator=generator)
    plan = way.plan(experts_TK, experts_TK.flatten().bincount(minlength=E))
    with observe_gemms(seen := Seen()):
        arguments = (weights_TK, lambda: add, Routed(way, plan), torch.float32)
        y = experts_feed_forward(quantize_block_input(x, recipe), m.gate_up, m.down, *arguments)
    y.backward(dy)

    up, down = seen.of(m.gate_up), seen.of(m.down)
    y_RD = grouped_matmul_nt(down[0].a, down[0].b, plan.offs_E, torch.float32)
    assert torch.equal(y, way.combine_unweighted(y_RD, plan, add.detach()))
    dx_RD = grouped_matmul_nt(up[1].a, up[1].b, plan.offs_E, torch.float32)
    assert torch.equal(x.grad, way.combine_unweighted(dx_RD, plan))
    assert torch.equal(m.down.grad, grouped_wgrad(down[2].a.mT, down[2].b.mT, down[2].offs))
    assert torch.equal(m.gate_up.grad, grouped_wgrad(up[2].a.mT, up[2].b.mT, up[2].offs))
    assert torch.equal(add.grad, dy)

    h_gate, h_up = grouped_matmul_nt(up[0].a, up[0].b, plan.offs_E, torch.float32).chunk(2, 1)
    if recipe.swiglu_inputs != "recomputed":
        h_gate, h_up = (quantize(t, (1, 128), recipe.swiglu_inputs.fmt).dequantize() for t in (h_gate, h_up))
    dh = grouped_matmul_nt(down[1].a, down[1].b, plan.offs_E, torch.float32)
    terms_RI = dh.double() * F.silu(h_gate.double()) * h_up.double()
    rounding_R = (terms_RI.shape[1] + 8) * 2.0**-24 * terms_RI.abs().sum(1)  # of a sum in FP32, in any order
    row_ids_TK = plan.row_ids_TK.long()
    assert ((weights_TK.grad - terms_RI.sum(1)[row_ids_TK]).abs() <= rounding_R[row_ids_TK]).all()


@every_fused
def test_operands_of_experts_are_quantized_by_the_recipe(recipe):
    m, x = moe(recipe, shared=0), x_of()
    seen, _ = observed_gemms(m, x)
    up, down = seen.of(m.experts.gate_up), seen.of(m.experts.down)
    c = recipe.formats
    routing = m.gate(x.detach().flatten(0, 1))
    plan = m.dispatcher.plan(routing.experts_TK, m.last_load_E)
    token = plan.token_R.long()
    weight_R = routing.weights_TK.flatten()[plan.order_R.long(), None]
    dy = torch.randn(2, T // 2, D, generator=torch.Generator().manual_seed(2)).flatten(0, 1)

    x_TD = quantize(x.detach().flatten(0, 1), (1, 128), c.x.fmt, "power_of_2").dequantize()
    assert torch.equal(up[0].a.dequantize(), x_TD[token])
    tiles = align_groups(plan.offs_E, T * K)[0]
    in_tiles = partial(take_tiles, tiles=tiles)
    assert_quantized(up[2].b.mT, in_tiles(x_TD[token]), c.wgrad_x.block, c.x.fmt, "power_of_2")
    dy_TD = quantize(dy, (1, 128), c.dy.fmt, "power_of_2").dequantize()
    assert torch.equal(down[1].a.dequantize(), dy_TD[token])
    assert_quantized(down[2].a.mT, in_tiles(dy_TD[token]), (128, 1), c.dy.fmt, "power_of_2")
    h_gate, h_up = grouped_matmul_nt(up[0].a, up[0].b, plan.offs_E, torch.float32).chunk(2, 1)
    assert_quantized(down[0].a, silu(h_gate) * h_up * weight_R, (1, 128), c.x.fmt, "power_of_2")

    if recipe.swiglu_inputs != "recomputed":
        h_gate, h_up = (quantize(t, (1, 128), recipe.swiglu_inputs.fmt).dequantize() for t in (h_gate, h_up))
    dh = grouped_matmul_nt(down[1].a, down[1].b, plan.offs_E, torch.float32) * weight_R
    assert_quantized(down[2].b.mT, in_tiles(silu(h_gate) * h_up * weight_R), c.wgrad_x.block, c.x.fmt, "power_of_2")
    both = torch.cat((torch.ops.aten.silu_backward(dh * h_up, h_gate), dh * F.silu(h_gate)), dim=1)
    assert_quantized(up[1].a, both, (1, 128), c.dy.fmt)
    assert_quantized(up[2].a.mT, in_tiles(both), (128, 1), c.dy.fmt)


def gradients_of_experts(recipe: Recipe, x_TD: Tensor, dy_TD: Tensor, expert_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up and down, where each token has one expert."""
    m, way = moe(recipe).experts, LocalDispatcher()
    plan = way.plan(expert_T[:, None], expert_T.bincount(minlength=E))
    x, arguments = quantize_block_input(x_TD, recipe), (torch.ones(len(x_TD), 1), None, Routed(way, plan), x_TD.dtype)
    experts_feed_forward(x, m.gate_up, m.down, *arguments).backward(dy_TD)
    return m.gate_up.grad, m.down.grad


@cache
def some_gradients_of_experts(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Inputs, output gradients and experts of tokens, and the gradients of the experts' weights."""
    generator = torch.Generator().manual_seed(4)
    expert_T = torch.randint(0, E, (2 * T,), generator=generator)
    x, dy = torch.randn(2, 2 * T, D, generator=generator)
    return x, dy, expert_T, gradients_of_experts(recipe, x, dy, expert_T)


@pytest.mark.slow
@every_fused
@given(value=st.sampled_from([1e3, -1e20, float("inf"), float("nan")]), of_dy=st.booleans(), data=st.data())
@settings(max_examples=20)
def test_no_value_of_an_expert_changes_another_experts_gradients(recipe, value, of_dy, data):
    x, dy, expert_T, expected = some_gradients_of_experts(recipe)
    x, dy = x.clone(), dy.clone()
    token, channel = data.draw(st.integers(0, 2 * T - 1)), data.draw(st.integers(0, D - 1))
    (dy if of_dy else x)[token, channel] = value
    others = torch.arange(E) != expert_T[token]
    for found, before in zip(gradients_of_experts(recipe, x, dy, expert_T), expected, strict=True):
        assert torch.equal(found[others], before[others])
        assert not torch.equal(found, before)  # a NaN in it is unequal to itself, too


@pytest.mark.one_case
@every_fused
def test_the_gradients_of_an_expert_are_those_of_the_expert_alone(recipe):
    generator = torch.Generator().manual_seed(4)
    expert_T = torch.randint(0, E, (2 * T,), generator=generator)
    x, dy = torch.randn(2, 2 * T, D, generator=generator)
    together = gradients_of_experts(recipe, x, dy, expert_T)
    for expert in range(E):
        own = expert_T == expert
        for found, alone in zip(together, gradients_of_experts(recipe, x[own], dy[own], expert_T[own]), strict=True):
            assert torch.equal(found[expert], alone[expert])


@pytest.mark.one_case
@every_fused
@pytest.mark.parametrize("shared", [0, 128, 100])
def test_a_mixture_approximates_the_exact_one(recipe, shared):
    x = torch.randn(2, T // 2, D, requires_grad=True)
    found, expected = gradients(moe(recipe, shared), x), gradients(moe(None, shared), x)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 0.15 * theirs.norm()


def test_an_expert_without_tokens_gets_a_gradient_of_zeros_and_no_token_is_dropped():
    m = moe(shared=0)
    m.gate.e_score_correction_bias[:K] = 10.0
    found = gradients(m, x_of())
    assert m.last_load_E.tolist() == [T] * K + [0] * (E - K)
    assert all(t.isfinite().all() for t in found)
    for weight in (m.experts.gate_up, m.experts.down):
        assert (weight.grad[K:] == 0).all()
        assert (weight.grad[:K].flatten(1).abs().sum(1) > 0).all()


@both_settings
def test_nothing_is_read_back_to_the_host(recipe):
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):  # a fake tensor has no value: reading one raises
        after_norm(moe(recipe), torch.randn(2, 9, D), layer_norm()).sum().backward()


def test_no_tokens_are_no_error():
    m, x = moe(), torch.zeros(0, 5, D, requires_grad=True)
    assert m.eval()(x).shape == (0, 5, D)


# Both, and what is around them


def modules(recipe: Recipe) -> list[nn.Module]:
    return [mlp(recipe), moe(recipe)]


@both_settings
def test_a_fused_norm_equals_a_separate_one(recipe):
    """The fused norm is quantized from FP32, which is the dtype here anyway."""
    for m in modules(recipe):
        norm, x = layer_norm(), x_of()
        found = gradients(m, x, lambda x, m=m, norm=norm: after_norm(m, x, norm))
        of_norm, norm.weight.grad = norm.weight.grad, None
        expected = gradients(m, x, lambda x, m=m, norm=norm: m(norm(x)))
        for ours, theirs in zip([*found, of_norm], [*expected, norm.weight.grad], strict=True):
            assert (ours - theirs).norm() < 0.02 * theirs.norm()  # the norms differ in the last bit


@both_settings
def test_two_passes_give_the_same_bits(recipe):
    for m in modules(recipe):
        assert same(gradients(m, x := x_of()), gradients(m, x))


@both_settings
def test_a_copy_computes_the_same(recipe):
    for m in modules(recipe):
        assert same(gradients(copy.deepcopy(m), x := x_of()), gradients(m, x))


@both_settings
def test_a_hook_is_called_and_changes_little(recipe):
    for m, inner in ((d := mlp(recipe), d.up_proj), (e := moe(recipe), e.experts)):
        fused, calls = gradients(m, x := x_of()), []
        inner.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for found, expected in zip(gradients(m, x), fused, strict=True):
            assert (found - expected).norm() < 0.15 * expected.norm()
        assert calls == [1]


@pytest.mark.one_case
@both_settings
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_activations_changes_no_bit(recipe, use_reentrant):
    for m in modules(recipe):
        norm, x = layer_norm(), x_of()
        expected = gradients(m, x, lambda x, m=m, norm=norm: after_norm(m, x, norm))
        again = lambda x, m=m, norm=norm: checkpoint(after_norm, m, x, norm, use_reentrant=use_reentrant)  # noqa: E731
        assert same(gradients(m, x, again), expected)


@pytest.mark.oldest_torch
@pytest.mark.exhaustive  # the whole model is compiled in tests/models
@pytest.mark.parametrize("recipe", [SAVED, RECOMPUTED], ids=["saved", "recomputed"])
def test_compiled_without_a_graph_break_they_compute_the_same(recipe):
    for m in modules(recipe):
        own, norm, x = copy.deepcopy(m), layer_norm(), x_of()
        compiled = torch.compile(partial(after_norm, own), fullgraph=True, backend="aot_eager")
        expected = gradients(m, x, lambda x, m=m, norm=norm: after_norm(m, x, norm))
        assert same(gradients(own, x, lambda x, c=compiled, norm=norm: c(x, norm)), expected)


@both_settings
def test_main_grad_accumulates_what_grad_would_be(recipe):
    for m in modules(recipe):
        gradients(m, x := x_of())
        weights = [p for n, p in m.named_parameters() if "gate.weight" not in n]
        expected = [p.grad for p in weights]
        for p in weights:
            p.main_grad = torch.ones(p.shape)
        m.zero_grad()
        m(x).backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))
        for p, grad in zip(weights, expected, strict=True):
            assert p.grad is None
            torch.testing.assert_close(p.main_grad, 1 + grad, rtol=1e-6, atol=1e-6)


@both_settings
def test_a_frozen_weight_gets_no_gradient_and_changes_no_other(recipe):
    for m in modules(recipe):
        names = [n for n, _ in m.named_parameters()]
        expected = dict(zip(names, gradients(m, x := x_of())[2:], strict=True))
        for frozen in ("down_proj.weight", "experts.gate_up"):
            for n, p in m.named_parameters():
                p.requires_grad_(not n.endswith(frozen))
            m.zero_grad()
            m(x).backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))
            for n, p in m.named_parameters():
                assert p.grad is None if n.endswith(frozen) else torch.equal(p.grad, expected[n])


@both_settings
def test_an_input_without_a_gradient_changes_no_weights(recipe):
    for m in modules(recipe):
        expected = gradients(m, x := x_of())[2:]
        m.zero_grad()
        m(x.detach()).backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))
        assert same([p.grad for p in m.parameters()], expected)


@both_settings
def test_without_gradients_nothing_is_saved_and_the_result_is_the_same(recipe):
    for m in modules(recipe):
        expected, saved = m(x := x_of()), []
        with torch.no_grad(), saved_tensors_hooks(saved.append, lambda t: t):
            assert torch.equal(m(x), expected)
        assert saved == []


@both_settings
def test_autocast_gives_its_dtype_and_gradients_in_the_inputs(recipe):
    for m in modules(recipe):
        x = x_of()
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
        assert all(p.grad.dtype == torch.float32 for p in m.parameters())


def test_every_quantization_is_observed_once():
    counts: dict[str, int] = {}
    m, x = moe(shared=128), x_of()
    with observe_quantization(lambda operand, q: counts.update({operand: counts.get(operand, 0) + 1})):
        m(x).sum().backward()
    # x for all, h of either; a gradient of either's result and of its gate and up; x again and h for either's wgrad
    assert counts == {"x": 3, "w": 5, "dy": 4, "wgrad_dy": 4, "wgrad_x": 4}


def test_a_size_that_is_no_multiple_of_128_is_not_fused():
    m, x = apply_recipe(randomized(MLP(D, 200)), SAVED), x_of()
    assert m.fusion() is None
    h = F.silu(linear(x, m.gate_proj.weight, None, SAVED)) * linear(x, m.up_proj.weight, None, SAVED)
    assert torch.equal(m(x), linear(h, m.down_proj.weight, None, SAVED))


def test_layers_of_different_recipes_are_not_fused():
    m = mlp(SAVED)
    m.up_proj.use_recipe(Recipe.per_tensor())
    assert m.fusion() is None
    assert mlp(SAVED.without("wgrad")).fusion() is None
    assert mlp(SAVED).fusion().recipe == SAVED


# Experts whose rows another library has sorted


@pytest.mark.one_case
@every_fused
@settings(max_examples=5, deadline=None)
@given(counts=st.lists(st.sampled_from([0, 1, 37, 128, 200]), min_size=3, max_size=3))
def test_sorted_experts_compute_what_a_dense_layer_of_each_expert_does(recipe: Recipe, counts: list[int]):
    """Bit for bit, except that wgrad also sums the zeros of its tiles, so in another order; further rows give zeros."""
    generator = torch.Generator().manual_seed(0)
    x_RD = torch.randn(sum(counts) + 5, D, generator=generator)
    dy_RD = torch.randn(x_RD.shape, generator=generator)
    stacks = [torch.randn(3, *size, generator=generator) * D**-0.5 for size in ((I, D), (I, D), (D, I))]

    def results(compute, x: Tensor, dy: Tensor, weights: list[Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        y = compute(quantize_block_input(leaves[0], recipe), leaves[1:])
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    offs = torch.tensor(counts).cumsum(0).int()
    y_RD, dx_RD, *dws = results(
        lambda x, w: sorted_experts_feed_forward(x, w, offs, torch.float32), x_RD, dy_RD, stacks
    )
    assert not y_RD[sum(counts) :].any()
    assert not dx_RD[sum(counts) :].any()
    for e, end in enumerate(offs.tolist()):
        rows = slice(end - counts[e], end)
        weights = [stack[e] for stack in stacks]
        alone = results(lambda x, w: feed_forward(x, w, torch.float32), x_RD[rows], dy_RD[rows], weights)
        assert torch.equal(y_RD[rows], alone[0])
        assert torch.equal(dx_RD[rows], alone[1])
        for dw, expected in zip(dws, alone[2:], strict=True):
            assert (dw[e] - expected).norm() <= 1e-5 * expected.norm()
