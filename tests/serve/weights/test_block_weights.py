"""Tests of weights that are joined or stacked, so that one GEMM multiplies by them."""

import pytest
import torch

from octile.formats import BLOCK
from octile.scaled import quantize
from octile.serve.weights.block_weights import join, stack


def test_fp8_weights_of_whole_blocks_are_joined_and_others_are_not():
    first, second, third = (quantize(torch.randn(n, 130), BLOCK) for n in (128, 40, 128))
    joined = join([first, second], [[128], [30, 10]])
    assert joined.sizes == ((128, 30, 10),)
    assert torch.equal(joined.weights[0].dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    assert len(join([second, third], [[40], [128]]).weights) == 2
    assert len(join([first, torch.randn(1, 130)], [[128], [1]]).weights) == 2


def test_weights_in_high_precision_are_joined():
    weights = torch.randn(3, 5, 4), torch.randn(3, 2, 4)
    joined = join(weights, [[5], [1, 1]])
    assert joined.sizes == ((5, 1, 1),)
    assert torch.equal(joined.weights[0], torch.cat(weights, dim=1))


def test_experts_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="but 1 of 2 are"):
        stack([quantize(torch.randn(3, 4), BLOCK), torch.randn(3, 4)])
