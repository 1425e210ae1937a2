"""Casts give pairs that the products take."""

import pytest
import torch

from octile.compat.deep_gemm import utils
from tests.compat.deep_gemm.conftest import random, values

CASTS = {
    "token": (utils.per_token_cast_to_fp8, (1, 128)),
    "channel": (utils.per_channel_cast_to_fp8, (128, 1)),
    "block": (utils.per_block_cast_to_fp8, (128, 128)),
}


@pytest.mark.parametrize(("cast", "block"), CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_a_cast_keeps_values_to_half_a_step(cast, block, use_ue8m0):
    x = random(200, 300)
    data, scale = cast(x, use_ue8m0)
    step = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:200, :300] * 2.0**-9
    assert ((values((data, scale), *block) - x).abs() <= torch.maximum(x.abs() / 16, step)).all()
    assert bool((scale.frexp().mantissa == 0.5).all()) == use_ue8m0


@pytest.mark.parametrize(("x", "y", "rounded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8)])
def test_align(x, y, rounded):
    assert utils.align(x, y) == rounded
    assert utils.ceil_div(x, y) == rounded // y
