"""The permute and unpermute kernels equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import permute as kernel
from octile.ops.permute import permute, unpermute, unpermute_add_, unpermute_backward
from octile.ops.quantize import quantize
from tests.kernels.triton.comparison import assert_same, extreme
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
every_shape = pytest.mark.parametrize(
    "shape", [(7, 3, 200), (5, 1, 128), (40, 2, 100), (1, 8, 9000), (3, 2, 5), (0, 2, 128)], ids=str
)


def _row_ids(t: int, k: int) -> Tensor:
    return torch.randperm(t * k, generator=torch.Generator().manual_seed(0)).view(t, k).to(torch.int32)


@pytest.mark.one_case
@every_shape
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_permute_moves_rows(shape: tuple[int, int, int], fmt: str):
    t, k, d = shape
    tiles, row_ids = quantize(extreme(t, d), 1, 128, fmt, True), _row_ids(t, k)
    order = row_ids.flatten().argsort().to(torch.int32)
    assert_same(kernel.launch(*tiles, row_ids, order), permute(*tiles, row_ids, order))


@pytest.mark.one_case
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("added", [True, False], ids=["added", ""])
def test_unpermute_sums_the_rows_of_a_token(shape: tuple[int, int, int], dtype: torch.dtype, added: bool):
    t, k, d = shape
    y, row_ids, add = torch.randn(t * k, d).to(dtype), _row_ids(t, k), torch.randn(t, d).to(dtype) if added else None
    assert_same([kernel.launch_back(y, row_ids, add)], [unpermute(y, row_ids, add)])


@pytest.mark.one_case
@pytest.mark.each_pair
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("added", [True, False], ids=["added", ""])
def test_unpermute_sums_weighted_rows(shape: tuple[int, int, int], dtype: torch.dtype, added: bool):
    t, k, d = shape
    y, row_ids, weight = torch.randn(t * k, d).to(dtype), _row_ids(t, k), torch.rand(2 * t, k)[::2]
    add = torch.randn(t, d).to(dtype) if added else None
    assert_same([kernel.launch_back(y, row_ids, add, weight)], [unpermute(y, row_ids, add, weight)])


@pytest.mark.one_case
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_added_to_rows(shape: tuple[int, int, int], dtype: torch.dtype):
    t, k, d = shape
    y, row_ids, add = torch.randn(t * k, d).to(dtype), _row_ids(t, k), torch.randn(t, d).to(dtype)
    x, weight = torch.randn(t, d).to(dtype), torch.rand(t, k)
    for others in ((None, None), (add, None), (add, weight)):
        found, expected = x.clone(), x.clone()
        kernel.launch_add(found, y, row_ids, *others)
        unpermute_add_(expected, y, row_ids, *others)
        assert_same([found], [expected])


@pytest.mark.one_case
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_weighted_rows(shape: tuple[int, int, int], dtype: torch.dtype):
    t, k, d = shape
    y, row_ids, weight = torch.randn(2 * t * k, d)[::2].to(dtype), _row_ids(t, k), torch.rand(k, t).mT
    dsum = torch.randn(d, t).to(dtype).mT
    found, expected = (f(dsum, y, row_ids, weight) for f in (kernel.launch_back_backward, unpermute_backward))
    assert_same(found[:1], expected[:1])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_gradients_of_their_token_and_no_other(bad: float):
    y, row_ids, weight, dsum = torch.randn(8, 130), _row_ids(4, 2), torch.rand(4, 2), torch.randn(4, 130)
    dsum[2, 7] = bad
    dy, dweight = kernel.launch_back_backward(dsum, y, row_ids, weight)
    assert [not row.isfinite().all() for row in dweight] == [False, False, True, False]
    assert sorted(row_ids[2].tolist()) == (~dy.isfinite().all(1)).nonzero().flatten().tolist()


def test_strides_do_not_matter():
    data, scale = quantize(extreme(6, 200), 1, 128, "int8", True)
    data, row_ids, y = data.mT.contiguous().mT, _row_ids(6, 3).mT.contiguous().mT, torch.randn(200, 18).mT
    order = row_ids.flatten().argsort().to(torch.int32).repeat_interleave(2)[::2]
    assert_same(kernel.launch(data, scale, row_ids, order), permute(data, scale, row_ids, order))
    add = torch.randn(200, 6).mT
    assert_same([kernel.launch_back(y, row_ids, add)], [unpermute(y, row_ids, add)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_sum_of_their_token_and_no_other(bad: float):
    y, row_ids = torch.randn(8, 130), _row_ids(4, 2)
    y[row_ids[2, 1], 7] = bad
    found = kernel.launch_back(y, row_ids, None)
    assert [not row.isfinite().all() for row in found] == [False, False, True, False]
