"""Differentiating twice through a function of octile raises or is right; it is never silently zero."""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import octile.models
import octile.nn
import octile.optim
from octile.integrations.transformers import _TransposedCopy
from octile.nn import MHA, MLA, MLP, Gate, Linear, MoE, RMSNorm, functional, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.deferred_wgrad import DeferrableLinears
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.index_alignment import alignment_loss, top_k_alignment_loss
from octile.nn.fused.projections import projections
from octile.nn.fused.sparse_latent_attention import sparse_latent_attention
from octile.nn.fused.text_attention import text_attention
from octile.nn.fused.top_k_attention import top_k_attention
from octile.nn.indexer import _IndexValues
from octile.nn.linear import BatchInvariantHead
from octile.nn.packed_texts import TextBorders
from octile.nn.rope import Rope
from octile.nn.smooth_swiglu import scale_columns
from octile.nn.tensor_parallel import _Wait
from octile.recipe import Recipe

S, D = 6, 128
ONE_TEXT = TextBorders(torch.tensor([0, S], dtype=torch.int32), S)
RECIPE = Recipe.deepseek_v3()
COS_SIN = Rope(16).cos_sin(torch.arange(S))


def mla() -> MLA:
    return MLA(D, 2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)


def with_recipe(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Give converted layers another recipe, which `apply_recipe` may keep for whole models."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.use_recipe(recipe)
    return module


def norm_before_mlp(x: Tensor) -> Tensor:
    norm, mlp = RMSNorm(D), apply_recipe(MLP(D, D), RECIPE)
    return mlp(pre_norm(x, norm, mlp)[1])


TOP_K = torch.tensor([[[0, -1]]], dtype=torch.int32).expand(1, S, 2)


def attention_to_top_k_keys(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 64))
    return top_k_attention(q, q, q, TOP_K, 0.1)


def attention_to_top_k_latents(x: Tensor) -> Tensor:
    return sparse_latent_attention(x.unflatten(-1, (2, 64)), x, nn.Linear(80, 2 * 64, bias=False), TOP_K, 16, 0.1)[0]


def alignment(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 64))
    return alignment_loss(q, q[:, :, 0], x[..., :2], q.detach(), q.detach(), 0.1)


def top_k_alignment(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 64))
    return top_k_alignment_loss(q, q[:, :, 0], x[..., :2], TOP_K, torch.ones(1, S, 2))


class ExchangingDispatcher(LocalDispatcher):
    """A dispatcher whose mixtures compute during exchanges, as between ranks."""

    exchanges = True


def mixture(x: Tensor) -> Tensor:
    moe = apply_recipe(MoE(Gate(D, 4, 2), D, D, D), RECIPE)
    moe.dispatcher = ExchangingDispatcher()
    return moe(x)


def deferrable_linear(x: Tensor) -> Tensor:
    with DeferrableLinears():
        return nn.Linear(D, 8)(x)


RAISING: dict[str, Callable[[Tensor], Tensor]] = {  # functions of x [1, S, D]
    "HeadLosses": lambda x: BatchInvariantHead(D, 8, bias=False)(x, torch.zeros(1, S, dtype=torch.int64)),
    "HighPrecisionLinear": lambda x: functional.linear(x, torch.randn(8, D), None, Recipe.bf16()),
    "QuantizedLinear": Linear(D, 8),
    "_AlignmentLoss": alignment,
    "_SparseLatentAttention": attention_to_top_k_latents,
    "_TopKAlignmentLoss": top_k_alignment,
    "_TopKAttention": attention_to_top_k_keys,
    "_FeedForward": lambda x: apply_recipe(MLP(D, D), RECIPE)(x),
    "_IndexValues": lambda x: _IndexValues.apply(x.unflatten(-1, (2, 64)), *COS_SIN, False),
    "_LatentAttention": lambda x: apply_recipe(mla(), RECIPE)(x, COS_SIN),
    "_Gate": lambda x: Gate(D, 4, 2)(x.flatten(0, 1)).weights_TK,
    "_Linear": deferrable_linear,
    "_NormAndQuantize": norm_before_mlp,
    "_Projections": lambda x: projections(quantize_block_input(x, RECIPE), [torch.randn(8, D)], [[8]], torch.float32)[
        0
    ],
    "_ServedAttention": lambda x: with_recipe(apply_recipe(mla(), RECIPE), Recipe.exact())(x, COS_SIN),
    "_RotaryAttention": lambda x: apply_recipe(MHA(D, 2, 16), RECIPE)(x, COS_SIN),
    "_Sum": mixture,
    "_TextAttention": lambda x: text_attention(*3 * (x[:, :, None],), 1.0, ONE_TEXT),
    "_ScaleColumns": lambda x: scale_columns(x, torch.ones(D)),
}
# tested here, in test_gate.py, and in fused/: test_elementwise.py, test_cross_entropy.py, test_rotary.py,
# test_text_attention.py
RIGHT = {
    "_CausalAttention",
    "_Combine",
    "_CrossEntropy",
    "_Dispatch",
    "_LatentKeys",
    "_LatentKeysGradients",
    "_RMSNorm",
    "_Rotate",
    "_RotateHalves",
    "_SequenceBalance",
    "_SwiGLU",
    "_TransposedCopy",
    "_Wait",
    "_WeightedCombine",
}
NOT_DERIVATIVES = {"_PassOn"}  # belongs to one backward pass


def functions() -> set[str]:
    """The names of all autograd functions of the library."""
    for package in (octile.nn, octile.models, octile.optim):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    importlib.import_module("octile.integrations.transformers")
    return {f.__name__ for f in Function.__subclasses__() if f.__module__.startswith("octile.")}


def nodes(y: Tensor) -> set[str]:
    """The names of the functions that a tensor was computed by."""
    todo, seen = [y.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def test_every_function_has_a_case():
    assert functions() == RAISING.keys() | RIGHT | NOT_DERIVATIVES


def test_second_derivatives_of_a_transposed_copy():
    weight_EKN = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda w: _TransposedCopy.apply(w) ** 3, weight_EKN)


@pytest.mark.parametrize("name", RAISING)
def test_a_gradient_that_is_to_be_differentiated_again_raises(name: str):
    """Also if the gradient that arrives is a constant, for which torch's own `once_differentiable` does not raise."""
    x = torch.randn(1, S, D, requires_grad=True)
    y = RAISING[name](x)
    assert f"{name}Backward" in nodes(y)
    with pytest.raises(RuntimeError, match=r"has no second derivative.*Leave out create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16", "per_tensor"])
@pytest.mark.parametrize("way", ["hessian", "hvp", "vhp", "jvp"])
def test_functions_that_differentiate_twice_raise(way: str, recipe: str):
    """They ask for the gradients of their inputs alone, so that an error of the second pass would not be reached."""
    model = apply_recipe(nn.Sequential(Linear(D, D), nn.SiLU(), Linear(D, 1)), Recipe.named(recipe))
    v = () if way == "hessian" else (torch.randn(D),)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        getattr(torch.autograd.functional, way)(lambda x: model(x).sum(), torch.randn(D), *v)


def test_a_wait_has_second_derivatives():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(_Wait.apply(x).pow(3).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], 6 * x.detach())


def test_the_message_names_the_function():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @first_derivative_only
        def backward(ctx, dy):
            return 2 * ctx.saved_tensors[0] * dy

    x = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^Square has no second derivative"):
        torch.autograd.grad(Square.apply(x), x, create_graph=True)


@pytest.mark.parametrize("way", ["dispatch", "combine"])
def test_rows_on_their_way_have_a_right_second_derivative(way: str):
    dispatcher, experts_TK = LocalDispatcher(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    plan = dispatcher.plan(experts_TK, torch.tensor([2, 2, 2]))
    weights = torch.rand(3, 2)
    if way == "dispatch":
        rows, call = torch.randn(3, D), lambda t: dispatcher.dispatch(t, plan)
    else:
        rows, call = torch.randn(6, D), lambda t: dispatcher.combine(t, weights, plan)
    x = rows.requires_grad_()
    # f is linear, so g = fᵀ(f(x)) is the gradient of |f(x)|² / 2, and that of |g|² / 2 is fᵀ(f(g))
    (g,) = torch.autograd.grad(call(x).square().sum() / 2, x, create_graph=True)
    (found,) = torch.autograd.grad(g.square().sum() / 2, x)
    at_g = g.detach().requires_grad_()
    (expected,) = torch.autograd.grad(call(at_g).square().sum() / 2, at_g)
    torch.testing.assert_close(found, expected)


def test_the_weights_of_a_combination_have_a_right_second_derivative():
    dispatcher, experts_TK = LocalDispatcher(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    plan, results = dispatcher.plan(experts_TK, torch.tensor([2, 2, 2])), []
    inputs = torch.randn(6, D, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    for y in (dispatcher.combine(*inputs, plan), (inputs[0][plan.row_ids_TK] * inputs[1][..., None]).sum(1)):
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
