"""Tests of layers that multiply one input as one GEMM: their results are those of the separate layers.

The forward pass has the same bits. An input gradient sums over the outputs of all layers in FP32, where separate GEMMs
round one sum to the dtype of the gradient before they add the next.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octile.nn import weight_cache
from octile.nn.conversion import apply_recipe
from octile.nn.fused import layers as fused_layers
from octile.nn.fused.layers import FusedLayers, settings
from octile.nn.fused.quantize import _quantize_joined, quantize_requested
from octile.nn.gathered_weight import GatheredWeight
from octile.nn.mla import MLA
from octile.nn.mlp import MLP
from octile.nn.observer import ObservedGemm, observe_gemms, observe_quantization
from octile.nn.rope import Rope
from octile.nn.weight_cache import WeightRequest
from octile.recipe import Recipe
from octile.scaled import ScaledTensor, quantize

B, S, D = 2, 40, 200
CACHED = replace(Recipe.deepseek_v3(), transposed_weights="cached")
RECIPES = {
    "cached": CACHED,
    "recomputed": Recipe.deepseek_v3(),
    "swiglu recomputed": replace(CACHED, swiglu_inputs="recomputed"),
    "float32 scales": Recipe.int8_tiles(),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class WithPositions(nn.Module):
    """Attention, called with the positions of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        }
        self.attention, self.cos_sin = MLA(D, 4, **sizes), Rope(8).cos_sin(torch.arange(S))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.cos_sin)


MODULES: dict[str, Callable[[], nn.Module]] = {"MLP": lambda: MLP(D, 256), "MLA": WithPositions}
every_module = pytest.mark.parametrize("name", MODULES)


def module_of(name: str, recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    return apply_recipe(MODULES[name](), recipe)


def run(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The result and the gradients of the input and of all parameters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    module.zero_grad()
    y = module.to(dtype)(x)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The GEMMs of each fused function that was called: the numbers of the layers of each."""
    found: list[list[list[int]]] = []

    class Recorded(FusedLayers):
        def __init__(self, *args: Any, **others: Any):
            super().__init__(*args, **others)
            found.append(self.gemms)

    for file in ("feed_forward", "projections"):
        monkeypatch.setattr(f"octile.nn.fused.{file}.FusedLayers", Recorded)
    return found


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have every layer run its own GEMMs from then on."""
    return lambda: monkeypatch.setattr(fused_layers, "why_not_join_weights", lambda *_: "the test asks for it")


@pytest.mark.one_case
@every_module
@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joined_layers_equal_separate_ones(name: str, recipe: Recipe, dtype: torch.dtype, separate: Callable[[], None]):
    joined = run(module_of(name, recipe), dtype)
    separate()
    alone = run(module_of(name, recipe), dtype)
    assert torch.equal(joined[0], alone[0])
    rounding = torch.finfo(dtype).eps
    for found, expected in zip(joined[1:], alone[1:], strict=True):
        assert (found - expected).norm() <= 4 * rounding * expected.norm()


def test_the_layers_that_read_one_input_are_one_gemm(gemms: list[list[list[int]]]):
    run(module_of("MLP", CACHED))
    run(module_of("MLA", CACHED))
    assert gemms == [[[0, 1], [2]], [[0, 1]]]


@pytest.mark.parametrize("rows", [100, 130])
def test_weights_whose_blocks_would_have_rows_of_two_layers_are_separate(rows: int):
    weights = [torch.zeros(rows, D), torch.zeros(128, D)]
    assert FusedLayers(weights, (True, True), settings(CACHED, torch.float32, weights), 2).gemms == [[0], [1]]
    assert FusedLayers(weights[::-1], (True, True), settings(CACHED, torch.float32, weights), 2).gemms == [[0, 1]]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_weight_is_not_joined_with_a_trained_one(frozen: int, gemms: list[list[list[int]]]):
    mlp = module_of("MLP", CACHED)
    list(mlp.parameters())[frozen].requires_grad_(False)
    run(mlp)
    assert gemms == [[[0], [1], [2]]]


def test_weights_of_two_dtypes_are_separate(gemms: list[list[list[int]]]):
    mlp = module_of("MLP", CACHED)
    mlp.up_proj.to(torch.bfloat16)
    mlp(torch.randn(2, D))
    assert gemms == [[[0], [1], [2]]]


def test_main_gradients_of_joined_layers_equal_gradients():
    expected, mlp = run(module_of("MLP", CACHED)), module_of("MLP", CACHED)
    for parameter in mlp.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    run(mlp)
    for parameter, gradient in zip(mlp.parameters(), expected[2:], strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, 1 + gradient)


def test_frozen_layers_pass_on_the_same_gradient():
    expected, mlp = run(module_of("MLP", CACHED)), module_of("MLP", CACHED).requires_grad_(False)
    found = run(mlp)
    assert len(found) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False))


@pytest.mark.one_case
@every_module
@every_recipe
def test_observers_see_the_operands_of_each_layer(name: str, recipe: Recipe, separate: Callable[[], None]):
    def seen() -> tuple[list[Tensor], list[tuple[str, Tensor]]]:
        module = module_of(name, recipe)
        operands: dict[tuple[int, str], ObservedGemm] = {}
        weights: list[tuple[str, Tensor]] = []

        def see(weight: Tensor, fprop: ObservedGemm) -> Callable[[ObservedGemm], None]:
            number = next(i for i, p in enumerate(module.parameters()) if p is weight)
            operands[number, "fprop"] = fprop
            return lambda gemm: operands.__setitem__((number, gemm.name), gemm)

        def see_weight(operand: str, q: ScaledTensor) -> None:
            weights.extend([(operand, q.dequantize())] if operand == "w" else [])

        with observe_gemms(see), observe_quantization(see_weight):
            run(module)
        gemms = [gemm for _, gemm in sorted(operands.items(), key=lambda item: item[0])]
        return [t for g in gemms for t in (g.before, g.a.dequantize(), g.b.dequantize())], weights

    joined, joined_weights = seen()
    separate()
    alone, weights = seen()
    for found, expected in zip(joined, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for (found_name, found), (expected_name, expected) in zip(joined_weights, weights, strict=True):
        assert found_name == expected_name
        assert torch.equal(found, expected)


def test_a_write_to_one_of_joined_weights_is_noticed():
    mlp = module_of("MLP", CACHED)
    torch.optim.SGD(mlp.parameters(), lr=0.0).step()  # from now on weights are cached
    x = torch.randn(4, D)
    before = mlp(x)
    assert torch.equal(mlp(x), before)
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    expected = module_of("MLP", CACHED)
    expected.load_state_dict(mlp.state_dict())
    assert torch.equal(mlp(x), expected(x))
    assert not torch.equal(mlp(x), before)


def test_joined_weights_are_quantized_once_a_step(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return quantize_joined(*args)

    quantize_joined = fused_layers.quantize_joined_weights.__globals__["quantize_joined"]
    monkeypatch.setattr("octile.nn.fused.quantize.quantize_joined", counted)
    mlp = module_of("MLP", CACHED)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.step()
        calls.clear()
        for _ in range(2):
            mlp(torch.randn(4, D, requires_grad=True)).sum().backward()
        assert len(calls) == 1


def test_a_quantized_part_is_the_weight_quantized_alone():
    weights = [torch.randn(256, D), torch.randn(70, D)]
    s = settings(CACHED, torch.float32, weights)
    layers = FusedLayers(weights, (False, False), s, 2)
    (joined,) = layers.quantize(weights)
    of_w = s.formats.w
    for (_, part), weight in zip(layers._parts(0, joined.w), weights, strict=True):
        alone = quantize(weight, of_w.block, of_w.fmt, of_w.scale)
        assert torch.equal(part.data.view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(part.scale, alone.scale)


@pytest.mark.parametrize("modes", [(True, False), (True, True), (False, True)], ids=["data", "both", "transposed"])
@pytest.mark.parametrize("gathers", [False, True], ids=["weights", "gathered weights"])
def test_stacked_weights_are_joined_expert_by_expert(modes: tuple[bool, bool], gathers: bool):
    with_data, with_transposed = modes
    stacks, w_format, dy = [torch.randn(3, 128, D), torch.randn(3, 70, D)], CACHED.formats.w, torch.empty(0)
    parts = [quantize(stack, w_format.block, w_format.fmt, w_format.scale) for stack in stacks]
    if gathers:
        stacks[0] = GatheredWeight(parts[0].data, parts[0].scale, torch.float32)
    data, scale, data_t = _quantize_joined(stacks, w_format, with_data, with_transposed, dy)
    for e in range(3):
        expected = torch.cat([part.data[e].view(torch.uint8) for part in parts])
        assert torch.equal(data[e].view(torch.uint8) if with_data else expected, expected)
        assert torch.equal(data_t[e].view(torch.uint8) if with_transposed else expected.mT, expected.mT)
        assert torch.equal(scale[e], torch.cat([part.scale[e] for part in parts]))


def test_stacked_weights_that_are_joined_are_quantized_at_their_first_use():
    stacks = [torch.randn(3, 128, D, requires_grad=True) for _ in range(2)]
    quantize_requested([WeightRequest(tuple(stacks), CACHED.formats.w, False)])
    assert all(stack.untyped_storage() not in weight_cache._cache for stack in stacks)
