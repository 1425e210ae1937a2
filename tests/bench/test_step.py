"""What a layer keeps for its backward pass, and what a checkpoint takes."""

import torch
from torch import nn

from octile.bench.step import _checkpoint_bytes, _kept_bytes, kept_for_backward
from octile.nn import Linear


def test_an_ordinary_layer_keeps_its_input():
    model, x = nn.Linear(128, 64), torch.randn(32, 128)
    assert kept_for_backward(model, lambda: model(x)) == x.nbytes


def test_a_converted_layer_keeps_its_input_in_8_bits_and_a_scale_a_tile():
    model, x = Linear(128, 64), torch.randn(32, 128)
    assert kept_for_backward(model, lambda: model(x)) == 32 * 128 + 32 * 4


def test_a_stack_of_layers_keeps_at_most_0_55_of_what_bf16_keeps():
    assert all(row.against.ratio <= 0.55 for row in _kept_bytes())


def test_a_quantised_parameter_takes_at_most_1_05_bytes_on_disk():
    assert _checkpoint_bytes().value <= 1.05
