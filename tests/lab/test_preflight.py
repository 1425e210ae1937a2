"""Tests of preflight: it finds the layer that was made bad on purpose, and agrees with a real FP8 step."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import octile
from octile.lab.capture import CapturedGemm
from octile.lab.preflight import error_by_channel, model_loss, preflight, quantize_as_recipe
from octile.lab.preflight_check import observe_batch, observe_step
from octile.lab.tensor_core import tensor_core, tensor_core_scaled_matmul
from octile.nn.conversion import apply_recipe
from octile.nn.moe import Experts
from octile.nn.observer import observe_gemms
from octile.recipe import GEMMS, OperandFormat, Recipe
from octile.scaled import quantize
from tests.lab.measured_step import measure_step

PREDICTABLE = [
    name
    for name in Recipe.names()
    if (r := Recipe.named(name)).formats is not None
    and not (r.has_delayed_scaling or r.loss_scale or r.batch_invariant)
]
every_predictable_recipe = pytest.mark.parametrize("recipe", PREDICTABLE)

D, TOKENS, BAD = 128, 96, 2
CHANNELS = slice(None, None, 32)


class Net(nn.Module):
    """Layers on a residual stream; one may have input channels a million times too large, which it almost ignores."""

    def __init__(self, bad: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=i == 1) for i in range(4))
        self.bad, self.out = bad, nn.Linear(D, 8, bias=False)
        self.large = torch.ones(D)
        self.large[CHANNELS] = 1e6
        if bad is not None:
            with torch.no_grad():
                self.layers[bad].weight[:, CHANNELS] *= 1e-6

    def forward(self, x, y):
        for i, layer in enumerate(self.layers):
            h = nn.functional.layer_norm(x, (D,))
            x = x + torch.tanh(layer(h * self.large if i == self.bad else h))
        return nn.functional.cross_entropy(self.out(x), y)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, D, generator=generator).requires_grad_()
    return x, torch.randint(8, (TOKENS,), generator=generator)


@pytest.fixture(scope="module")
def found():
    return preflight(Net(BAD), [batch()])


def test_the_bad_layer_is_named(found):
    assert found.recipe.exceptions == ((f"layers.{BAD}", frozenset({"fprop", "dgrad", "wgrad"})),)
    assert {risk.layer for risk in found.risks[:3]} == {f"layers.{BAD}"}


def test_the_operand_to_blame_is_named(found):
    risks = {(risk.layer, risk.gemm): risk for risk in found.risks}
    bad = [risks[f"layers.{BAD}", product] for product in ("fprop", "dgrad", "wgrad")]
    assert [risk.blame for risk in bad] == ["x", "w", "x"]
    assert bad[0].flushed > 0.5  # nearly all values but the large channels'
    assert risks["layers.0", "fprop"].flushed < 0.01


def test_a_model_without_a_bad_layer_needs_no_exception():
    assert preflight(Net(), [batch()]).recipe.exceptions == ()


@pytest.mark.one_case
@every_predictable_recipe
def test_a_real_step_has_the_predicted_error(recipe):
    named = Recipe.named(recipe)
    risks = preflight(Net(BAD), [batch()], named).risks
    real = measure_step(Net(BAD), batch(), named)
    assert len(real) == 15
    pairs = torch.tensor([(r.total.snr_db, real[r.layer, r.gemm].snr_db) for r in risks], dtype=torch.float64)
    assert (pairs[:, 0] - pairs[:, 1]).abs().max() < 3
    assert torch.corrcoef(pairs.T)[0, 1] > 0.98


def test_with_the_recommended_recipe_the_bad_layer_is_as_accurate_as_others(found):
    spared = measure_step(Net(BAD), batch(), found.recipe)
    assert min(error.snr_db for error in spared.values()) > 20


def test_the_predicted_error_equals_that_of_the_kernel():
    """fprop of the first layer, whose input is the same in any recipe, multiplied on the modeled tensor core."""
    model, (x, y) = Net(), batch()
    first = {r.gemm: r for r in preflight(model, [(x, y)], sample=1000).risks if r.layer == "layers.0"}["fprop"]
    h = nn.functional.layer_norm(x, (D,)).detach()
    w = model.layers[0].weight.detach()
    a, b = quantize(h, (1, 128), scale="power_of_2"), quantize(w, (128, 128))
    sums = tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block)
    assert first.total == error_by_channel(sums.double(), h.double() @ w.double().T)


def test_the_real_step_accumulates_as_the_active_model_does():
    real = measure_step(Net(), batch(), Recipe.per_tensor())
    with tensor_core("sm_90", promote_every=None):
        hopper = measure_step(Net(), batch(), Recipe.per_tensor())
    assert real["layers.0", "fprop"].noise != hopper["layers.0", "fprop"].noise


def test_every_channel_counts_equally():
    exact = torch.tensor([[1.0, 1000.0, 0.0], [-1.0, 3000.0, 0.0]], dtype=torch.float64)
    found = exact + torch.tensor([[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    assert error_by_channel(found, exact).noise == pytest.approx(
        0.125
    )  # a quarter of the first channel's power, none else


def test_operands_are_quantized_by_the_recipe():
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((200, 130), (140, 130), (200, 140)))
    recipe = Recipe.deepseek_v3()
    kept = quantize(x, (1, 128), scale="power_of_2")
    expected = {
        "fprop": (kept, quantize(w, (128, 128))),
        "dgrad": (quantize(dy, (1, 128)), quantize(w, (128, 128)).mT),
        "wgrad": (quantize(dy, (128, 1)).mT, quantize(kept.dequantize(), (128, 1), scale="power_of_2").mT),
    }
    sides = {"fprop": (x, w), "dgrad": (dy, w.mT), "wgrad": (dy.mT, x.mT)}
    for name, pair in expected.items():
        for mine, theirs in zip(quantize_as_recipe(recipe, CapturedGemm("l", name, *sides[name])), pair, strict=True):
            assert torch.equal(mine.data.float(), theirs.data.float())
            assert torch.equal(mine.scale, theirs.scale)


@pytest.mark.parametrize("block", [(1, 128), (64, 128), (128, 1), (128, 128)])
def test_dgrads_weight_has_the_blocks_that_a_step_gives_it(block):
    formats = Recipe.deepseek_v3().formats
    recipe = replace(Recipe.deepseek_v3(), formats=replace(formats, w=OperandFormat(block=block)))
    model, operands = octile.nn.Linear(130, 140, bias=False, recipe=recipe), {}

    def observer(weight, fprop):
        return lambda gemm: operands.update({gemm.name: gemm.b})

    with observe_gemms(observer):
        model(torch.randn(16, 130).requires_grad_()).sum().backward()
    captured = CapturedGemm("l", "dgrad", torch.randn(16, 140), model.weight.detach().mT)
    _, mine = quantize_as_recipe(recipe, captured)
    assert mine.block == operands["dgrad"].block
    assert torch.equal(mine.dequantize(), operands["dgrad"].dequantize())


def test_the_model_is_not_changed():
    model = Net(BAD)
    before = copy.deepcopy(model.state_dict())
    preflight(model, [batch()])
    assert all(type(layer) is nn.Linear for layer in model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_of_several_batches_the_worst_counts():
    one, two, both = (preflight(Net(), batches).risks for batches in ([batch(0)], [batch(1)], [batch(0), batch(1)]))
    worst = {(r.layer, r.gemm): r.total.noise for r in one}
    for r in two:
        worst[r.layer, r.gemm] = max(worst[r.layer, r.gemm], r.total.noise)
    assert {(r.layer, r.gemm): r.total.noise for r in both} == worst
    assert {r.batch for r in both} == {0, 1}


def test_each_batch_is_a_prediction_of_its_own():
    one, two, both = (preflight(Net(), batches).risks for batches in ([batch(0)], [batch(1)], [batch(0), batch(1)]))
    alone = [{(r.layer, r.gemm): r.total.noise for r in risks} for risks in (one, two)]
    assert all(r.by_batch == tuple(noise[r.layer, r.gemm] for noise in alone) for r in both)


def test_a_gemm_about_which_batches_disagree_is_disputed():
    risk = preflight(Net(), [batch(0), batch(1)]).risks[7]
    between = sum(-10 * math.log10(noise) for noise in risk.by_batch) / 2
    found = preflight(Net(), [batch(0), batch(1)], least_snr_db=between)
    (again,) = (r for r in found.risks if (r.layer, r.gemm) == (risk.layer, risk.gemm))
    assert found.batches_below(again) == 1
    assert again in found.disputed


def test_an_observed_batch_measures_every_gemm_that_is_predicted():
    risks = preflight(Mixture(), [(batch()[0],)]).risks
    measured = observe_batch(Mixture(), (batch()[0],), Recipe.deepseek_v3())
    assert {(r.layer, r.gemm) for r in risks} <= measured.keys()


def test_the_bound_decides():
    risks = preflight(Net(), [batch()]).risks
    bound = sum(r.total.snr_db for r in risks[4:6]) / 2
    found = preflight(Net(), [batch()], least_snr_db=bound)
    assert [found.is_excepted(r) for r in found.risks] == [True] * 5 + [False] * 10


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(2, D, 64)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.1)

    def forward(self, x):
        return self.experts(x, torch.tensor([40, TOKENS], dtype=torch.int32)).square().sum()


def test_the_expert_with_the_largest_error_decides():
    found = preflight(Mixture(), [(batch()[0],)], least_snr_db=100.0)
    assert {(r.weight, r.module) for r in found.risks} == {
        ("experts.down", "experts"),
        ("experts.gate_up", "experts"),
    }
    assert all(r.layer in (f"{r.weight}.0", f"{r.weight}.1") for r in found.risks)
    assert found.recipe.exceptions == (("experts", frozenset({"fprop", "dgrad", "wgrad"})),)
    assert apply_recipe(Mixture(), found.recipe).experts.recipe.high_precision == {"fprop", "dgrad", "wgrad"}


def test_weight_gradients_of_experts_are_measured():
    real = measure_step(Mixture(), (batch()[0],), Recipe.deepseek_v3())
    assert set(real) == {(f"experts.{name}.{g}", "wgrad") for name in ("down", "gate_up") for g in (0, 1)}
    assert all(25 < error.snr_db < 35 for error in real.values())


@pytest.mark.one_case
@every_predictable_recipe
@pytest.mark.parametrize(("model", "given"), [(Net(BAD), batch()), (Mixture(), (batch()[0],))])
def test_an_observed_step_has_the_errors_of_its_results(model, given, recipe):
    named = Recipe.named(recipe)
    results = measure_step(model, given, named)
    training = apply_recipe(copy.deepcopy(model), named)
    with observe_step(training) as seen:
        model_loss(training, given).backward()
    assert results.keys() <= seen.keys()
    for place, error in results.items():
        assert seen[place].noise == pytest.approx(error.noise, rel=1e-3), place


def test_every_gemm_of_every_expert_is_observed():
    training = apply_recipe(Mixture(), Recipe.deepseek_v3())
    with observe_step(training) as seen:
        model_loss(training, (batch()[0],)).backward()
    assert set(seen) == {(f"experts.{w}.{g}", p) for w in ("down", "gate_up") for g in (0, 1) for p in GEMMS}


def test_high_precision_gemms_are_not_observed(found):
    training = apply_recipe(Net(BAD), found.recipe)
    with observe_step(training) as seen:
        model_loss(training, batch()).backward()
    assert {layer for layer, _ in seen} == {f"layers.{i}" for i in range(4) if i != BAD} | {"out"}


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, a, b=None):
        return self.what(a, b)


@pytest.mark.parametrize(
    ("what", "given"),
    [
        (lambda a, b: a * b, (torch.tensor(2.0), torch.tensor(3.0))),
        (lambda a, b: a * b, {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}),
        (lambda a, b: a, torch.tensor(6.0)),
        (lambda a, b: type("Output", (), {"loss": a * b})(), [torch.tensor(2.0), torch.tensor(3.0)]),
    ],
)
def test_a_batch_may_have_these_forms(what, given):
    assert model_loss(Returns(what), given).item() == 6


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(TypeError, match=r"must return a scalar loss, or an object with .loss, not \[3\]: pass loss="):
        model_loss(Returns(lambda a, b: a), torch.ones(3))


def test_a_loss_may_be_given():
    risks = preflight(nn.Sequential(nn.Linear(D, 8)), [batch()[0]], loss=lambda model, x: model(x).square().sum()).risks
    assert {r.layer for r in risks} == {"0"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe.bf16(), "recipe 'bf16' has no GEMM in 8 bits"),
        (Recipe.delayed(), "recipe 'delayed' has delayed scaling"),
        (Recipe.global_scale(), "recipe 'global_scale' has dynamic loss scaling"),
        (Recipe.exact(), "recipe 'exact' has all linear layers in FP8, .*: use --recipe deepseek_v3"),
        (Recipe.deepseek_v3().without("wgrad"), r"must have no exceptions yet, .*: leave out its \[\[keep\]\] tables"),
    ],
)
def test_unsupported_recipes_are_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        preflight(Net(), [batch()], recipe)


def test_operands_that_are_not_finite_are_refused_without_options_of_other_commands():
    model = Net()
    with torch.no_grad():
        model.layers[0].weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"operands that are not finite: use finite weights, or another text$"):
        preflight(model, [batch()])


def test_no_batch_is_refused():
    with pytest.raises(ValueError, match="batches must hold at least one"):
        preflight(Net(), [])
