"""Quantization gives pairs that the GEMMs take."""

import pytest
import torch

from octile.compat.deep_gemm import utils
from octile.ops.scale_layouts import unpack_ue8m0
from tests.compat.deep_gemm.conftest import random, values

CASTS = {
    "token": (utils.per_token_cast_to_fp8, (1, 128)),
    "channel": (utils.per_channel_cast_to_fp8, (128, 1)),
    "block": (utils.per_block_cast_to_fp8, (128, 128)),
}


@pytest.mark.parametrize(("cast", "block"), CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_quantization_keeps_values_to_half_a_step(cast, block, use_ue8m0):
    x = random(200, 300)
    data, scale = cast(x, use_ue8m0)
    step = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:200, :300] * 2.0**-9
    assert ((values((data, scale), *block) - x).abs() <= torch.maximum(x.abs() / 16, step)).all()
    assert bool((scale.frexp().mantissa == 0.5).all()) == use_ue8m0


def test_the_scales_of_tokens_may_be_packed():
    x = random(20, 700)
    data, packed = utils.per_token_cast_to_fp8(x, True, use_packed_ue8m0=True)
    expected = utils.per_token_cast_to_fp8(x, True)
    assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(unpack_ue8m0(packed, 6), expected[1])


@pytest.mark.parametrize(("cast", "block"), CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gran_k": 0}, ValueError, "gran_k must be at least 1, not 0"),
        ({"gran_k": None}, TypeError, "gran_k must be an integer, not None"),
        ({"use_ue8m0": "yes"}, TypeError, "use_ue8m0 must be True or False, not 'yes'"),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, not list"),
    ],
)
def test_other_arguments_are_refused(cast, block, arguments, error, message):
    with pytest.raises(error, match=message):
        cast(**{"x": random(20, 30), "use_ue8m0": False} | arguments)


def test_only_powers_of_two_are_packed():
    with pytest.raises(ValueError, match="use_packed_ue8m0 must come with use_ue8m0"):
        utils.per_token_cast_to_fp8(random(20, 700), False, use_packed_ue8m0=True)


@pytest.mark.parametrize(("x", "y", "rounded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8)])
def test_align(x, y, rounded):
    assert utils.align(x, y) == rounded
    assert utils.ceil_div(x, y) == rounded // y
