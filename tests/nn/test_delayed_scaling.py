"""Tests of delayed scaling, and of quantization without a scale."""

import pytest
import torch
from torch import Tensor, nn

from octile.formats import E4M3, E5M2
from octile.nn.delayed_scaling import AmaxHistory, end_step, quantize_unscaled
from octile.nn.linear import Linear
from octile.recipe import AMAX_HISTORY, TENSOR, OperandFormat, Recipe

FORMAT = OperandFormat(block=TENSOR, amax="delayed")
SMALL, LARGE = torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, 1000.0]])


@pytest.fixture
def history() -> AmaxHistory:
    return AmaxHistory()


def scale_of(history: AmaxHistory, t: Tensor, operand: str = "x") -> float:
    return history.quantize(t, operand, FORMAT).scale.item()


def scale_for(amax: float) -> float:
    return (torch.tensor(amax) / 448).item()


def test_the_first_step_uses_its_own_amax(history):
    assert scale_of(history, SMALL) == scale_for(2)


def test_each_micro_batch_of_the_first_step_uses_its_own_amax(history):
    scale_of(history, LARGE)
    assert scale_of(history, SMALL) == scale_for(2)


def test_later_steps_use_the_history(history):
    scale_of(history, LARGE)
    history.end_step()
    assert scale_of(history, SMALL) == scale_for(1000)


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
    for _ in range(AMAX_HISTORY + 1):
        history.end_step()
        scales.append(scale_of(history, SMALL))
    assert scales == [scale_for(1000)] * AMAX_HISTORY + [scale_for(2)]


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
    end_step(nn.Sequential(nn.Linear(2, 2), Linear(2, 2)))


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
