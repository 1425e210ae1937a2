"""Looking leaves no trace."""

import pytest
import torch
from torch import nn

from octile.formats import E4M3, E5M2, E5M6, INT8
from octile.nn import Linear
from octile.nn.observer import _observers, report_quantization
from octile.scaled import quantize
from octile.train.diagnostics import first_non_finite, record_tile_scales, zero_blocks


def test_every_scale_is_counted_once():
    layer = Linear(256, 128, bias=False)
    with record_tile_scales() as histograms:
        layer(torch.randn(10, 256, requires_grad=True)).sum().backward()
    found = histograms()
    assert sum(found["x"]["count"]) == 10 * 2
    assert sum(found["w"]["count"]) == 1 * 2
    assert sum(found["dy"]["count"]) == 10 * 1


def test_scales_that_are_no_numbers_are_left_out():
    layer = Linear(128, 128, bias=False)
    with record_tile_scales() as histograms:
        layer(torch.full((2, 128), float("nan")))
    assert "x" not in histograms()


def test_nobody_watches_afterwards():
    with record_tile_scales():
        pass
    assert _observers == []


def test_a_healthy_model_blames_the_loss():
    model = nn.Sequential(nn.Linear(4, 4))
    assert first_non_finite(model, lambda: model(torch.randn(2, 4))) == "the loss"


def test_no_hook_is_left():
    model = nn.Sequential(nn.Linear(4, 4))
    first_non_finite(model, lambda: model(torch.randn(2, 4)))
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (None, None)])
def test_blocks_of_zeros_have_no_scale_to_count(block):
    x = torch.zeros(300, 200)
    x[0, 0] = 448.0  # scale 1, as those of zeros: only its own block counts
    with record_tile_scales() as histograms:
        report_quantization("x", quantize(x, block))
    assert histograms()["x"] == {"log2": [0], "count": [1]}


def test_a_block_of_zeros_is_known_in_every_format():
    x = torch.zeros(3, 256)
    x[0, 130], x[1, 0], x[2, 255] = -1e-3, -0.0, float("nan")
    for fmt in (E4M3, E5M2, E5M6, INT8):
        assert zero_blocks(quantize(x, (1, 128), fmt)).tolist() == [[True, False], [True, True], [True, False]], (
            fmt.name
        )
