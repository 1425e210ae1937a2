"""Sums of partial results are those of torch, to the order of additions."""

import pytest
import torch

from octile.kernels.triton import partial_sums
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


@pytest.mark.parametrize("shape", [(1, 5), (3, 16, 70), (44, 100), (133, 3)], ids=str)
def test_sums(shape: tuple[int, ...]):
    partials = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(partial_sums.launch(partials), partials.double().sum(0).float(), rtol=2e-6, atol=2e-5)


def test_no_partials_are_zeros():
    assert torch.equal(partial_sums.launch(torch.empty(0, 4)), torch.zeros(4))


def test_no_columns():
    assert partial_sums.launch(torch.empty(3, 0)).shape == (0,)
