"""Tests of transposed weights that the backward pass recomputes: the same bits, and nothing held in between."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from octile.nn.conversion import apply_recipe
from octile.nn.functional import grouped_linear
from octile.nn.fused.quantize import RecomputedWeight
from octile.nn.gate import Gate
from octile.nn.linear import Linear
from octile.nn.mha import MHA
from octile.nn.mla import MLA
from octile.nn.mlp import MLP, GateUpMLP
from octile.nn.moe import MoE
from octile.nn.observer import observe_gemms, observe_quantization
from octile.nn.rope import Rope
from octile.nn.weight_cache import _cache
from octile.recipe import Recipe

RECOMPUTED = Recipe.deepseek_v3()  # by default
CACHED = replace(RECOMPUTED, transposed_weights="cached")
B, S, D, I, E, K = 2, 24, 128, 256, 4, 2


class WithPositions(nn.Module):
    """Attention, called with the positions of its tokens."""

    def __init__(self, attention: nn.Module, rope_dim: int):
        super().__init__()
        self.attention, self.cos_sin = attention, Rope(rope_dim).cos_sin(torch.arange(S))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.cos_sin)


class Experts(nn.Module):
    """One stacked weight, for all tokens in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, I, D) / 16)
        self.recipe: Recipe | None = None
        self.linear_layers = E

    def use_recipe(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([5, 5, 30, 48], dtype=torch.int32)
        return grouped_linear(x.flatten(0, 1), self.weight, offs, self.recipe)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.ModuleList([nn.Linear(D, I)]),
    "grouped_linear": Experts,
    "MLP": lambda: MLP(D, I),
    "GateUpMLP": lambda: GateUpMLP(D, I),
    "MLP, not fused": lambda: MLP(D, 200),
    "MoE": lambda: MoE(Gate(D, E, K), D, I, shared_intermediate_size=I),
    "MHA": lambda: WithPositions(MHA(D, 4), 32),
    "MLA": lambda: WithPositions(
        MLA(D, 4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32), 16
    ),
}
every_module = pytest.mark.parametrize("name", MODULES)


def make(name: str, recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    module = apply_recipe(MODULES[name](), recipe)
    return module[0] if isinstance(module, nn.ModuleList) else module


def x_of() -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1), requires_grad=True)


def results(module: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    x = x_of()
    y = module(x) if call is None else call(x)
    module.zero_grad()
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return [y, x.grad, *(p.grad.clone() for p in module.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_module
def test_results_are_bit_for_bit_the_same(name: str):
    assert_same(results(make(name, RECOMPUTED)), results(make(name, CACHED)))


@every_module
def test_results_are_the_same_where_the_weight_cache_holds_weights(name: str):
    module, expected = make(name, RECOMPUTED), results(make(name, CACHED))
    torch.optim.SGD(module.parameters(), lr=0.0).step()
    for _ in range(2):
        assert_same(results(module), expected)


@pytest.mark.parametrize("swiglu_inputs", ["kept", "recomputed"])
def test_recomputed_gate_and_up_read_the_weights_again(swiglu_inputs: str):
    def recipe(base: Recipe) -> Recipe:
        return replace(base, swiglu_inputs="recomputed") if swiglu_inputs == "recomputed" else base

    assert_same(results(make("MLP", recipe(RECOMPUTED))), results(make("MLP", recipe(CACHED))))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_gemm_in_high_precision_stays_so(gemm: str):
    recipes = (RECOMPUTED.without(gemm), CACHED.without(gemm))
    assert_same(*(results(make("Linear", recipe)) for recipe in recipes))


def saved_of(module: nn.Module) -> set[tuple[int, ...]]:
    """The shapes of FP8 tensors that a forward pass saves for backward."""
    shapes = set()

    def keep(t: Tensor) -> Tensor:
        if t.dtype == torch.float8_e4m3fn:
            shapes.add(tuple(t.shape))
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        module(x_of())
    return shapes


@pytest.mark.parametrize("name", ["Linear", "grouped_linear", "MLP"])
def test_no_quantized_weight_is_saved_for_backward(name: str):
    module = make(name, RECOMPUTED)
    weights = {tuple(sorted(p.shape)) for p in module.parameters() if p.dim() > 1}
    assert not {tuple(sorted(shape)) for shape in saved_of(module)} & weights
    assert {tuple(sorted(shape)) for shape in saved_of(make(name, CACHED))} & weights


def test_a_weight_that_was_written_before_backward_is_refused():
    layer, x = Linear(D, I, recipe=RECOMPUTED), x_of()
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_weight_cache_holds_the_weight_once():
    layer = Linear(D, I, bias=False, recipe=RECOMPUTED)
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    layer(x_of()).sum().backward()
    (entry,) = _cache[layer.weight.untyped_storage()].values()
    assert entry.quantized.w_t.data.data_ptr() == entry.quantized.w.data.data_ptr()


@pytest.mark.parametrize("name", ["Linear", "MLP"])
def test_frozen_weights_are_quantized_once_for_all_steps(name: str, monkeypatch: pytest.MonkeyPatch):
    """Their transposes, too: the backward pass quantizes none."""
    recomputed = []
    monkeypatch.setattr(RecomputedWeight, "w_t", property(lambda weight: recomputed.append(weight)))
    module = make(name, RECOMPUTED).requires_grad_(False)
    quantized = []
    with observe_quantization(lambda operand, q: quantized.append(q.data.data_ptr()) if operand == "w" else None):
        for _ in range(2):
            module(x_of()).sum().backward()
    assert not recomputed
    assert len(set(quantized)) == sum(p.dim() > 1 for p in module.parameters())


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["MoE", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("Linear", "MLP"))])
def test_a_compiled_module_has_the_same_results(name: str):
    module = make(name, RECOMPUTED)
    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    for found, expected in zip(results(module, compiled), results(module), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("Linear", marks=pytest.mark.exhaustive), "MLP"])
def test_a_compiled_module_recomputes_in_the_backward_pass(name: str):
    """The compiler would compute in the forward pass what depends on no gradient, and save it."""
    module = make(name, RECOMPUTED)
    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    weights = {tuple(sorted(p.shape)) for p in module.parameters() if p.dim() > 1}
    assert not {tuple(sorted(shape)) for shape in saved_of(compiled)} & weights


def test_observers_see_the_transposed_weight():
    seen = []
    with observe_gemms(lambda weight, fprop: lambda gemm: seen.append((gemm.name, gemm.b and tuple(gemm.b.shape)))):
        results(make("MLP", RECOMPUTED))
    assert [shape for name, shape in seen if name == "dgrad"] == [(I, D), (D, I), (D, I)]
