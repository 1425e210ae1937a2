"""octile::quantize and dequantize on a GPU equal those on the CPU, bit for bit."""

import pytest
import torch
from torch import Tensor

from octile.ops.quantize import dequantize, quantize

FORMATS = ["e4m3", "e5m2", "int8"]
BLOCKS = [(1, 128), (128, 1), (128, 128), (1, 1000), (700, 1000), (1, 32), (48, 80)]


def _assert_same_on_gpu(x: Tensor, block: tuple[int, int], fmt: str, power_of_2: bool = False) -> None:
    data, scale = quantize(x, *block, fmt, power_of_2)
    gpu_data, gpu_scale = quantize(x.cuda(), *block, fmt, power_of_2)
    torch.testing.assert_close(gpu_scale.cpu(), scale, rtol=0, atol=0, equal_nan=True)
    number = ~data.float().isnan()
    assert torch.equal(gpu_data.cpu().float().isnan(), ~number)
    assert torch.equal(gpu_data.cpu().view(torch.uint8)[number], data.view(torch.uint8)[number])


def _extreme(*shape: int) -> Tensor:
    """Magnitudes from FP32's subnormals up to its largest values, and zeros."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randint(-149, 128, shape).float())
    x[torch.rand(shape) < 0.1] = 0.0
    return x.clamp(-3e38, 3e38)


@pytest.mark.each_pair
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_ordinary_values(fmt: str, block: tuple[int, int], dtype: torch.dtype, power_of_2: bool):
    torch.manual_seed(1)
    _assert_same_on_gpu(
        (torch.randn(700, 1000) * torch.exp2(torch.randn(700, 1) * 4)).to(dtype), block, fmt, power_of_2
    )


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("block", [(1, 1), *BLOCKS])
@pytest.mark.parametrize("fmt", FORMATS)
def test_magnitudes_of_all_of_fp32(fmt: str, block: tuple[int, int], power_of_2: bool):
    _assert_same_on_gpu(_extreme(700, 1000), block, fmt, power_of_2)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_rounding_at_scale_one(fmt: str):
    # every pattern of the upper 24 bits of FP32 within the format's range; the largest value makes the scale 1
    x = (torch.arange(-(1 << 23), 1 << 23, dtype=torch.int32) << 8).view(torch.float32)
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[fmt]
    _assert_same_on_gpu(x[x.abs() <= largest].sort().values[None], (1, 1 << 25), fmt)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_and_inf_stay_visible(fmt: str, block: tuple[int, int], bad: float):
    torch.manual_seed(2)
    x = torch.randn(700, 1000)
    x[300, 400] = bad
    _assert_same_on_gpu(x, block, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_strides_and_batch_dimensions(fmt: str):
    torch.manual_seed(3)
    _assert_same_on_gpu(torch.randn(2, 3, 300, 70)[:, 1:].mT, (1, 128), fmt)


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 3, 4)])
def test_empty_tensors(shape: tuple[int, ...]):
    _assert_same_on_gpu(torch.empty(shape), (1, 128), "e4m3")


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize(fmt: str, block: tuple[int, int], out_dtype: torch.dtype):
    x = _extreme(700, 1000)
    x[0, 0] = float("nan")
    data, scale = quantize(x, *block, fmt, False)
    values = dequantize(data.cuda(), scale.cuda(), *block, out_dtype)
    expected = dequantize(data, scale, *block, out_dtype)
    torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (torch.ones(4, 1), ValueError, r"data's scale must be \(4, 2\) for \(4, 256\)"),
        (torch.ones(2, 4, 2), ValueError, r"data's scale must be \(4, 2\)"),
        (torch.ones(4, 2, dtype=torch.float64), TypeError, "data's scale must be float32"),
    ],
    ids=["shape", "batch", "dtype"],
)
def test_a_scale_that_does_not_fit_is_refused(scale: Tensor, error: type[Exception], message: str):
    data, _ = quantize(torch.ones(4, 256, device="cuda"), 1, 128, "e4m3", False)
    with pytest.raises(error, match=message):
        dequantize(data, scale.cuda(), 1, 128, torch.float32)


def test_a_scale_on_the_cpu_is_refused():
    data, scale = quantize(torch.ones(4, 256, device="cuda"), 1, 128, "e4m3", False)
    with pytest.raises(ValueError, match="data is on cuda:0 but its scale on cpu"):
        dequantize(data, scale.cpu(), 1, 128, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_values_in_another_dtype_are_refused(dtype: torch.dtype):
    data, scale = quantize(torch.ones(4, 256, device="cuda"), 1, 128, "e4m3", False)
    with pytest.raises(TypeError, match=f"out_dtype must be float32, bfloat16 or float16, not {dtype}"):
        dequantize(data, scale, 1, 128, dtype)
