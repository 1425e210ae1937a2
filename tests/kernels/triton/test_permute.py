"""The permute and unpermute kernels equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import permute as kernel
from octile.ops.permute import permute, unpermute
from octile.ops.quantize import quantize
from tests.kernels.triton.comparison import assert_same, extreme

pytestmark = pytest.mark.usefixtures("gpu")
every_shape = pytest.mark.parametrize(
    "shape", [(7, 3, 200), (5, 1, 128), (1, 8, 9000), (3, 2, 5), (0, 2, 128)], ids=str
)


def _places(t: int, k: int) -> Tensor:
    return torch.randperm(t * k, generator=torch.Generator().manual_seed(0)).view(t, k).to(torch.int32)


@every_shape
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_permute_moves_rows(shape: tuple[int, int, int], fmt: str):
    t, k, d = shape
    tiles, place = quantize(extreme(t, d), 1, 128, fmt, True), _places(t, k)
    assert_same(kernel.launch(*tiles, place), permute(*tiles, place))


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("added", [True, False], ids=["added", ""])
def test_unpermute_sums_the_rows_of_a_token(shape: tuple[int, int, int], dtype: torch.dtype, added: bool):
    t, k, d = shape
    y, place, add = torch.randn(t * k, d).to(dtype), _places(t, k), torch.randn(t, d).to(dtype) if added else None
    assert_same([kernel.launch_back(y, place, add)], [unpermute(y, place, add)])


def test_strides_do_not_matter():
    data, scale = quantize(extreme(6, 200), 1, 128, "int8", True)
    data, place, y = data.mT.contiguous().mT, _places(6, 3).mT.contiguous().mT, torch.randn(200, 18).mT
    assert_same(kernel.launch(data, scale, place), permute(data, scale, place))
    add = torch.randn(200, 6).mT
    assert_same([kernel.launch_back(y, place, add)], [unpermute(y, place, add)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_sum_of_their_token_and_no_other(bad: float):
    y, place = torch.randn(8, 130), _places(4, 2)
    y[place[2, 1], 7] = bad
    found = kernel.launch_back(y, place, None)
    assert [not row.isfinite().all() for row in found] == [False, False, True, False]
