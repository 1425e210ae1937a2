"""Tests of Recipe.without: one GEMM in BF16, the others unchanged."""

import pytest
import torch

from octile.nn.functional import grouped_linear, linear
from octile.recipe import GEMMS, Recipe

T, K, N = 40, 72, 24
COUNTS = [16, 0, 20]  # four rows are left over
QUANTIZED_RECIPES = ["deepseek_v3", "per_tensor", "hybrid_e5m2", "mxfp8", "int8_tiles"]


def results(recipe: Recipe, experts: bool, main_grad: bool = False) -> dict[str, torch.Tensor]:
    """The result of each GEMM under a recipe."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator).requires_grad_()
    shape = (len(COUNTS), N, K) if experts else (N, K)
    w = torch.randn(shape, generator=generator).requires_grad_()
    dy = torch.randn(T, N, generator=generator)
    if main_grad:
        w.main_grad = torch.ones(shape)
    if experts:
        y = grouped_linear(x, w, torch.tensor(COUNTS, dtype=torch.int32).cumsum(0).to(torch.int32), recipe)
    else:
        y = linear(x, w, None, recipe)
    y.backward(dy)
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": w.main_grad if main_grad else w.grad}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("product", GEMMS)
@pytest.mark.parametrize("name", QUANTIZED_RECIPES)
def test_only_that_gemm_changes_and_equals_bf16(name, product, experts):
    recipe = Recipe.named(name)
    found = results(recipe.without(product), experts)
    for other in GEMMS:
        expected = results(Recipe.bf16() if other == product else recipe, experts)[other]
        assert torch.equal(found[other], expected), other
    assert not torch.equal(found[product], results(recipe, experts)[product])


def test_without_all_three_gemms_it_equals_bf16():
    recipe = Recipe.deepseek_v3()
    for product in GEMMS:
        recipe = recipe.without(product)
    found, expected = results(recipe, False), results(Recipe.bf16(), False)
    assert all(torch.equal(found[product], expected[product]) for product in GEMMS)


@pytest.mark.parametrize("experts", [False, True])
def test_main_grad_is_accumulated(experts):
    recipe = Recipe.deepseek_v3().without("wgrad")
    assert torch.equal(results(recipe, experts, main_grad=True)["wgrad"], 1 + results(recipe, experts)["wgrad"])


def test_the_name_lists_the_exceptions():
    assert Recipe.deepseek_v3().without("wgrad").name == "deepseek_v3 without wgrad"


def test_leaving_out_a_gemm_twice_equals_once():
    once = Recipe.deepseek_v3().without("wgrad")
    assert once.without("wgrad") == once


def test_an_unknown_gemm_is_refused():
    with pytest.raises(ValueError, match="gemm must be one of fprop, dgrad, wgrad, not 'backward'"):
        Recipe.deepseek_v3().without("backward")


def test_a_recipe_without_quantization_is_refused():
    with pytest.raises(ValueError, match="recipe 'bf16' quantizes nothing"):
        Recipe.bf16().without("wgrad")
