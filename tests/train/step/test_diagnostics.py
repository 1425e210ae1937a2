"""Tests of the diagnostics: histograms of scales and the search for the first non-finite value."""

import pytest
import torch
from torch import nn

from octile.formats import E4M3, E5M2, E5M6, INT8
from octile.nn import Linear
from octile.nn.observer import _observers, report_quantization
from octile.scaled import quantize
from octile.train.step.diagnostics import add_histograms, first_non_finite, record_tile_scales, zero_blocks


def test_every_scale_is_counted_once():
    layer = Linear(256, 128, bias=False)
    with record_tile_scales() as histograms:
        layer(torch.randn(10, 256, requires_grad=True)).sum().backward()
    found = histograms()
    assert sum(found["x"]["count"]) == 10 * 2
    assert sum(found["w"]["count"]) == 1 * 2
    assert sum(found["dy"]["count"]) == 10 * 1


def test_histograms_of_ranks_are_added_up():
    first = {"x": {"log2": [-3, 0], "count": [1, 2]}}
    second = {"x": {"log2": [-4, 0], "count": [5, 1]}, "w": {"log2": [1], "count": [7]}}
    assert add_histograms([first, second, {}]) == {
        "x": {"log2": [-4, -3, 0], "count": [5, 1, 3]},
        "w": {"log2": [1], "count": [7]},
    }


def test_nan_scales_are_left_out():
    layer = Linear(128, 128, bias=False)
    with record_tile_scales() as histograms:
        layer(torch.full((2, 128), float("nan")))
    assert "x" not in histograms()


def test_the_observer_is_removed_afterwards():
    with record_tile_scales():
        pass
    assert _observers == []


def test_where_every_layer_is_finite_the_loss_is_named():
    model = nn.Sequential(nn.Linear(4, 4))
    assert first_non_finite(model, lambda: model(torch.randn(2, 4))) == "the loss"


def test_no_hook_remains():
    model = nn.Sequential(nn.Linear(4, 4))
    first_non_finite(model, lambda: model(torch.randn(2, 4)))
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (None, None)])
def test_scales_of_zero_blocks_are_not_counted(block):
    x = torch.zeros(300, 200)
    x[0, 0] = 448.0  # scale 1, like that of zero blocks: only this block counts
    with record_tile_scales() as histograms:
        report_quantization("x", quantize(x, block))
    assert histograms()["x"] == {"log2": [0], "count": [1]}


def test_zero_blocks_are_found_in_every_format():
    x = torch.zeros(3, 256)
    x[0, 130], x[1, 0], x[2, 255] = -1e-3, -0.0, float("nan")
    for fmt in (E4M3, E5M2, E5M6, INT8):
        assert zero_blocks(quantize(x, (1, 128), fmt)).tolist() == [[True, False], [True, True], [True, False]], (
            fmt.name
        )
