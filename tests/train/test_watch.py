"""Looking leaves no trace."""

import torch
from torch import nn

from octile.nn import Linear
from octile.nn.functional import _watchers
from octile.train.watch import first_non_finite, tile_scales


def test_every_scale_is_counted_once():
    layer = Linear(256, 128, bias=False)
    with tile_scales() as histograms:
        layer(torch.randn(10, 256, requires_grad=True)).sum().backward()
    found = histograms()
    assert sum(found["x"]["count"]) == 10 * 2
    assert sum(found["w"]["count"]) == 1 * 2
    assert sum(found["dy"]["count"]) == 10 * 1


def test_scales_that_are_no_numbers_are_left_out():
    layer = Linear(128, 128, bias=False)
    with tile_scales() as histograms:
        layer(torch.full((2, 128), float("nan")))
    assert "x" not in histograms()


def test_nobody_watches_afterwards():
    with tile_scales():
        pass
    assert _watchers == []


def test_a_healthy_model_blames_the_loss():
    model = nn.Sequential(nn.Linear(4, 4))
    assert first_non_finite(model, lambda: model(torch.randn(2, 4))) == "the loss"


def test_no_hook_is_left():
    model = nn.Sequential(nn.Linear(4, 4))
    first_non_finite(model, lambda: model(torch.randn(2, 4)))
    assert not model[0]._forward_hooks
