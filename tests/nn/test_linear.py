"""Tests of octile.nn.Linear as a module: what it saves, how often it quantizes, and everything that nn.Linear can do.

The values of each GEMM are checked in test_functional.py.
"""

import copy
import inspect
import io
import pickle
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from octile.nn.conversion import convert
from octile.nn.delayed_scaling import end_step
from octile.nn.linear import Linear
from octile.nn.mlp import MLP
from octile.recipe import Recipe

T, K, N = 140, 200, 150  # tokens, inputs and outputs: no multiples of 128
QUANTIZED_RECIPES = [name for name in Recipe.names() if Recipe.named(name).formats is not None]

OF_ANY_MODULE = [name for name in Recipe.names() if not Recipe.named(name).batch_invariant]  # not of whole models alone

every_recipe = pytest.mark.parametrize("name", Recipe.names())
every_quantized_recipe = pytest.mark.parametrize("name", QUANTIZED_RECIPES)
some_recipes = pytest.mark.parametrize("name", ["deepseek_v3", "delayed", "bf16"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(T, K, requires_grad=True)


def layer_of(name: str, bias: bool = True, dtype: torch.dtype = torch.float32) -> Linear:
    return Linear(K, N, bias, dtype=dtype, recipe=Recipe.named(name))


def gradients(layer: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """The output and the gradients of one forward and backward pass, from the input's to the last parameter's."""
    layer.zero_grad()
    y = (call or layer)(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    (dx, x.grad) = (x.grad, None)
    return [y.detach(), dx, *(p.grad.clone() for p in layer.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


# Recipes differ


def numbers(name: str) -> list[Tensor]:
    """The output and gradients of a SwiGLU layer in its second step, after one with a smaller input."""
    torch.manual_seed(0)
    model = MLP(K, N)
    x = torch.randn(T, K)
    x[:, 7] *= 20
    convert(model, Recipe.named(name))
    model(x * 0.9).sum().backward()
    end_step(model)
    return gradients(model, x.requires_grad_())


@pytest.fixture(scope="module")
def values_of_all_recipes() -> dict[str, list[Tensor]]:
    return {name: numbers(name) for name in OF_ANY_MODULE}


@pytest.mark.parametrize("pair", list(combinations(OF_ANY_MODULE, 2)), ids="-".join)
def test_two_recipes_compute_different_gradients(values_of_all_recipes, pair):
    one, other = (values_of_all_recipes[name] for name in pair)
    first = 2 if set(pair) == {"deepseek_v3", "wgrad_x_blocks"} else 1  # these differ in the weights' gradients alone
    assert not torch.equal(one[first], other[first])


@pytest.mark.parametrize("name", OF_ANY_MODULE)
def test_every_recipe_approximates_the_same_layer(values_of_all_recipes, name):
    exact, found = values_of_all_recipes["float32"][0], values_of_all_recipes[name][0]
    assert (found - exact).norm() / exact.norm() < 0.15


# What is saved for backward


def saved_tensors(layer: Linear, x: Tensor) -> list[Tensor]:
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    return saved


@every_quantized_recipe
def test_the_input_is_saved_in_8_bits_and_no_more(name, x):
    saved = saved_tensors(layer_of(name), x.detach())  # without dgrad, so without the weight
    values = 32 if name == "mxfp8" else 128  # that share a scale, at least
    assert x.numel() <= sum(t.nbytes for t in saved) <= x.numel() * (1 + 2 * 4 / values)


@every_quantized_recipe
def test_no_float_tensor_of_the_inputs_size_is_saved(name, x):
    assert [t.dtype for t in saved_tensors(layer_of(name), x) if t.numel() == x.numel() and t.itemsize > 1] == []


@every_quantized_recipe
def test_the_original_input_is_freed(name, x):
    h = x * 2
    y = layer_of(name)(h)
    reference = weakref.ref(h)
    del h
    assert reference() is None
    assert y.requires_grad


def test_without_gradients_nothing_is_saved(x):
    with torch.no_grad():
        assert saved_tensors(layer_of("deepseek_v3"), x) == []


@every_recipe
def test_a_frozen_weight_needs_no_input(name, x):
    layer = layer_of(name).requires_grad_(False)
    assert [t for t in saved_tensors(layer, x) if t.numel() == x.numel()] == []


# How often weights are quantized


class WeightQuantizations(TorchDispatchMode):
    """Counts how often a matrix of the weight's shape is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.octile.quantize.default, torch.ops.octile.quantize_with_scale.default):
            self.count += args[0].shape == (N, K)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def quantizations() -> Iterator[WeightQuantizations]:
    with WeightQuantizations() as mode:
        yield mode


def stepped(layer: Linear) -> Linear:
    """Return the layer after an optimizer step that changes nothing: an optimizer holds its weight from now on."""
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    return layer


def test_before_the_first_step_each_forward_pass_quantizes(x, quantizations):
    layer = layer_of("deepseek_v3")
    for _ in range(3):
        layer(x).sum().backward()  # the backward pass uses what its forward pass made
    assert quantizations.count == 3


@pytest.mark.parametrize("name", [n for n in QUANTIZED_RECIPES if not Recipe.named(n).has_delayed_scaling])
def test_micro_batches_and_both_passes_share_one_quantized_weight(name, x, quantizations):
    layer = stepped(layer_of(name))
    for _ in range(3):
        layer(x).sum().backward()
    assert quantizations.count == 1


def test_an_optimizer_step_makes_the_layer_quantize_again(x, quantizations):
    layer = layer_of("deepseek_v3")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(x).sum().backward()
        optimizer.step()
    layer(x)
    assert quantizations.count == 3


def test_recomputing_does_not_quantize_again(x, quantizations):
    checkpoint(stepped(layer_of("deepseek_v3")), x, use_reentrant=False).sum().backward()
    assert quantizations.count == 1


# Gradients of parameters


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_parameters_dtype(name, dtype, x):
    layer = layer_of(name, dtype=dtype)
    gradients(layer, x)
    assert (layer.weight.grad.dtype, layer.bias.grad.dtype) == (dtype, dtype)


@every_recipe
def test_gradients_of_micro_batches_add_up(name, x):
    layer, parts = layer_of(name), []
    for rows in x.detach().split(70):
        layer.zero_grad()
        layer(rows).sum().backward()
        parts.append(layer.weight.grad)
    layer.zero_grad()
    for rows in x.detach().split(70):
        layer(rows).sum().backward()
    assert torch.equal(layer.weight.grad, parts[0] + parts[1])


@every_recipe
def test_main_grad_of_a_bf16_weight_adds_micro_batches_in_fp32(name, x):
    layer = layer_of(name, dtype=torch.bfloat16)
    layer.weight.main_grad = torch.zeros(N, K)
    parts = []
    for rows in x.detach().split(70):
        layer.weight.main_grad.zero_()
        layer(rows).sum().backward()
        parts.append(layer.weight.main_grad.clone())
    layer.weight.main_grad.zero_()
    for rows in x.detach().split(70):
        layer(rows).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, parts[0] + parts[1], rtol=1e-6, atol=1e-5)
    assert layer.weight.grad is None


def test_main_grad_of_a_bf16_weight_is_no_rounded_gradient(x):
    layer = layer_of("deepseek_v3", dtype=torch.bfloat16)
    layer.weight.main_grad = torch.zeros(N, K)
    layer(x).sum().backward()
    assert not torch.equal(layer.weight.main_grad, layer.weight.main_grad.bfloat16().float())


@every_recipe
def test_the_gradient_of_the_bias_is_the_sum_over_tokens(name, x):
    layer, dy = layer_of(name), torch.randn(T, N)
    layer(x).backward(dy)
    assert torch.equal(layer.bias.grad, dy.sum(0))


@every_recipe
def test_a_layer_used_twice_sums_both_gradients(name, x):
    layer, first, second = (layer_of(name).eval() for _ in range(3))  # in eval mode the amax history does not change
    first.load_state_dict(layer.state_dict())
    second.load_state_dict(layer.state_dict())
    dy, x = torch.randn(T, N), x.detach()
    (layer(x) * dy + layer(2 * x)).sum().backward()
    (first(x) * dy + second(2 * x)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, first.weight.grad + second.weight.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(name, frozen, x):
    dy = torch.randn(T, N)
    layer = layer_of(name)
    expected = torch.autograd.grad(layer(x), (x, layer.weight), dy)
    (x if frozen == "x" else layer.weight).requires_grad_(False)
    layer(x).backward(dy)
    assert (x.grad is None, layer.weight.grad is None) == (frozen == "x", frozen == "weight")
    found = layer.weight.grad if frozen == "x" else x.grad
    assert torch.equal(found, expected[1] if frozen == "x" else expected[0])


@every_quantized_recipe
def test_an_update_between_forward_and_backward_does_not_reach_this_backward(name, x):
    """Unless transposed weights are recomputed: torch refuses the update then, as it does for its own layer."""
    layer, dy = layer_of(name), torch.randn(T, N)
    layer.use_recipe(replace(layer.recipe, transposed_weights="cached"))
    (expected,) = torch.autograd.grad(layer(x), x, dy)
    y = layer(x)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], expected)


# Shapes


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("shape", [(K,), (0, K), (3, 0, K), (2, 7, 10, K), (1, 1, K)], ids=str)
def test_leading_dimensions_are_those_of_nn_linear(name, shape):
    layer, x = layer_of(name), torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((*shape[:-1], N), shape)


@every_recipe
def test_leading_dimensions_do_not_change_the_values(name, x):
    layer = layer_of(name)
    assert torch.equal(layer(x.view(7, 20, K)), layer(x).view(7, 20, N))


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 300), (129, 1)])
def test_sizes_start_at_1(name, inputs, outputs):
    layer, x = Linear(inputs, outputs, recipe=Recipe.named(name)), torch.randn(3, inputs, requires_grad=True)
    assert [t.shape for t in gradients(layer, x)] == [(3, outputs), (3, inputs), (outputs, inputs), (outputs,)]


@every_quantized_recipe
def test_a_transposed_input_equals_a_contiguous_one(name):
    layer, x = layer_of(name), torch.randn(K, T)
    assert torch.equal(layer(x.T), layer(x.T.contiguous()))


# Other tools of torch


def test_the_signature_is_that_of_nn_linear_and_a_recipe():
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (Linear, nn.Linear))
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [(p.name, p.kind, p.default) for p in theirs]
    assert (ours[-1].name, ours[-1].kind) == ("recipe", inspect.Parameter.KEYWORD_ONLY)


def test_the_recipe_is_deepseek_v3_if_none_is_given():
    assert Linear(3, 2).recipe == Recipe.deepseek_v3()


def test_its_repr_names_the_recipe():
    assert repr(Linear(3, 2)) == "Linear(in_features=3, out_features=2, bias=True, recipe=deepseek_v3)"


@every_recipe
def test_state_dicts_load_into_nn_linear_and_back(name):
    ours, theirs = layer_of(name), nn.Linear(K, N)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(nn.Linear(K, N).state_dict(), strict=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_loaded_state_dict_is_what_the_next_forward_pass_uses(x):
    layer, other = layer_of("deepseek_v3"), layer_of("deepseek_v3")
    layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_a_state_dict_goes_through_a_file_without_pickled_code(x):
    layer, other, file = layer_of("deepseek_v3"), layer_of("deepseek_v3"), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(layer(x), other(x))


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_computes_the_same(name, copied, x):
    layer = layer_of(name)
    gradients(layer, x)
    end_step(layer)
    assert same(gradients(copied(layer), x), gradients(layer, x))


def test_a_copy_does_not_follow_the_original(x):
    layer = layer_of("deepseek_v3")
    before = layer(x)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(copied(x), before)


@every_recipe
def test_autocast_gives_its_dtype_and_gradients_in_the_inputs(name, x):
    layer = layer_of(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_activations_changes_no_bit(name, use_reentrant, x):
    layer = layer_of(name)
    expected = gradients(layer, x)
    found = gradients(layer, x, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
    assert same(found, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_activations_advances_no_history_twice(use_reentrant, x):
    once, twice = layer_of("delayed"), layer_of("delayed")
    twice.load_state_dict(once.state_dict())
    for _ in range(2):
        gradients(once, x)
        gradients(twice, x, lambda x: checkpoint(twice, x, use_reentrant=use_reentrant))
        end_step(once)
        end_step(twice)
    assert torch.equal(once.history.amax_OH, twice.history.amax_OH)


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_activations_adds_to_main_grad_once(name, use_reentrant, x):
    layer = layer_of(name)
    expected = gradients(layer, x)[2]
    layer.zero_grad()
    layer.weight.main_grad = torch.zeros(N, K)
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.main_grad, expected)


@pytest.mark.oldest_torch
@pytest.mark.one_case
@some_recipes
def test_compiled_without_a_graph_break_it_computes_the_same(name, x):
    layer = layer_of(name)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    assert same(gradients(compiled, x), gradients(layer, x))


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_compiled_it_adds_to_main_grad(x):
    layer = layer_of("deepseek_v3")
    expected = gradients(layer, x)[2]
    layer.zero_grad()
    layer.weight.main_grad = torch.zeros(N, K)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(layer.weight.main_grad, expected)


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_by_inductor_it_computes_the_same(x):
    layer = layer_of("deepseek_v3", bias=False)  # whose gradient inductor sums in another order
    assert same(gradients(torch.compile(copy.deepcopy(layer)), x), gradients(layer, x))


@every_recipe
def test_on_the_meta_device_it_has_shapes(name):
    layer = Linear(K, N, device="meta", recipe=Recipe.named(name))
    x = torch.zeros(T, K, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert (x.grad.shape, layer.weight.grad.shape) == ((T, K), (N, K))


def test_it_trains():
    layer = layer_of("deepseek_v3")
    optimizer = torch.optim.SGD(layer.parameters(), lr=20.0)
    x, target = torch.randn(64, K), torch.randn(64, N)
    losses = []
    for _ in range(20):
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


# Changing the recipe


def test_another_recipe_computes_what_a_new_layer_with_it_does(x):
    layer = layer_of("deepseek_v3")
    layer(x)
    layer.use_recipe(Recipe.per_tensor())
    assert torch.equal(layer(x), Linear.from_linear(layer, Recipe.per_tensor())(x))


def test_another_recipe_resets_the_history(x):
    layer = layer_of("delayed")
    layer(x)
    layer.use_recipe(Recipe.delayed())
    assert not layer.history.amax_OH.any()


def test_a_layer_made_from_another_shares_its_parameters():
    linear = nn.Linear(3, 2)
    layer = Linear.from_linear(linear, Recipe.deepseek_v3())
    assert (layer.weight is linear.weight, layer.bias is linear.bias) == (True, True)


def test_a_layer_made_from_another_keeps_its_hooks():
    linear, calls = nn.Linear(3, 2), []
    linear.register_forward_hook(lambda *_: calls.append(1))
    Linear.from_linear(linear, Recipe.deepseek_v3())(torch.randn(1, 3))
    assert calls == [1]


def test_a_layer_made_from_another_keeps_its_mode():
    layer = Linear.from_linear(nn.Linear(3, 2).eval(), Recipe.delayed())
    assert (layer.training, layer.history.training) == (False, False)


def test_a_recipe_that_is_no_recipe_is_refused():
    with pytest.raises(
        TypeError, match=r"recipe must be an octile\.Recipe, not str: see Recipe\.named\('deepseek_v3'\)"
    ):
        Linear(16, 8, recipe="deepseek_v3")
