"""Tests of telemetry: its rows and their values, that each GEMM counts once, and that it detaches."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octile
from octile.lab import telemetry
from octile.lab.layers import layer_weights
from octile.lab.operand_stats import measure_operand
from octile.nn import observer
from octile.nn.mlp import MLP
from octile.nn.moe import Experts
from octile.recipe import Recipe
from octile.scaled import quantize
from tests.lab import agreement
from tests.serve.models import exact_model

D = 72


class Block(nn.Module):
    """An MLP and experts: every kind of converted layer."""

    def __init__(self, checkpointed: bool | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.experts, self.head = MLP(D, 40), Experts(3, D, 24), nn.Linear(D, 5)
        self.checkpointed = checkpointed  # None: not at all; True: reentrant; False: not

    def forward(self, x):
        offs = torch.tensor([len(x) // 4, len(x) // 4, len(x)], dtype=torch.int32)

        def body(x):
            return self.experts(x + self.mlp(x), offs)

        y = body(x) if self.checkpointed is None else checkpoint(body, x, use_reentrant=self.checkpointed)
        return self.head(y)


def convert(model, recipe="deepseek_v3"):
    return octile.nn.conversion.apply_recipe(model, Recipe.named(recipe))


def batch(seed=0, n=48):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def rows_of(model, *batches, **options):
    with telemetry(model, **options) as t:
        for x in batches:
            model(x).square().sum().backward()
        return t.step()


def keys_of(rows):
    return [(row["layer"], row["product"], row.get("operand")) for row in rows]


def find(rows, layer, product, operand=None):
    (row,) = [row for row in rows if (row["layer"], row["product"], row.get("operand")) == (layer, product, operand)]
    return row


LAYERS = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "experts.gate_up", "experts.down", "head"]
OPERANDS = [("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("wgrad", "dy"), ("wgrad", "x")]
WHOLE = [("fprop", None), ("dgrad", None), ("wgrad", None)]


def test_there_is_a_row_for_every_operand_and_every_gemm():
    model = convert(Block())
    kept = [layer for layer in LAYERS if layer != "head"]  # convert leaves the head in high precision
    expected = {(layer, *place) for layer in kept for place in (*OPERANDS, *WHOLE)}
    found = keys_of(rows_of(model, batch()))
    assert set(found) == expected
    assert len(found) == len(expected)


def test_an_operand_row_equals_its_direct_measurement():
    model, x = convert(nn.Sequential(nn.Linear(D, 40))), batch()
    stats = measure_operand(x, quantize(x, (1, 128), scale="power_of_2"))
    row = find(rows_of(model, x), "0", "fprop", "x")
    assert row == {"step": 1, "layer": "0", "product": "fprop", "operand": "x", **stats.row(stats.packed().tolist())}


def test_a_layer_that_is_the_whole_model_has_a_name():
    assert {row["layer"] for row in rows_of(convert(nn.Linear(D, 40)), batch())} == {"weight"}


def test_the_gemm_row_compares_with_operands_before_quantization():
    x = batch()
    model = convert(nn.Sequential(nn.Linear(D, 8, bias=False)))
    row = find(rows_of(model, x), "0", "fprop")
    rows = torch.arange(32) * 48 // 32
    exact = (x.double()[rows] @ model[0].weight.double().T).detach()
    error = model(x).detach().double()[rows] - exact  # of the reference, whose sums are FP32
    assert row["outputs"] == 32 * 8
    assert row["quantization_snr_db"] == pytest.approx(
        float(10 * (exact.square().sum() / error.square().sum()).log10()), abs=1e-3
    )


def test_the_accumulation_error_is_small_and_separate():
    row = find(rows_of(convert(Block()), batch()), "mlp.down_proj", "wgrad")
    assert row["accumulation_snr_db"] > row["quantization_snr_db"] + 20


@pytest.mark.slow
def test_under_a_batch_invariant_recipe_all_layers_but_the_absorbed_ones_have_rows():
    model, tokens_BS = exact_model().train(), torch.arange(60).view(2, 30)
    with telemetry(model) as t:
        model(tokens_BS, tokens_BS).backward()
        rows = t.step()
    assert {row["layer"] for row in rows} == {n for n in layer_weights(model).weights if not n.endswith("kv_b_proj")}
    with pytest.raises(ValueError, match="layers must match other layers than model"):
        telemetry(model, layers="*.kv_b_proj").__enter__()


@pytest.mark.one_case
@pytest.mark.parametrize(
    "name", [n for n in Recipe.names() if (r := Recipe.named(n)).formats and not r.batch_invariant]
)
def test_every_quantized_recipe_has_rows_that_json_can_hold(name):
    rows = rows_of(convert(Block(), name), batch())
    assert {row["layer"] for row in rows} == {layer for layer in LAYERS if layer != "head"}
    json.dumps(rows, allow_nan=False)


def test_one_scale_a_tensor_is_not_measured_twice():
    assert ("mlp.up_proj", "wgrad", "x") not in keys_of(rows_of(convert(Block(), "per_tensor"), batch()))


def test_integers_have_no_accumulation_figures():
    assert "accumulation_snr_db" not in find(rows_of(convert(Block(), "int8_tiles"), batch()), "mlp.up_proj", "fprop")


def test_the_zeros_after_an_experts_tokens_are_not_counted():
    x, model = batch(), convert(Block())
    rows = rows_of(model, x)
    for operand, width in (("x", 24), ("dy", D)):
        assert find(rows, "experts.down", "wgrad", operand)["values"] == len(x) * width


def test_micro_batches_add_up_to_one_batch():
    one, other = batch(0), batch(1)
    apart = rows_of(convert(nn.Sequential(nn.Linear(D, 40))), one, other)
    together = rows_of(convert(nn.Sequential(nn.Linear(D, 40))), torch.cat([one, other]).detach().requires_grad_())
    for row in (find(rows, "0", "fprop", "x") for rows in (apart, together)):
        assert row["values"] == 2 * one.numel()
    a, b = find(apart, "0", "fprop", "x"), find(together, "0", "fprop", "x")
    assert a["scale_histogram"] == b["scale_histogram"]
    assert a["snr_db"] == pytest.approx(b["snr_db"])


def test_a_weight_counts_once_however_many_micro_batches():
    row = find(rows_of(convert(Block()), batch(0), batch(1)), "mlp.up_proj", "fprop", "w")
    assert row["values"] == 40 * D


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_counts_once(reentrant):
    plain, again = (rows_of(convert(Block(how)), batch()) for how in (None, reentrant))
    key = lambda row: (row["layer"], row["product"], row.get("operand") or "")  # noqa: E731
    assert sorted(plain, key=key) == sorted(again, key=key)


def test_a_forward_pass_alone_does_not_count():
    model = convert(Block())
    with telemetry(model) as t:
        with torch.no_grad():
            model(batch(1))
        model(batch(2))
        model(batch(0)).square().sum().backward()
        rows = t.step()
    assert rows == rows_of(convert(Block()), batch(0))


def test_only_every_nth_step_has_rows_and_says_which():
    model = convert(Block())
    steps = []
    with telemetry(model, every=3) as t:
        for _ in range(7):
            model(batch()).sum().backward()
            steps.append({row["step"] for row in t.step()})
    assert steps == [set(), set(), {3}, set(), set(), {6}, set()]


def test_only_the_chosen_layers_have_rows():
    rows = rows_of(convert(Block()), batch(), layers="*.gate_proj, experts.*")
    assert {row["layer"] for row in rows} == {"mlp.gate_proj", "experts.gate_up", "experts.down"}


def test_gemms_in_bf16_have_no_rows():
    model = convert(Block())
    model.mlp.up_proj.use_recipe(Recipe.deepseek_v3().without("wgrad"))
    found = {place[1:] for place in keys_of(rows_of(model, batch())) if place[0] == "mlp.up_proj"}
    assert found == {("fprop", "x"), ("fprop", "w"), ("fprop", None), ("dgrad", "dy"), ("dgrad", None)}


def attached(model) -> int:
    """The number of hooks of any kind on modules and parameters, and of observers."""
    hooks = sum(
        len(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("hooks") and isinstance(value, dict)
    )
    on_parameters = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return hooks + on_parameters + len(observer._observers)


def test_between_measured_steps_and_afterwards_nothing_is_attached():
    model = convert(Block())
    assert attached(model) == 0
    with telemetry(model, every=2) as t:
        assert attached(model) == 0
        t.step()
        assert attached(model) == 1  # the observer
        model(batch()).sum().backward()
        t.step()
        assert attached(model) == 0
    assert attached(model) == 0


def test_nothing_stays_attached_after_an_error():
    model = convert(Block())
    with pytest.raises(KeyError), telemetry(model):
        raise KeyError
    assert attached(model) == 0


def test_measuring_changes_no_bit_of_the_training():
    def gradients(measured):
        model, x = convert(Block()), batch()
        if measured:
            rows_of(model, x)
        else:
            model(x).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_an_empty_batch_has_no_rows():
    assert rows_of(convert(nn.Sequential(nn.Linear(D, 40))), batch(n=0)) == []


def test_experts_without_tokens_have_no_rows():
    model = convert(nn.Sequential(Experts(3, D, 24)))
    with telemetry(model) as t:
        model[0](batch(), torch.zeros(3, dtype=torch.int32)).sum().backward()
        assert t.step() == []


def test_smoothed_layers_are_found_by_their_own_weight():
    rows = rows_of(convert(Block(), "smooth_swiglu"), batch())
    assert {"mlp.down_proj", "experts.down"} <= {row["layer"] for row in rows}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1, not 0"),
        ({"layers": "mlp.*,nothing.*"}, "no layer matches 'nothing.\\*'; there are mlp.gate_proj"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message), telemetry(convert(Block()), **options):
        pass


def test_a_model_without_converted_layers_is_refused():
    with pytest.raises(ValueError, match="model has no layer with a recipe"), telemetry(nn.Linear(2, 2)):
        pass


@pytest.fixture(scope="module")
def by_two_machines():
    """Rows computed with octile's references, and rows from an H200."""
    model = convert(agreement.Block())
    references = agreement.rows_of(copy.deepcopy(model), "cpu")
    with octile.lab.tensor_core("sm_90", 128):
        return references, agreement.rows_of(model, "cpu")


def test_rows_of_another_machine_agree(by_two_machines):
    references, tensor_core = by_two_machines
    assert references.keys() == tensor_core.keys()
    for place, row in references.items():
        agreement.assert_agree(row, tensor_core[place])
    nearly_exact = ("experts.down", "wgrad", "x")  # few values decide, and these depend on the order of sums
    assert abs(references[nearly_exact]["snr_db"] - tensor_core[nearly_exact]["snr_db"]) > 1


@pytest.mark.parametrize("times", [1.5, 0.5])
def test_rows_that_lose_more_or_less_do_not_agree(by_two_machines, times):
    for row in by_two_machines[0].values():
        other = {n: v * times if n == "mse" else v + 6 if n == "accumulation_snr_db" else v for n, v in row.items()}
        if row.get("snr_db", 0) is not None and row.get("snr_db", 0) < 60:
            with pytest.raises(AssertionError):
                agreement.assert_agree(row, other)


def test_a_nearly_exact_quantization_may_lose_a_few_values_but_not_many(by_two_machines):
    row = by_two_machines[0]["experts.gate_up", "wgrad", "x"]
    assert row["snr_db"] is None  # nothing is lost
    one_value = (2.0**-10 * row["scale_inv_max"]) ** 2 / row["values"]
    agreement.assert_agree(row, row | {"mse": 3 * one_value})
    with pytest.raises(AssertionError):
        agreement.assert_agree(row, row | {"mse": 10 * one_value})


def test_a_nan_is_counted_and_not_hidden():
    model, x = convert(nn.Sequential(nn.Linear(D, 40))), batch().detach()
    x[3, 3] = math.nan
    row = find(rows_of(model, x.requires_grad_()), "0", "fprop", "x")
    assert row["cur_amax"] is None
