"""Tests of AdamW's state: resuming is bit for bit, states of other optimizers are refused."""

import copy
import io

import pytest
import torch
from torch import nn

from octile.optim import AdamW
from octile.recipe import OptimizerFormats
from tests.optim.conftest import ALL_FORMATS, FP8_LM, FP32_MOMENTS, SHAPES, bits, parameters, same_bits, train


def saved_and_loaded(optimizer: AdamW) -> dict:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@ALL_FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_resumes_bit_for_bit(formats, dtype):
    params = parameters(dtype)
    optimizer = AdamW(params, 1e-2, formats=formats)
    train(optimizer, params, range(3))

    resumed_params = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = AdamW(resumed_params, 5.0, formats=formats)
    resumed.load_state_dict(saved_and_loaded(optimizer))

    train(optimizer, params, range(3, 6))
    train(resumed, resumed_params, range(3, 6))
    assert same_bits(params, resumed_params)


@ALL_FORMATS
def test_state_survives_the_round_trip_bit_for_bit(formats):
    params = parameters()
    optimizer = AdamW(params, 1e-2, formats=formats)
    train(optimizer, params, range(3))
    before = optimizer.state_dict()["state"]
    resumed = AdamW(parameters(), 1e-2, formats=formats)
    resumed.load_state_dict(saved_and_loaded(optimizer))
    after = resumed.state_dict()["state"]
    assert all(
        before[i][key].dtype == after[i][key].dtype and torch.equal(bits(before[i][key]), bits(after[i][key]))
        for i in before
        for key in before[i]
    )


def test_a_loaded_state_is_not_shared_with_its_source():
    params = parameters()
    optimizer = AdamW(params, 1e-2)
    train(optimizer, params, range(1))
    source = optimizer.state_dict()
    before = copy.deepcopy(source["state"][0]["exp_avg"])
    other_params = parameters()
    other = AdamW(other_params, 1e-2)
    other.load_state_dict(source)
    train(other, other_params, range(1, 3))
    assert torch.equal(source["state"][0]["exp_avg"], before)


@pytest.mark.parametrize(
    ("shapes", "formats", "message"),
    [
        (SHAPES, FP32_MOMENTS, "exp_avg .*bfloat16 for parameter 0; needs .*float32"),
        (SHAPES, FP8_LM, "its formats need .*master_scale"),
        ([(33, 18), *SHAPES[1:]], OptimizerFormats(), r"exp_avg \[33, 17\] .* needs \[33, 18\]"),
        (SHAPES[1:], OptimizerFormats(), "state_dict has 6 parameters, this optimizer 5"),
    ],
    ids=["moments", "scales", "shape", "count"],
)
def test_refuses_the_state_of_another_optimizer_and_keeps_its_own(shapes, formats, message):
    source_params = parameters()
    source = AdamW(source_params, 1e-2)
    train(source, source_params, range(1))
    params = parameters(shapes=shapes)
    optimizer = AdamW(params, 1e-3, formats=formats)
    train(optimizer, params, range(2))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(source.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_refuses_a_state_that_is_no_tensor():
    params = parameters()
    optimizer = AdamW(params, 1e-2)
    train(optimizer, params, range(1))
    state = optimizer.state_dict()
    state["state"][0]["step"] = 1.0
    with pytest.raises(ValueError, match=r"step float for parameter 0; needs \[\] torch.float32"):
        optimizer.load_state_dict(state)


def test_a_deep_copy_keeps_its_formats():
    assert copy.deepcopy(AdamW(parameters(), 1e-2, formats=FP32_MOMENTS)).formats == FP32_MOMENTS
