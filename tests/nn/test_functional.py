"""Tests of linear and grouped_linear: they equal a slow definition that quantizes by the recipe and multiplies in FP64.

fprop, dgrad and wgrad must be within the bound of FP32 summation of the exact products of those operands, see
tests/ops/test_matmul.py: |error| ≤ (K + 2) · 2⁻²⁴ · Σ|a||b|. Shapes: T tokens, K inputs, N outputs, G experts.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.formats import E4M3, E5M2, INT8, UE8M0, FloatFormat, IntFormat
from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.functional import grouped_linear, linear
from octile.nn.observer import observe_gemms, observe_quantization
from octile.recipe import TENSOR, TILE, OperandFormat, Recipe, ScaleRule
from octile.scaled import ScaledTensor, quantize

T, K, N = 140, 200, 150  # no multiples of 128
COUNTS = [60, 0, 50, 20]  # rows of the experts; ten are left over
QUANTIZED_RECIPES = [name for name in Recipe.names() if Recipe.named(name).formats is not None]
HIGH_PRECISION_RECIPES = [name for name in Recipe.names() if Recipe.named(name).formats is None]

every_recipe = pytest.mark.parametrize("name", Recipe.names())
every_quantized_recipe = pytest.mark.parametrize("name", QUANTIZED_RECIPES)
every_tiled_recipe = pytest.mark.parametrize(
    "name", ["deepseek_v3", "hybrid_e5m2", "int8_tiles", "wgrad_x_blocks", "mxfp8"]
)
every_dtype = pytest.mark.parametrize("name", HIGH_PRECISION_RECIPES)

some_counts = st.lists(st.integers(0, 150), min_size=1, max_size=5).filter(any)  # rows of experts

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # x, w; w, dy of dgrad; x, dy of wgrad
Format = FloatFormat | IntFormat


@pytest.fixture
def x() -> Tensor:
    """[T, K] with an outlier channel and an outlier token, so that every tile has a scale of its own."""
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 300
    x[11] *= 50
    return x.requires_grad_()


@pytest.fixture
def w() -> Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(1)) / 8).requires_grad_()


@pytest.fixture
def w_GNK() -> Tensor:
    return (torch.randn(len(COUNTS), N, K, generator=torch.Generator().manual_seed(2)) / 8).requires_grad_()


@pytest.fixture
def dy() -> Tensor:
    return torch.randn(T, N, generator=torch.Generator().manual_seed(3)) * 1e-2


@pytest.fixture
def offs() -> Tensor:
    return torch.tensor(COUNTS, dtype=torch.int32).cumsum(0).to(torch.int32)


# The slow definition


def tiles(
    forward: Format, backward: Format, wgrad_x_block: tuple[int, int] = (128, 1)
) -> Callable[[Tensor, Tensor, Tensor], Operands]:
    """mission.md §4: 1×128 tiles of x and dy, 128×128 blocks of w; wgrad's operands in tiles along the tokens."""

    def operands(x: Tensor, w: Tensor, dy: Tensor) -> Operands:
        kept_x = quantize(x, (1, 128), forward, "power_of_2").dequantize()
        w = quantize(w, (128, 128), forward).dequantize()
        return (
            kept_x,
            w,
            w,
            quantize(dy, (1, 128), backward).dequantize(),
            quantize(kept_x, wgrad_x_block, forward, "power_of_2").dequantize(),
            quantize(dy, (128, 1), backward).dequantize(),
        )

    return operands


def tensors(
    forward: Format, backward: Format, scale: ScaleRule = "float32"
) -> Callable[[Tensor, Tensor, Tensor], Operands]:
    """One scale for each matrix; wgrad uses the same data as fprop and dgrad."""

    def operands(x: Tensor, w: Tensor, dy: Tensor) -> Operands:
        x, w = (quantize(t, (None, None), forward, scale).dequantize() for t in (x, w))
        dy = quantize(dy, (None, None), backward, scale).dequantize()
        return x, w, w, dy, x, dy

    return operands


def delayed(backward: Format) -> Callable[[Tensor, Tensor, Tensor], Operands]:
    """One scale for the weights of all experts, computed from them since there is no history yet."""

    def operands(x: Tensor, w: Tensor, dy: Tensor) -> Operands:
        tensors = ((x, E4M3), (w, E4M3), (dy, backward))
        x, w, dy = (quantize(t.reshape(1, -1), (None, None), fmt).dequantize().view_as(t) for t, fmt in tensors)
        return x, w, w, dy, x, dy

    return operands


def quantize_unscaled(x: Tensor, w: Tensor, dy: Tensor) -> Operands:
    x, w, dy = E4M3.round(x), E4M3.round(w), E5M2.round(dy)
    return x, w, w, dy, x, dy


def mxfp8(x: Tensor, w: Tensor, dy: Tensor) -> Operands:
    """Each operand from the original, in 32 values along the dimension that the GEMM sums over."""

    def along(rows: int, columns: int, t: Tensor) -> Tensor:
        return quantize(t, (rows, columns), E4M3, "power_of_2").dequantize()

    return along(1, 32, x), along(1, 32, w), along(32, 1, w), along(1, 32, dy), along(32, 1, x), along(32, 1, dy)


SLOW = {
    "deepseek_v3": tiles(E4M3, E4M3),
    "hybrid_e5m2": tiles(E4M3, E5M2),
    "int8_tiles": tiles(INT8, INT8),
    "wgrad_x_blocks": tiles(E4M3, E4M3, (128, 128)),
    "exact": tiles(E4M3, E4M3),
    "per_tensor": tensors(E4M3, E4M3),
    "fp8_lm": tensors(E4M3, E5M2, "power_of_2"),
    "global_scale": quantize_unscaled,
    "delayed": delayed(E4M3),
    "hybrid_delayed": delayed(E5M2),
    "mxfp8": mxfp8,
    "smooth_swiglu": delayed(E4M3),  # what it smooths belongs to SwiGLU
}


def history_of(recipe: Recipe) -> AmaxHistory | None:
    return AmaxHistory(recipe.formats.window) if recipe.has_delayed_scaling else None


def assert_gemm(found: Tensor, a: Tensor, b: Tensor) -> None:
    """Check that found = a · b up to the error of FP32 summation."""
    a, b = a.detach().double(), b.detach().double()
    bound = (a.shape[-1] + 2) * 2.0**-24 * (a.abs() @ b.abs()) * (1 + 1e-4)
    assert ((found.double() - a @ b).abs() <= bound).all()


def test_every_quantized_recipe_has_a_slow_definition():
    assert set(SLOW) == set(QUANTIZED_RECIPES)


@every_quantized_recipe
def test_fprop_equals_the_slow_definition(name, x, w, dy):
    recipe = Recipe.named(name)
    slow_x, slow_w, *_ = SLOW[name](x, w, dy)
    assert_gemm(linear(x, w, None, recipe, history_of(recipe)), slow_x, slow_w.T)


@every_quantized_recipe
def test_dgrad_equals_the_slow_definition(name, x, w, dy):
    recipe = Recipe.named(name)
    linear(x, w, None, recipe, history_of(recipe)).backward(dy)
    _, _, slow_w, slow_dy, *_ = SLOW[name](x, w, dy)
    assert_gemm(x.grad, slow_dy, slow_w)


@every_quantized_recipe
def test_wgrad_equals_the_slow_definition(name, x, w, dy):
    recipe = Recipe.named(name)
    linear(x, w, None, recipe, history_of(recipe)).backward(dy)
    *_, slow_x, slow_dy = SLOW[name](x, w, dy)
    assert_gemm(w.grad, slow_dy.T, slow_x)


@every_dtype
def test_gemms_without_quantization_cast_their_operands_and_sum_in_float32(name, x, w, dy):
    y = linear(x, w, None, Recipe.named(name))
    y.backward(dy)
    x_c, w_c, dy_c = (t.detach().to(Recipe.named(name).compute).float() for t in (x, w, dy))
    assert torch.equal(y, x_c @ w_c.T)
    assert torch.equal(x.grad, dy_c @ w_c)
    assert torch.equal(w.grad, dy_c.T @ x_c)


def test_no_recipe_equals_torchs_linear(x, w):
    bias = torch.randn(N)
    assert torch.equal(linear(x, w, bias), torch.nn.functional.linear(x, w, bias))


@every_recipe
def test_the_bias_is_added_after_the_gemm(name, x, w):
    recipe, bias = Recipe.named(name), torch.randn(N)
    y = linear(x, w, None, recipe, history_of(recipe))
    assert torch.equal(linear(x, w, bias, recipe, history_of(recipe)), y + bias)


# Experts: a tile along the tokens holds tokens of one expert


def parts(t: Tensor) -> list[Tensor]:
    """The rows of each expert."""
    return list(t[: sum(COUNTS)].split(COUNTS))


@every_quantized_recipe
def test_fprop_of_experts_equals_the_slow_definition(name, x, w_GNK, dy, offs):
    recipe = Recipe.named(name)
    slow_x, slow_w, *_ = SLOW[name](x, w_GNK, dy)
    y = grouped_linear(x, w_GNK, offs, recipe, history_of(recipe))
    for y_g, x_g, w_g in zip(parts(y), parts(slow_x), slow_w, strict=True):
        assert_gemm(y_g, x_g, w_g.T)


@every_quantized_recipe
def test_dgrad_of_experts_equals_the_slow_definition(name, x, w_GNK, dy, offs):
    recipe = Recipe.named(name)
    grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).backward(dy)
    _, _, slow_w, slow_dy, *_ = SLOW[name](x, w_GNK, dy)
    for dx_g, dy_g, w_g in zip(parts(x.grad), parts(slow_dy), slow_w, strict=True):
        assert_gemm(dx_g, dy_g, w_g)


@every_quantized_recipe
def test_wgrad_of_experts_equals_the_slow_definition(name, x, w_GNK, dy, offs):
    recipe = Recipe.named(name)
    grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).backward(dy)
    if recipe.formats.wgrad_x.block != TENSOR:
        operands = [SLOW[name](*own)[4:] for own in zip(parts(x), w_GNK, parts(dy), strict=True)]
    else:
        *_, slow_x, slow_dy = SLOW[name](x, w_GNK, dy)  # one scale for the tokens of all experts
        operands = zip(parts(slow_x), parts(slow_dy), strict=True)
    for dw_g, (x_g, dy_g) in zip(w_GNK.grad, operands, strict=True):
        assert_gemm(dw_g, dy_g.T, x_g)


def wgrad_of_experts(name: str, x: Tensor, dy: Tensor, counts: list[int]) -> Tensor:
    w = torch.zeros(len(counts), dy.shape[1], x.shape[1], requires_grad=True)
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    grouped_linear(x, w, offs, Recipe.named(name)).backward(dy)
    return w.grad


def tokens(counts: list[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    return torch.randn(sum(counts), 24, generator=generator), torch.randn(sum(counts), 40, generator=generator)


@pytest.mark.one_case
@every_tiled_recipe
@given(
    counts=some_counts,
    spoiled=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    value=st.sampled_from([1e4, -1e30, float("inf"), float("nan")]),
    of_dy=st.booleans(),
)
def test_no_value_of_an_expert_changes_another_experts_gradient(name, counts, spoiled, value, of_dy):
    x, dy = tokens(counts)
    expected = wgrad_of_experts(name, x, dy, counts)
    t = dy if of_dy else x
    row, column = spoiled[0] % len(t), spoiled[1] % t.shape[1]
    t[row, column] = value
    found = wgrad_of_experts(name, x, dy, counts)
    expert = next(g for g in range(len(counts)) if row < sum(counts[: g + 1]))
    others = torch.arange(len(counts)) != expert
    assert torch.equal(found[others], expected[others])
    assert not torch.equal(found[expert], expected[expert])  # a NaN in it is unequal to itself, too


@pytest.mark.slow
@every_tiled_recipe
@given(counts=some_counts)
def test_the_gradient_of_an_expert_is_that_of_the_expert_alone(name, counts):
    x, dy = tokens(counts)
    found, first = wgrad_of_experts(name, x, dy, counts), 0
    for g, count in enumerate(counts):
        own = slice(first, first := first + count)
        assert torch.equal(found[g], wgrad_of_experts(name, x[own], dy[own], [count])[0])


def test_an_outlier_takes_no_precision_from_another_expert():
    counts, (x, dy) = [100, 100], tokens([100, 100])
    x[:100] *= 1e4
    exact = dy[100:].double().T @ x[100:].double()
    found = wgrad_of_experts("deepseek_v3", x, dy, counts)[1]
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_blocks_over_two_tiles_are_refused_for_experts(x, w_GNK, dy, offs):
    recipe = Recipe.deepseek_v3()
    of_x = replace(recipe.formats.wgrad_x, block=(256, 1))
    recipe = replace(recipe, formats=replace(recipe.formats, wgrad_x=of_x))
    y = grouped_linear(x, w_GNK, offs, recipe)
    with pytest.raises(ValueError, match="blocks of wgrad's operands must have rows that divide 128 for experts, not"):
        y.backward(dy)


@every_recipe
def test_rows_past_the_last_expert_are_zero_in_both_passes(name, x, w_GNK, dy, offs):
    recipe = Recipe.named(name)
    y = grouped_linear(x, w_GNK, offs, recipe, history_of(recipe))
    y.backward(dy)
    assert not y[sum(COUNTS) :].any()
    assert not x.grad[sum(COUNTS) :].any()


@every_recipe
def test_experts_without_rows_have_a_gradient_of_zero(name, x, w_GNK, dy, offs):
    recipe = Recipe.named(name)
    grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).backward(dy)
    assert not w_GNK.grad[1].any()


@every_recipe
def test_no_rows_at_all_are_no_error(name, w_GNK):
    recipe, x = Recipe.named(name), torch.zeros(0, K, requires_grad=True)
    offs = torch.zeros(len(COUNTS), dtype=torch.int32)
    grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).sum().backward()
    assert not w_GNK.grad.any()


# What is quantized, and how


def quantized_operands(name: str, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, ScaledTensor]:
    seen: dict[str, ScaledTensor] = {}
    recipe = Recipe.named(name)
    with observe_quantization(seen.__setitem__):
        linear(x, w, None, recipe, history_of(recipe)).backward(dy)
    return seen


def is_power_of_2(t: Tensor) -> bool:
    return bool((t.frexp().mantissa == 0.5).all())


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("deepseek_v3", E4M3, E4M3), ("hybrid_e5m2", E4M3, E5M2), ("int8_tiles", INT8, INT8)],
)
def test_fine_grained_recipes_tile_every_operand(name, forward, backward, x, w, dy):
    seen = quantized_operands(name, x, w, dy)
    assert {operand: (q.fmt, q.block, is_power_of_2(q.scale)) for operand, q in seen.items()} == {
        "x": (forward, (1, 128), True),
        "w": (forward, (128, 128), False),
        "dy": (backward, (1, 128), False),
        "wgrad_x": (forward, (128, 1), True),
        "wgrad_dy": (backward, (128, 1), False),
    }


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("per_tensor", E4M3),
        ("delayed", E4M3),
        ("hybrid_delayed", E5M2),
        ("smooth_swiglu", E4M3),
        ("fp8_lm", E5M2),
        ("global_scale", E5M2),
    ],
)
def test_per_tensor_recipes_quantize_every_operand_once(name, backward, x, w, dy):
    seen = quantized_operands(name, x, w, dy)
    assert {operand: (q.fmt, q.scale.numel()) for operand, q in seen.items()} == {
        "x": (E4M3, 1),
        "w": (E4M3, 1),
        "dy": (backward, 1),
    }


def test_mxfp8_has_32_values_and_a_power_of_2_in_a_block(x, w, dy):
    seen = quantized_operands("mxfp8", x, w, dy)
    assert {operand: (q.fmt, q.block, is_power_of_2(q.scale)) for operand, q in seen.items()} == {
        "x": (E4M3, (1, 32), True),
        "w": (E4M3, (1, 32), True),
        "dy": (E4M3, (1, 32), True),
        "wgrad_x": (E4M3, (32, 1), True),
        "wgrad_dy": (E4M3, (32, 1), True),
    }


@given(st.integers(0, 2**31), st.integers(-100, 100))
def test_mxfp8s_scales_are_the_smallest_powers_of_2_that_let_no_value_saturate(seed, exponent):
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    scale = quantized_operands("mxfp8", x.requires_grad_(), torch.ones(2, 96), torch.zeros(3, 2))["x"].scale
    assert torch.equal(UE8M0.round(scale), scale)
    scale, amax = scale.double(), x.double().unflatten(1, (3, 32)).abs().amax(-1)
    assert (amax <= 448 * scale).all()
    assert (amax > 448 * scale / 2).all()


def test_the_gradient_is_quantized_only_for_the_gemms_that_run(x, w, dy):
    assert quantized_operands("deepseek_v3", x.detach(), w, dy).keys() == {"x", "w", "wgrad_x", "wgrad_dy"}
    assert quantized_operands("deepseek_v3", x, w.detach(), dy).keys() == {"x", "w", "dy"}


def test_the_global_scale_recipe_has_no_scale_of_its_own(x, w, dy):
    assert [q.scale.item() for q in quantized_operands("global_scale", x, w, dy).values()] == [1, 1, 1]


@every_dtype
def test_high_precision_recipes_quantize_nothing(name, x, w, dy):
    assert quantized_operands(name, x, w, dy) == {}


def test_an_observer_sees_nothing_outside_of_its_context(x, w):
    seen: dict[str, ScaledTensor] = {}
    with observe_quantization(seen.__setitem__):
        pass
    linear(x, w, None, Recipe.deepseek_v3())
    assert seen == {}


# NaN, Inf and overflow


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_and_inf_in_x_are_not_finite_in_y(name, number, x, w):
    x.data[3, 5] = number
    recipe = Recipe.named(name)
    history = history_of(recipe)
    if history is not None:  # a past that would make the scale finite
        linear(torch.ones(T, K), w, None, recipe, history)
        history.end_step()
    assert not linear(x, w, None, recipe, history)[3].isfinite().any()


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_and_inf_in_dy_are_not_finite_in_both_gradients(name, number, x, w, dy):
    dy[3, 5] = number
    recipe = Recipe.named(name)
    linear(x, w, None, recipe, history_of(recipe)).backward(dy)
    assert not x.grad[3].isfinite().any()
    assert not w.grad[5].isfinite().any()


def test_a_gradient_too_large_for_e5m2_is_seen_by_the_loss_scale(x, w, dy):
    linear(x, w, None, Recipe.global_scale()).backward(dy * 1e9)
    assert not w.grad.isfinite().any()


def test_an_activation_too_large_for_e4m3_saturates_without_a_scale(w):
    x = torch.full((1, K), 1e6)
    assert_gemm(linear(x, w, None, Recipe.global_scale()), torch.full((1, K), 448.0), E4M3.round(w).T)


# dtypes and autocast


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_and_the_gradient_have_the_inputs_dtype(name, dtype, x, w, dy):
    recipe, x = Recipe.named(name), (x / 300).to(dtype).detach().requires_grad_()
    y = linear(x, w, None, recipe, history_of(recipe))
    y.backward(dy.to(dtype))
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (dtype, dtype, torch.float32)


def test_a_bf16_input_gives_the_fp32_result_rounded(x, w):
    x = x.bfloat16()
    recipe = Recipe.deepseek_v3()
    assert torch.equal(linear(x, w, None, recipe), linear(x.float(), w, None, recipe).bfloat16())


@every_recipe
def test_autocast_rounds_the_result_and_nothing_else(name, x, w):
    recipe = Recipe.named(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, None, recipe, history_of(recipe))
    assert torch.equal(y, linear(x, w, None, recipe, history_of(recipe)).bfloat16())


@every_recipe
def test_autocast_rounds_the_experts_result_and_nothing_else(name, x, w_GNK, offs):
    recipe = Recipe.named(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, w_GNK, offs, recipe, history_of(recipe))
    assert torch.equal(y, grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).bfloat16())


@every_recipe
def test_a_backward_pass_under_autocast_computes_the_same(name, x, w, dy):
    recipe, grads = Recipe.named(name), []
    for enabled in (False, True):
        x.grad = w.grad = None
        y = linear(x, w, None, recipe, history_of(recipe))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.backward(dy)
        grads.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# Gradients that are accumulated in main_grad


@every_recipe
def test_main_grad_accumulates_the_gradient_instead_of_grad(name, x, w, dy):
    recipe = Recipe.named(name)
    linear(x, w, None, recipe, history_of(recipe)).backward(dy)
    expected, w.grad = w.grad, None
    w.main_grad = torch.ones(N, K)
    linear(x, w, None, recipe, history_of(recipe)).backward(dy)
    assert w.grad is None
    assert torch.equal(w.main_grad, 1 + expected)


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_main_grad_of_experts_accumulates_the_gradient_instead_of_grad(name, transposed, x, w_GNK, dy, offs):
    recipe = Recipe.named(name)
    grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).backward(dy)
    expected, w_GNK.grad = w_GNK.grad, None
    w_GNK.main_grad = torch.ones(len(COUNTS), K, N).mT if transposed else torch.ones_like(w_GNK)
    grouped_linear(x, w_GNK, offs, recipe, history_of(recipe)).backward(dy)
    assert w_GNK.grad is None
    assert torch.equal(w_GNK.main_grad, 1 + expected)


# Refusals


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


@pytest.mark.parametrize(
    ("x", "weight", "error", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(2, 5), ValueError, r"x \[4, 3\] must end in the K = 5 of weight \[2, 5\]"),
        (torch.tensor(1.0), torch.zeros(2, 5), ValueError, r"x \[\] must end in the K = 5 of weight"),
        (torch.zeros(4, 5), torch.zeros(5), ValueError, r"weight must have 2 dimensions, not the shape \[5\]"),
        (torch.zeros(4, 5).double(), torch.zeros(2, 5), TypeError, r"x must be float32, .* not torch\.float64"),
        (torch.zeros(4, 5), torch.zeros(2, 5).int(), TypeError, r"weight must be float32, .* not torch\.int32"),
        (torch.zeros(4, 5), meta(2, 5), ValueError, "x is on cpu but weight on meta"),
        ([0.0] * 5, torch.zeros(2, 5), TypeError, "x must be a tensor, not list"),
    ],
    ids=["K", "0-D", "1-D weight", "dtype of x", "dtype of weight", "device", "list"],
)
@pytest.mark.parametrize("recipe", [Recipe.deepseek_v3(), Recipe.bf16()], ids=lambda recipe: recipe.name)
def test_operands_that_do_not_fit_are_refused(recipe, x, weight, error, message):
    with pytest.raises(error, match=message):
        linear(x, weight, None, recipe)


@pytest.mark.parametrize("function", [linear, grouped_linear])
def test_the_name_of_a_recipe_is_refused_with_the_call_that_makes_it(function, x, w, w_GNK, offs):
    operands = (x, w, None) if function is linear else (x, w_GNK, offs)
    with pytest.raises(TypeError, match=r"recipe must be an octile\.Recipe, not str: see Recipe\.named\('mxfp8'\)"):
        function(*operands, "mxfp8")


def test_a_bias_of_another_length_is_refused(x, w):
    with pytest.raises(ValueError, match=r"bias must be \[150\], not \[1\]"):
        linear(x, w, torch.zeros(1), Recipe.deepseek_v3())


def test_a_main_grad_of_another_shape_is_refused_before_the_forward_pass(x, w):
    w.main_grad = torch.zeros(K, N)
    with pytest.raises(ValueError, match=r"weight\.main_grad must be \[150, 200\] as weight, not \[200, 150\]"):
        linear(x, w, None, Recipe.deepseek_v3())


def test_a_main_grad_is_float32(x, w):
    w.main_grad = torch.zeros(N, K, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"weight\.main_grad must be float32, not torch\.bfloat16"):
        linear(x, w, None, Recipe.deepseek_v3())


def test_a_main_grad_is_on_the_device_of_its_weight(x, w):
    w.main_grad = meta(N, K)
    with pytest.raises(ValueError, match=r"weight is on cpu but weight\.main_grad on meta"):
        linear(x, w, None, Recipe.deepseek_v3())


def test_delayed_scaling_needs_a_history(x, w):
    with pytest.raises(ValueError, match="recipe 'delayed' has delayed scaling and needs a history"):
        linear(x, w, None, Recipe.delayed())


@pytest.mark.parametrize("recipe", [None, Recipe.deepseek_v3()], ids=["no recipe", "deepseek_v3"])
def test_rows_of_experts_are_a_matrix(recipe, w_GNK, offs):
    with pytest.raises(ValueError, match=r"x must be \[T, K\], not \[2, 3, 200\]"):
        grouped_linear(torch.zeros(2, 3, K), w_GNK, offs, recipe)


@pytest.mark.parametrize("recipe", [None, Recipe.deepseek_v3()], ids=["no recipe", "deepseek_v3"])
def test_offsets_of_experts_are_int32(recipe, x, w_GNK, offs):
    with pytest.raises(TypeError, match=r"offs must be int32, not torch\.int64"):
        grouped_linear(x, w_GNK, offs.long(), recipe)


def test_offsets_of_experts_are_a_tensor(x, w_GNK, offs):
    with pytest.raises(TypeError, match="offs must be a tensor, not list"):
        grouped_linear(x, w_GNK, offs.tolist(), Recipe.deepseek_v3())


def test_a_second_derivative_is_refused(x, w):
    y = linear(x, w, None, Recipe.deepseek_v3()).square().sum()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


def weight_operands(block, x, w, dy):
    """The weight as fprop and as dgrad read it, with such blocks."""
    formats = Recipe.deepseek_v3().formats
    recipe = replace(Recipe.deepseek_v3(), formats=replace(formats, w=OperandFormat(block=block)))
    operands = {}

    def observer(weight, fprop):
        operands["fprop"] = fprop.b
        return lambda product: operands.update({product.name: product.b})

    with observe_gemms(observer):
        linear(x, w, recipe=recipe).backward(dy)
    return operands


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (128, 1)])
def test_dgrad_reads_weights_in_blocks_of_several_rows_as_fprop_does(block, x, w, dy):
    operands = weight_operands(block, x, w, dy)
    assert operands["dgrad"].block == block[::-1]
    assert torch.equal(operands["dgrad"].dequantize().mT, operands["fprop"].dequantize())


def test_weights_in_tiles_are_quantized_along_the_k_of_each_gemm(x, w, dy):
    operands = weight_operands(TILE, x, w, dy)
    for name, expected in (("fprop", w), ("dgrad", w.mT)):
        tiles = quantize(expected.detach(), TILE, E4M3, "float32")
        assert operands[name].block == TILE
        assert torch.equal(operands[name].dequantize(), tiles.dequantize())
