"""Tests of ranges of rows and columns of weights."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from octile.formats import BLOCK
from octile.scaled import ScaledTensor, quantize
from octile.serve.weights.weight_part import Part


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
