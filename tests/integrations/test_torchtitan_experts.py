"""Tests of torchtitan's stacked experts in a recipe's formats, vs. its own loop over them in FP32.

Shapes: R rows, D model, E experts, I intermediate.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octile.nn.conversion import apply_recipe
from octile.nn.observer import ObservedGemm, observe_gemms
from octile.ops.groups import num_tiles
from octile.recipe import Recipe
from tests.saved_bytes import saved_bytes

moe = pytest.importorskip("torchtitan.models.moe.moe")

D, E, I = 256, 4, 128
COUNTS = torch.tensor([30, 0, 50, 10])
EXACT = Recipe.float32()


def experts(intermediate: int = I) -> nn.Module:
    torch.manual_seed(0)
    module = moe.GroupedExperts(D, intermediate, E, use_grouped_mm=False)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def results(module: nn.Module, x_RD: Tensor, counts_E: Tensor = COUNTS):
    """The output, and the gradients of the rows and of all stacked weights."""
    x_RD = x_RD.clone().requires_grad_()
    module.zero_grad()
    y_RD = module(x_RD, counts_E)
    y_RD.backward(rows(len(x_RD), seed=7).to(y_RD))
    return {"y": y_RD.detach(), "x": x_RD.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], of_norm: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= of_norm * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("intermediate", [I, 96], ids=["fused", "grouped GEMMs"])
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**16), counts=st.lists(st.integers(0, 40), min_size=E, max_size=E), padding=st.integers(1, 9)
)
def test_in_high_precision_results_are_those_of_torchtitan(intermediate, seed, counts, padding):
    """Rows after the last expert's, as torchtitan's permutation leaves them, give zeros."""
    module, x_RD = experts(intermediate), rows(sum(counts) + padding, seed)
    expected = results(module, x_RD, torch.tensor(counts))
    assert_close(results(apply_recipe(module, EXACT), x_RD, torch.tensor(counts)), expected, 1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "per_tensor", "delayed", "smooth_swiglu", "mxfp8"])
@pytest.mark.parametrize("intermediate", [I, 96], ids=["128 channels", "96 channels"])
def test_in_8_bits_results_and_gradients_are_near_those_of_torchtitan(name, intermediate):
    module, x_RD = experts(intermediate), rows(100)
    expected = results(module, x_RD)
    assert_close(results(apply_recipe(module, Recipe.named(name)), x_RD), expected, 0.12)


def test_experts_without_rows_get_gradients_of_zeros_and_rows_after_the_last_expert_results_of_zeros():
    found = results(apply_recipe(experts()), rows(100))
    assert not found["y"][90:].any()
    assert not found["x"][90:].any()
    for name in ("w1", "w2", "w3"):
        assert found[name].abs().amax(dim=(1, 2)).bool().tolist() == COUNTS.bool().tolist()


def test_a_frozen_weight_changes_no_other_gradient():
    module = apply_recipe(experts())
    expected = results(module, rows(100))
    module.w1.requires_grad_(False)
    found = results(module, rows(100))
    assert found.pop("w1") is None
    del expected["w1"]
    assert_close(found, expected, 1e-5)


def test_gradients_are_contiguous_so_that_autograd_copies_none():
    module = apply_recipe(experts())
    written = {}
    for name, p in module.named_parameters():
        p.register_hook(lambda dw, name=name: written.update({name: dw.data_ptr()}))
    found = results(module, rows(100))
    assert all(found[name].data_ptr() == written[name] for name in ("w1", "w2", "w3"))


def test_under_autocast_results_have_its_dtype_and_gradients_that_of_the_weights():
    module = apply_recipe(experts())
    with torch.autocast("cpu", torch.bfloat16):
        found = results(module, rows(100))
    assert found["y"].dtype == torch.bfloat16
    assert {found[name].dtype for name in ("x", "w1", "w2", "w3")} == {torch.float32}
    assert_close(found, results(module, rows(100)), 0.05)


def test_weights_are_quantized_again_after_a_step():
    module, x_RD = apply_recipe(experts()), rows(100)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(2):  # the weights are cached from the first step on
        results(module, x_RD)
        optimizer.step()
    assert_close(results(module, x_RD), results(copy.deepcopy(module), x_RD), 0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_checkpointing_are_the_same(reentrant):
    module, x_RD = apply_recipe(experts()), rows(100)
    expected = results(module, x_RD)
    forward = module.forward
    module.forward = lambda x, counts: checkpoint(forward, x, counts, use_reentrant=reentrant)
    assert_close(results(module, x_RD), expected, 0.0)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_torch_compile_has_the_same_results_for_any_number_of_rows():
    module = apply_recipe(experts())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (100, 120):
        expected = results(module, rows(count))
        found = results(compiled, rows(count))
        assert_close({name.removeprefix("_orig_mod."): t for name, t in found.items()}, expected, 1e-6)


def test_observers_see_the_gemms_of_each_weight():
    """gate and up are one GEMM in fprop and in dgrad, of which each weight has its part."""
    module, seen = apply_recipe(experts()), []

    def observe(weight: Tensor, fprop: ObservedGemm):
        name = next(name for name, p in module.named_parameters() if p is weight)
        seen.append((name, fprop.name, tuple(fprop.b.shape)))
        return lambda gemm: seen.append((name, gemm.name, tuple(gemm.b.shape)))

    with observe_gemms(observe):
        results(module, rows(100))
    tiles = 128 * num_tiles(100, E)
    expected = [
        ("fprop", {"w1": (E, I, D), "w3": (E, I, D), "w2": (E, D, I)}),
        ("dgrad", {"w1": (E, D, I), "w3": (E, D, I), "w2": (E, I, D)}),
        ("wgrad", {"w1": (D, tiles), "w3": (D, tiles), "w2": (I, tiles)}),
    ]
    assert sorted(seen) == sorted((name, gemm, shape) for gemm, shapes in expected for name, shape in shapes.items())


def test_the_fused_function_saves_less_than_half_of_what_torchtitan_saves():
    def saved(module: nn.Module) -> int:
        x_RD = rows(512).bfloat16().requires_grad_()
        return saved_bytes(lambda: module(x_RD, torch.tensor([128, 128, 128, 128])), module.parameters())

    module = experts().bfloat16()
    before = saved(module)
    assert saved(apply_recipe(module)) < 0.5 * before


def test_the_module_stays_with_its_parameters_and_their_names():
    model = nn.ModuleDict({"experts": experts(), "other": nn.Linear(D, D)})
    module, parameters, names = model["experts"], dict(model.named_parameters()), list(model.state_dict())
    apply_recipe(model)
    assert model["experts"] is module
    assert list(model.state_dict()) == names
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert "recipe=deepseek_v3" in repr(model["experts"])
    assert str(model.conversion_summary).startswith(f"converted {3 * E + 1} of {3 * E + 1} linear layers")


def test_a_model_is_converted_to_another_recipe():
    model = apply_recipe(apply_recipe(experts()), Recipe.per_tensor())
    assert model.recipe.name == "per_tensor"
    assert str(model.conversion_summary).startswith(f"converted {3 * E} of {3 * E} linear layers to per_tensor")


def test_a_subclass_of_another_library_is_left_as_it_is_and_named():
    class Clamped(moe.GroupedExperts):
        pass

    model = apply_recipe(nn.ModuleDict({"experts": Clamped(D, I, E, False), "other": nn.Linear(D, D)}))
    assert f"{3 * E} × Clamped (a subclass of GroupedExperts)" in model.conversion_summary


# torchtitan's dense SwiGLU, whose layers are w1, w2 and w3


def feed_forward() -> nn.Module:
    torch.manual_seed(0)
    return moe.FeedForward(D, I)


def results_of(module: nn.Module) -> dict[str, Tensor]:
    x_RD = rows(20).requires_grad_()
    module.zero_grad()
    y_RD = module(x_RD)
    y_RD.backward(rows(20, seed=7))
    return {"y": y_RD.detach(), "x": x_RD.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def test_a_feed_forward_layer_is_fused_and_near_torchtitans():
    module = feed_forward()
    expected = results_of(module)
    assert apply_recipe(module).fusion() is not None
    assert_close(results_of(module), expected, 0.12)


def test_a_feed_forward_layer_keeps_its_class_and_its_methods():
    module = apply_recipe(feed_forward())
    assert isinstance(module, moe.FeedForward)
    with torch.no_grad():
        module.init_weights(init_std=0.1)
    assert 0.08 < module.w2.weight.std() < 0.12


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_feed_forward_layer_computes_the_same(copied):
    module = apply_recipe(feed_forward())
    assert_close(results_of(copied(module)), results_of(module), 0.0)
