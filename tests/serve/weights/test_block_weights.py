"""Tests of weights that are joined or stacked, so that one GEMM multiplies by them."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from octile.formats import BLOCK
from octile.scaled import ScaledTensor, quantize
from octile.serve.weights.block_weights import Part, join, stack


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


@given(dim=st.integers(0, 1), blocks=st.tuples(st.integers(0, 2), st.integers(1, 2)), seed=st.integers(0, 9))
def test_a_part_of_an_fp8_weight_has_the_values_of_the_weight(dim, blocks, seed):
    first, n = blocks
    weight = quantize(torch.randn(500, 520, generator=torch.Generator().manual_seed(seed)), BLOCK)
    start, stop = 128 * first, min(128 * (first + n), weight.shape[dim])
    part = Part(dim, start, stop).of(weight)
    assert isinstance(part, ScaledTensor)
    expected = weight.dequantize().narrow(dim, start, stop - start)
    assert torch.equal(part.dequantize(), expected)
    assert (part.data.is_contiguous(), part.scale.is_contiguous()) == (True, True)


def test_a_part_in_high_precision_may_begin_anywhere():
    weight = torch.arange(30.0).view(5, 6)
    assert torch.equal(Part(0, 1, 3).of(weight), weight[1:3])
    assert torch.equal(Part(1, 5, 6).of(weight), weight[:, 5:])
    assert Part(1, 2, 2).of(weight).shape == (5, 0)
