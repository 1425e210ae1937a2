"""RMSNorm's kernel equals the reference bit for bit, given the kernel's rstd."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import norm
from octile.ops.norm import normalized, rms_norm, rms_norm_backward, rms_norm_quantize
from octile.ops.quantize import STORAGE_DTYPES, quantize
from tests.kernels.triton.comparison import assert_same, finite
from tests.kernels.triton.gpus import any_gpu

pytestmark = pytest.mark.usefixtures("gpu")


def _check(x: Tensor, weight: Tensor, fmt: str = "e4m3", power_of_2: bool = False, eps: float = 1e-6) -> None:
    *found, rstd, y = norm.launch(x, weight, eps, STORAGE_DTYPES[fmt], power_of_2, True)
    torch.testing.assert_close(rstd, rms_norm_quantize(x, weight, eps, fmt, False)[2], rtol=2.0**-20, atol=0)
    values = normalized(x, rstd, weight)
    assert_same([*found, y], [*quantize(values, 1, 128, fmt, power_of_2), values.to(x.dtype).contiguous()])
    *again, rstd_again, nothing = norm.launch(x, weight, eps, STORAGE_DTYPES[fmt], power_of_2)
    assert_same([*again, rstd_again], [*found, rstd])
    assert nothing.shape == (0, x.shape[1])


@pytest.mark.each_pair
@pytest.mark.parametrize("shape", [(5, 300), (37, 128), (1, 7), (3, 5000), (0, 128)], ids=str)
@pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])
def test_any_shape(shape: tuple[int, int], power_of_2: bool):
    _check(finite(*shape), torch.rand(shape[1]) + 0.5, power_of_2=power_of_2)


@pytest.mark.one_case
@pytest.mark.parametrize("fmt", ["e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(fmt: str, dtype: torch.dtype):
    x = torch.randn(300, 20).to(dtype).mT
    _check(x, torch.rand(600)[::2].to(dtype), fmt)


def test_a_row_of_zeros_is_zeros():
    _check(torch.zeros(2, 200), torch.ones(200))


def test_nan_stays_in_its_row():
    x = torch.randn(3, 200)
    x[1, 3] = float("nan")
    data, scale, rstd, _ = norm.launch(x, torch.ones(200), 1e-6, torch.float8_e4m3fn, False)
    assert rstd.isnan().tolist() == scale.isnan().all(1).tolist() == data.float().isnan().all(1).tolist()
    assert rstd.isnan().tolist() == [False, True, False]


@any_gpu
@pytest.mark.parametrize("shape", [(5, 300), (37, 128), (1, 7), (3, 5000), (0, 128), (40, 384)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_high_precision(shape: tuple[int, int], dtype: torch.dtype):
    x, weight = finite(*shape).clamp(-100, 100).to(dtype), torch.rand(2 * shape[1])[::2] + 0.5
    y, rstd = norm.launch_high_precision(x.mT.contiguous().mT, weight, 1e-6)
    expected = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(rstd, expected[1], rtol=2.0**-20, atol=0)
    assert_same([y], [normalized(x, rstd, weight).to(dtype)])
    assert y.stride() == expected[0].stride()


@any_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row_in_high_precision(bad: float):
    x = torch.randn(40, 200)
    x[1, 3] = bad
    found, expected = norm.launch_high_precision(x, torch.ones(200), 1e-6)[0], rms_norm(x, torch.ones(200), 1e-6)[0]
    assert torch.equal(found.isnan(), expected.isnan())
    assert found[2:].isfinite().all()


@pytest.mark.one_case
@any_gpu
@pytest.mark.parametrize("shape", [(5, 300), (70, 128), (1, 7), (3, 5000), (0, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_gradients(shape: tuple[int, int], dtype: torch.dtype, added: bool):
    x, weight, dy = finite(*shape).to(dtype), torch.rand(2 * shape[1])[::2] + 0.5, torch.randn(shape).to(dtype)
    rstd = rms_norm_quantize(x, weight, 1e-6, "e4m3", False)[2]
    add = torch.randn(shape).to(dtype) if added else None
    dx, dweight = norm.launch_backward(dy.mT.contiguous().mT, x, weight, rstd, add)
    expected_dx, expected_dweight = rms_norm_backward(dy, x, weight, rstd, add)
    assert (dx.dtype, dx.stride()) == (expected_dx.dtype, expected_dx.stride())
    size = expected_dx.float().abs().amax(-1, keepdim=True)
    assert ((dx.float() - expected_dx.float()).abs() <= (2.0**-8 if dtype == torch.bfloat16 else 1e-5) * size).all()
    torch.testing.assert_close(dweight, expected_dweight, rtol=1e-5, atol=1e-5)


@pytest.mark.one_case
@any_gpu
@pytest.mark.parametrize("shape", [(70, 300), (1, 7), (3, 5000), (0, 128)], ids=str)
@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=["second", "third", "both"])
def test_gradients_of_several_readers(shape: tuple[int, int], given: tuple[bool, bool]):
    x, weight, dy, dy2, dy3, add = (
        t.bfloat16() for t in (finite(*shape), torch.rand(shape[1]), *torch.randn(4, *shape))
    )
    others = dy2.mT.contiguous().mT if given[0] else None, dy3 if given[1] else None
    rstd = rms_norm_quantize(x, weight, 1e-6, "e4m3", False)[2]
    dx, dweight = norm.launch_backward(dy, x, weight, rstd, add, *others)
    expected_dx, expected_dweight = rms_norm_backward(dy, x, weight, rstd, add, *others)
    size = expected_dx.float().abs().amax(-1, keepdim=True)
    assert ((dx.float() - expected_dx.float()).abs() <= 2.0**-8 * size).all()
    torch.testing.assert_close(dweight, expected_dweight, rtol=1e-5, atol=1e-5)


@any_gpu
def test_gradients_of_more_rows_than_programs_run_at_once():
    x, weight, dy = torch.randn(700, 130), torch.rand(130), torch.randn(700, 130)
    rstd = torch.rand(700) + 0.5
    for found, expected in zip(
        norm.launch_backward(dy, x, weight, rstd), rms_norm_backward(dy, x, weight, rstd), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
