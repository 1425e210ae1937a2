"""Tests of the decision what to fuse: made once, and again after a recipe or a layer changed."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from octile.nn import MHA, MLA, MLP, Gate, Linear, MoE, RMSNorm, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.fusion import FusableModule
from octile.nn.rope import Rope
from octile.recipe import Recipe
from tests.serve.models import exact_model

D, S = 128, 6
RECIPE = Recipe.deepseek_v3()
ANGLES = Rope(16).cos_sin(torch.arange(S))


def mla() -> MLA:
    return MLA(D, 2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)


MODULES: dict[str, tuple[Callable[[], FusableModule], str, tuple[object, ...]]] = {  # built; a fused layer; arguments
    "MLP": (lambda: MLP(D, 128), "up_proj", ()),
    "MHA": (lambda: MHA(D, 2, 16), "k_proj", (ANGLES,)),
    "MLA": (mla, "kv_b_proj", (ANGLES,)),
    "MoE": (lambda: MoE(Gate(D, 4, 2), D, 128, 128), "experts", ()),
}
every_module = pytest.mark.parametrize("name", MODULES)


def built(name: str) -> tuple[FusableModule, nn.Module, Callable[[FusableModule], Tensor]]:
    """A converted module, one of its fused layers, and how it is called."""
    torch.manual_seed(0)
    make, layer, arguments = MODULES[name]
    module = apply_recipe(make(), RECIPE)
    x = torch.randn(2, S, D)
    return module, module.get_submodule(layer), lambda m: m(x, *arguments)


@every_module
def test_fusion_is_decided_once(name, monkeypatch):
    module, _, call = built(name)
    decide, calls = type(module).decide_fusion, []
    monkeypatch.setattr(type(module), "decide_fusion", lambda self: calls.append(self) or decide(self))
    for _ in range(3):
        call(module)
    assert calls.count(module) == 1


@every_module
def test_a_recipe_that_a_layer_gets_later_counts(name):
    module, layer, call = built(name)
    fused = call(module)
    assert module.fusion().recipe == RECIPE
    layer.use_recipe(Recipe.bf16())
    assert module.fusion() is None
    assert not torch.equal(call(module), fused)
    layer.use_recipe(RECIPE)
    assert module.fusion().recipe == RECIPE
    assert torch.equal(call(module), fused)


@every_module
def test_an_assigned_recipe_counts_as_well(name):
    module, layer, call = built(name)
    call(module)
    layer.recipe = RECIPE.without("wgrad")
    assert module.fusion() is None


@every_module
def test_recipes_of_other_modules_change_nothing(name):
    module, _, call = built(name)
    fused = call(module)
    Linear(2, 2).use_recipe(Recipe.bf16())
    assert module.fusion().recipe == RECIPE
    assert torch.equal(call(module), fused)


@pytest.mark.parametrize("name", ["MLP", "MHA", "MLA"])
def test_a_replaced_layer_is_used(name):
    module, layer, call = built(name)
    fused, called = call(module), []

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            called.append(x)
            return super().forward(x)

    other = Other(layer.in_features, layer.out_features, bias=False)
    setattr(module, MODULES[name][1], other)
    assert module.fusion() is None
    call(module)
    assert len(called) == 1
    setattr(module, MODULES[name][1], layer)
    assert module.fusion().recipe == RECIPE
    assert torch.equal(call(module), fused)


def test_a_bias_that_a_layer_gets_later_is_added():
    module, layer, call = built("MLP")
    fused = call(module)
    layer.bias = nn.Parameter(torch.ones(layer.out_features))
    assert module.fusion() is None
    assert not torch.allclose(call(module), fused)


@every_module
def test_a_layer_whose_forward_is_replaced_is_called(name, monkeypatch):
    """As accelerate replaces it."""
    module, layer, call = built(name)
    call(module)
    calls: list[int] = []
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args: calls.append(1) or forward(*args), raising=False)
    call(module)
    assert calls == [1]


@every_module
def test_a_layer_with_a_hook_is_called_as_long_as_it_has_one(name):
    module, layer, call = built(name)
    call(module)
    calls: list[int] = []
    hook = layer.register_forward_hook(lambda *_: calls.append(1))
    call(module)
    hook.remove()
    call(module)
    assert calls == [1]


@every_module
def test_a_copy_decides_by_its_own_layers(name):
    module, layer, call = built(name)
    with torch.no_grad():
        call(module)
    other = copy.deepcopy(module)
    layer.use_recipe(Recipe.bf16())
    assert module.fusion() is None
    assert other.fusion().recipe == RECIPE


@every_module
def test_a_norm_is_fused_where_its_layer_is(name):
    module, layer, _ = built(name)
    x, norm = torch.randn(2, S, D), RMSNorm(D)
    residual, normed = pre_norm(x, norm, module)
    assert torch.equal(residual, x)
    assert isinstance(normed, BlockInput)
    layer.use_recipe(Recipe.bf16())
    assert torch.equal(pre_norm(x, norm, module)[1], norm(x))


@every_module
def test_hooks_of_the_layer_and_of_its_norm_see_tensors(name):
    module, _, _ = built(name)
    x, norm, seen = torch.randn(2, S, D), RMSNorm(D), []
    for hooked in (module, norm):
        hook = hooked.register_forward_hook(lambda m, args, y: seen.extend((*args, y)))
        x, normed = pre_norm(x, norm, module)
        module(normed, *MODULES[name][2])
        hook.remove()
    assert sum(isinstance(t, Tensor) and t.shape == x.shape for t in seen) == 4


def test_a_norm_before_an_unconverted_layer_is_not_fused():
    x, norm = torch.randn(3, D), RMSNorm(D)
    assert torch.equal(pre_norm(x, norm, nn.Linear(D, D))[1], norm(x))


HOOKED = [  # a hook there ends a fusion
    *((name, layer) for name in ("MLP", "MHA") for layer in MODULES[name][0]().fusable_layers),
    *(("MLA", layer) for layer in mla().fusable_layers),
    ("MoE", "shared_experts"),
    ("MoE", "shared_experts.up_proj"),
    ("MoE", "gate"),
]


def difference(name: str, layer: str) -> list[float]:
    """How much a hook on a layer changes the output, the input's gradient and the weights', relative to each."""
    torch.manual_seed(0)
    make, _, arguments = MODULES[name]
    module, x = apply_recipe(make(), RECIPE), torch.randn(2, 64, D)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    arguments = (Rope(16).cos_sin(torch.arange(64)),) if arguments else ()
    results = []
    for m in (module, hooked := copy.deepcopy(module)):
        if m is hooked:
            m.get_submodule(layer).register_forward_hook(lambda *_: None)
        y = m(given := x.clone().requires_grad_(), *arguments)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        weights = torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])
        results.append((y.detach(), given.grad, weights))
    fused, unfused = results
    return [((b - a).norm() / a.norm()).item() for a, b in zip(fused, unfused, strict=True)]


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "layer"), HOOKED)
def test_a_hook_changes_no_output_and_gradients_by_what_backward_reads_in_fp8(name, layer):
    of_output, *of_gradients = difference(name, layer)
    assert of_output < 1e-5
    assert max(of_gradients) < 0.06


def test_a_hook_on_the_experts_changes_what_their_weights_multiply():
    assert 0.005 < difference("MoE", "experts")[0] < 0.04
    assert max(difference("MoE", "experts")[1:]) < 0.08


MODULES_OF_A_BLOCK = ["self_attn", "self_attn.o_proj", "mlp", "mlp.gate", "mlp.experts", "mlp.shared_experts"]


@pytest.mark.one_case
@pytest.mark.parametrize("name", [*MODULES_OF_A_BLOCK, "input_layernorm", "post_attention_layernorm"])
def test_a_batch_invariant_recipe_refuses_hooks_of_any_module_of_a_block(name):
    model, tokens = exact_model(torch.bfloat16, first_k_dense_replace=0), torch.arange(9)[None]
    before = model.log_probs(tokens)
    hook = model.model.layers[0].get_submodule(name).register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="'exact' computes the layers of a block together"):
        model.log_probs(tokens)
    hook.remove()
    assert torch.equal(model.log_probs(tokens), before)


def test_a_batch_invariant_recipe_refuses_a_wrapped_module():
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

        def forward(self, *arguments: object) -> Tensor:
            return self.module(*arguments)

    model = exact_model(torch.bfloat16)
    model.model.layers[1].self_attn = Wrapper(model.model.layers[1].self_attn)
    with pytest.raises(RuntimeError, match="or is wrapped"):
        model.log_probs(torch.arange(9)[None])


def test_hooks_around_a_block_and_in_a_layer_that_is_not_fused_are_called():
    model, called = exact_model(torch.bfloat16), []
    dense = model.model.layers[0].mlp
    for module in (model.model.layers[1], dense.up_proj, dense):
        module.register_forward_hook(lambda *_: called.append(1))
    model.log_probs(torch.arange(9)[None])
    assert len(called) == 3
