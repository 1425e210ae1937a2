"""The kernel that rotates and quantizes the indexer's rows equals the reference bit for bit."""

import pytest
import torch

from octile.kernels.triton import index_rows as kernel
from octile.nn.rope import Rope
from octile.ops.index_rows import index_rows
from tests.kernels.triton.comparison import assert_same, finite

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize(("width", "rotary"), [(2, 2), (16, 0), (32, 8), (64, 64), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_those_of_the_reference(width: int, rotary: int, dtype: torch.dtype, interleaved: bool):
    x = finite(2, 3, 2, width).clamp(-1e30, 1e30).to(dtype)
    x[0, 1, 0, 1], x[1, 0, 1, 0], x[1, 2, 1] = torch.nan, torch.inf, 0.0
    cos_sin = Rope(rotary).cos_sin(torch.arange(5, 8)) if rotary else (torch.zeros(3, 0), torch.zeros(3, 0))
    assert_same(kernel.launch(x, *cos_sin, interleaved), index_rows(x, *cos_sin, interleaved))


def test_rows_of_any_strides():
    x, cos_sin = finite(4, 5, 3, 64)[::2, 1:4, :, :32].transpose(1, 2), Rope(8).cos_sin(torch.arange(3))
    assert_same(kernel.launch(x, *cos_sin), index_rows(x, *cos_sin))


def test_no_rows():
    data, scale = kernel.launch(torch.zeros(1, 0, 4, 32), torch.zeros(0, 4), torch.zeros(0, 4))
    assert (data.shape, scale.shape) == ((1, 0, 4, 32), (1, 0, 4))
