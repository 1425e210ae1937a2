"""Tests of delayed scaling, and of quantization without a scale."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from octile.formats import E4M3, E5M2
from octile.nn.delayed_scaling import AmaxHistory, end_step, quantize_unscaled
from octile.nn.linear import Linear
from octile.recipe import TENSOR, OperandFormat, Recipe

FORMAT = OperandFormat(block=TENSOR, amax="delayed")
FP8_LM = OperandFormat(block=TENSOR, amax="delayed", scale="power_of_2", window=4, warm_up="until_full")
SMALL, LARGE = torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, 1000.0]])


@pytest.fixture
def history() -> AmaxHistory:
    return AmaxHistory(FORMAT.window)


def scale_of(history: AmaxHistory, t: Tensor, operand: str = "x", operand_format: OperandFormat = FORMAT) -> float:
    return history.quantize(t, operand, operand_format).scale.item()


def scale_for(amax: float) -> float:
    return (torch.tensor(amax) / 448).item()


def test_the_first_step_uses_its_own_amax(history):
    assert scale_of(history, SMALL) == scale_for(2)


def test_each_micro_batch_of_the_first_step_uses_its_own_amax(history):
    scale_of(history, LARGE)
    assert scale_of(history, SMALL) == scale_for(2)


@pytest.mark.parametrize("amax", [1000.0, 2.0**-20])
def test_later_steps_use_the_history(history, amax: float):
    scale_of(history, torch.tensor([[0.0, amax]]))
    history.end_step()
    assert scale_of(history, SMALL) == scale_for(amax)


def test_this_step_counts_only_when_it_is_over(history):
    scale_of(history, SMALL)
    history.end_step()
    scale_of(history, LARGE)
    assert scale_of(history, LARGE) == scale_for(2)


def test_a_new_outlier_saturates(history):
    scale_of(history, SMALL)
    history.end_step()
    assert history.quantize(LARGE, "x", FORMAT).dequantize()[0, 1].item() == pytest.approx(2)


def test_the_largest_micro_batch_of_a_step_counts(history):
    for t in (SMALL, LARGE, SMALL):
        scale_of(history, t)
    history.end_step()
    assert scale_of(history, SMALL) == scale_for(1000)


def test_an_amax_stays_in_the_history_for_the_documented_steps(history):
    scale_of(history, LARGE)
    scales = []
    for _ in range(FORMAT.window + 1):
        history.end_step()
        scales.append(scale_of(history, SMALL))
    assert scales == [scale_for(1000)] * FORMAT.window + [scale_for(2)]


def test_an_operand_with_a_shorter_window_reads_the_last_steps(history):
    short = OperandFormat(block=TENSOR, amax="delayed", window=2)
    scale_of(history, LARGE)
    scales = []
    for _ in range(3):
        history.end_step()
        scales.append(scale_of(history, SMALL, operand_format=short))
    assert scales == [scale_for(1000), scale_for(1000), scale_for(2)]


def fp8_lm_scales(history: AmaxHistory, tensors: list[Tensor]) -> list[float]:
    """The scale of each step's tensor."""
    scales = []
    for t in tensors:
        scales.append(scale_of(history, t, operand_format=FP8_LM))
        history.end_step()
    return scales


def test_fp8_lm_takes_the_current_amax_until_its_window_is_full(history):
    assert fp8_lm_scales(history, [LARGE, *[SMALL] * 7]) == [4.0, *[2.0**-7] * 3, 4.0, *[2.0**-7] * 3]


def test_fp8_lm_takes_the_current_amax_again_after_a_step_that_was_not_finite(history):
    fp8_lm_scales(history, [SMALL] * 4)
    fp8_lm_scales(history, [torch.tensor([[torch.inf]])])
    assert fp8_lm_scales(history, [LARGE] * 4) == [4.0] * 4
    assert fp8_lm_scales(history, [SMALL]) == [4.0]


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_fp8_lms_scales_are_those_of_its_code(amax):
    """MS-AMP multiplies by 2 to the power of floor(log2(max / amax))."""
    fraction, exponent = math.frexp(448 / amax)
    history = AmaxHistory(FP8_LM.window)
    assert scale_of(history, torch.tensor([[amax]]), operand_format=FP8_LM) == 2.0 ** -(exponent - 1)
    assert 0.5 <= fraction < 1


def test_each_operand_has_a_history(history):
    scale_of(history, LARGE, "x")
    history.end_step()
    assert scale_of(history, SMALL, "w") == scale_for(2)


def test_a_step_without_rows_is_not_recorded(history):
    history.quantize(torch.zeros(0, 2), "x", FORMAT)
    history.end_step()
    assert scale_of(history, SMALL) == scale_for(2)


def test_zeros_have_scale_1(history):
    assert scale_of(history, torch.zeros(2, 2)) == 1


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_makes_the_whole_tensor_nan(history, number):
    scale_of(history, LARGE)
    history.end_step()
    assert history.quantize(torch.tensor([[1.0, number]]), "x", FORMAT).dequantize().isnan().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_or_inf_is_not_recorded(history, number):
    scale_of(history, torch.tensor([[1.0, number]]))
    scale_of(history, SMALL)
    history.end_step()
    assert scale_of(history, LARGE) == scale_for(2)


def test_a_validation_in_between_changes_nothing(history):
    history.eval()
    scale_of(history, LARGE)
    history.train().end_step()
    assert scale_of(history, SMALL) == scale_for(2)


def test_experts_share_one_scale(history):
    q = history.quantize(torch.stack([SMALL, LARGE]), "w", FORMAT)
    assert q.scale.flatten().tolist() == [scale_for(1000)] * 2


def test_end_step_reaches_every_layer():
    layers = [Linear(2, 2, recipe=Recipe.delayed()) for _ in range(2)]
    nn.Sequential(*layers)(LARGE)
    end_step(nn.ModuleList(layers))
    assert [layer.history.amax_OH[0, 1].item() > 0 for layer in layers] == [True, True]


def test_end_step_does_nothing_for_models_without_history():
    model = nn.Sequential(nn.Linear(2, 2), Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    end_step(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_a_history_is_not_part_of_the_state_dict():
    assert Linear(2, 2, recipe=Recipe.delayed()).state_dict().keys() == {"weight", "bias"}


def test_a_history_moves_with_its_layer():
    assert Linear(2, 2, recipe=Recipe.delayed()).to("meta").history.amax_OH.is_meta


# No scale


def test_without_a_scale_e4m3_saturates():
    q = quantize_unscaled(LARGE, OperandFormat(E4M3, TENSOR, amax="unscaled"))
    assert (q.data.float().tolist(), q.scale.item()) == ([[1, 448]], 1)


def test_without_a_scale_the_largest_e5m2_value_is_preserved():
    q = quantize_unscaled(torch.tensor([[57344.0, -57344.0]]), OperandFormat(E5M2, TENSOR, amax="unscaled"))
    assert q.dequantize().tolist() == [[57344, -57344]]


@pytest.mark.parametrize("number", [57345.0, torch.inf, torch.nan])
def test_without_a_scale_values_too_large_for_e5m2_become_visible(number):
    assert (
        quantize_unscaled(torch.tensor([[1.0, number]]), OperandFormat(E5M2, TENSOR, amax="unscaled"))
        .dequantize()
        .isnan()
        .all()
    )


@pytest.mark.parametrize("skip", [True, False])
def test_a_skipped_step_does_not_move_the_history(history, skip):
    model = nn.Sequential(history)
    scale_of(history, SMALL)
    before = history.amax_OH.clone()
    end_step(model, torch.tensor(skip))
    expected = AmaxHistory(FORMAT.window)
    expected.amax_OH.copy_(before)
    if not skip:
        expected.end_step()
    assert torch.equal(history.amax_OH, expected.amax_OH)
