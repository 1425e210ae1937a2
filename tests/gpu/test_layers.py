"""Layers on a GPU agree with the CPU, and give the same results when they are captured in a graph.

The operands of a layer have the same bits, but a GEMM sums them in another order and promotes every 128 along K:
between two layers a few values round to the neighboring 8-bit value. Shapes: T tokens, K inputs, N outputs, E experts.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from octile.nn.conversion import apply_recipe
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.fused import quantize as fused_quantize
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.feed_forward import Routed, experts_feed_forward
from octile.nn.linear import Linear
from octile.nn.mlp import MLP
from octile.nn.moe import Experts
from octile.nn.weight_cache import can_cache
from octile.recipe import BLOCK, OperandFormat, Recipe

WORST = 0.03  # of a tensor's norm
T, K, N = 140, 256, 192
OFFS = [60, 60, 110, 130]

every_recipe = pytest.mark.parametrize("name", Recipe.names())


def results(layer: nn.Module, x: Tensor, *more: Tensor) -> list[Tensor]:
    """The output and all gradients of one forward and backward pass, on the CPU."""
    x = x.detach().requires_grad_()
    y = layer(x, *more)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    return [t.detach().cpu().clone() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]


def assert_same_on_gpu(layer: nn.Module, *inputs: Tensor) -> None:
    on_gpu = copy.deepcopy(layer).cuda()
    for found, expected in zip(results(on_gpu, *(t.cuda() for t in inputs)), results(layer, *inputs), strict=True):
        assert (found - expected).norm() <= WORST * expected.norm()


@every_recipe
def test_linear(name: str):
    torch.manual_seed(0)
    assert_same_on_gpu(Linear(K, N, recipe=Recipe.named(name)), torch.randn(T, K))


def test_wgrad_of_x_in_blocks():
    torch.manual_seed(0)
    assert_same_on_gpu(apply_recipe(MLP(K, 256), Recipe.wgrad_x_blocks()), torch.randn(2, T, K))


@pytest.mark.parametrize("name", [name for name in Recipe.names() if not Recipe.named(name).batch_invariant])
def test_mlp(name: str):
    torch.manual_seed(0)
    assert_same_on_gpu(apply_recipe(MLP(K, N), Recipe.named(name)), torch.randn(2, T, K))


def gradients_of_experts(recipe: Recipe, x: Tensor, dy: Tensor, expert_T: Tensor) -> list[Tensor]:
    """Gradients of the experts' weights in the fused layer and in grouped linear layers; each token has one expert."""
    torch.manual_seed(0)
    experts = Experts(len(OFFS), K, 128).cuda()
    experts.use_recipe(recipe)
    plan = LocalDispatcher().plan(expert_T[:, None], expert_T.bincount(minlength=len(OFFS)))
    weights, routed = torch.ones(len(x), 1, device="cuda"), Routed(LocalDispatcher(), plan)
    arguments = (experts.gate_up, experts.down, weights, None, routed, x.dtype)
    experts_feed_forward(quantize_block_input(x, recipe), *arguments).backward(dy)
    fused = [p.grad.clone() for p in experts.parameters()]
    experts.zero_grad()
    sorted_rows = plan.token_R.long()
    experts(x[sorted_rows], plan.offs_E).backward(dy[sorted_rows])
    return [*fused, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("recipe", [*map(Recipe.named, ("deepseek_v3", "hybrid_e5m2", "int8_tiles", "wgrad_x_blocks"))])
@pytest.mark.parametrize("value", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("of_dy", [False, True], ids=["x", "dy"])
def test_no_value_of_an_expert_changes_another_experts_gradients(of_dy: bool, value: float, recipe: Recipe):
    generator = torch.Generator().manual_seed(4)
    expert_T = torch.randint(0, len(OFFS), (700,), generator=generator).cuda()
    x, dy = torch.randn(2, 700, K, generator=generator).bfloat16().cuda()
    expected = gradients_of_experts(recipe, x, dy, expert_T)
    (dy if of_dy else x)[300, 7] = value
    others = torch.arange(len(OFFS)) != expert_T[300].item()
    for found, before in zip(gradients_of_experts(recipe, x, dy, expert_T), expected, strict=True):
        assert torch.equal(found[others], before[others])
        assert not torch.equal(found, before)  # a NaN in it is unequal to itself, too


@every_recipe
def test_experts(name: str):
    torch.manual_seed(0)
    experts = Experts(len(OFFS), K, N)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.06)
    experts.use_recipe(Recipe.named(name))
    assert_same_on_gpu(experts, torch.randn(T, K), torch.tensor(OFFS, dtype=torch.int32))


def test_main_grad_is_accumulated_in_place():
    torch.manual_seed(0)
    layer, x = Linear(K, N, device="cuda"), torch.randn(T, K, device="cuda")
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer.weight.main_grad = torch.ones_like(layer.weight)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 1 + expected, rtol=1e-5, atol=1e-5)


def test_a_weight_is_not_cached_while_a_graph_is_captured():
    weight, fmt = nn.Parameter(torch.randn(N, K, device="cuda")), OperandFormat(block=BLOCK)
    torch.optim.SGD([weight], lr=0.0).step()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = can_cache(weight, fmt)
        weight.detach().clone()  # an empty graph warns
    assert (captured, can_cache(weight, fmt)) == (False, True)


@pytest.mark.parametrize("name", ["deepseek_v3", "per_tensor", "mxfp8", "int8_tiles", "bf16"])
def test_a_graphed_layer_follows_its_weight(name: str):
    torch.manual_seed(0)
    eager = Linear(K, N, device="cuda", recipe=Recipe.named(name))
    graphed = copy.deepcopy(eager)
    x = torch.randn(T, K, device="cuda")
    graphed(x)  # the cache holds its weight from here on
    graphed = torch.cuda.make_graphed_callables(graphed, (x.clone().requires_grad_(),))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (eager, graphed)]
    for _ in range(3):
        for found, expected in zip(results(graphed, x), results(eager, x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_frozen_weight_is_quantized_once_and_gives_the_same_results(monkeypatch):
    """In both layouts, as dgrad needs the transposed one."""
    calls = []
    quantize_once = fused_quantize._quantize_both_layouts
    monkeypatch.setattr(
        fused_quantize, "_quantize_both_layouts", lambda *args: calls.append(args) or quantize_once(*args)
    )
    layer = Linear(K, N).cuda().requires_grad_(False)
    x = torch.randn(T, K, device="cuda", requires_grad=True)
    found = []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x)
        found.append(gradient)
    trained = copy.deepcopy(layer).requires_grad_(True)
    (expected,) = torch.autograd.grad(trained(x).square().sum(), x)
    assert len(calls) == 1  # of the frozen layer; the other one recomputes the transposed layout
    assert all(torch.equal(gradient, expected) for gradient in found)
