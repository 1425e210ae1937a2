"""The quantising kernels are bit for bit the reference."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import quantize
from octile.ops import quantize as reference

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def _assert_same(x: Tensor, block: tuple[int, int], fmt: str, power_of_2: bool = False) -> None:
    data, scale = quantize.launch(x, *block, DTYPES[fmt], power_of_2)
    expected_data, expected_scale = reference.quantize(x, *block, fmt, power_of_2)
    assert (data.dtype, data.shape, data.is_contiguous()) == (DTYPES[fmt], x.shape, True)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(data.float(), expected_data.float(), rtol=0, atol=0, equal_nan=True)
    sign, expected_sign = data.view(torch.int8) < 0, expected_data.view(torch.int8) < 0
    assert torch.equal(sign[~data.float().isnan()], expected_sign[~data.float().isnan()]), "the sign of a zero differs"


def _ugly(*shape: int) -> Tensor:
    """Magnitudes from FP32's subnormals up to its largest numbers, zeros and ties."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randint(-149, 128, shape).float())
    x[torch.rand(shape) < 0.1] = 0.0
    return x.clamp(-3e38, 3e38)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize(
    "block",
    [(1, 128), (128, 1), (128, 128), (1, 200), (131, 200), (16, 32), (50, 70)],
    ids=["tile", "column tile", "block", "row", "tensor", "small block", "no power of two"],
)
def test_blocks_on_a_ragged_matrix(block: tuple[int, int], fmt: str):
    torch.manual_seed(1)
    _assert_same(torch.randn(131, 200) * torch.exp2(torch.randn(131, 1) * 8), block, fmt)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_magnitudes_of_all_of_fp32(fmt: str, power_of_2: bool):
    _assert_same(_ugly(40, 128), (1, 1), fmt, power_of_2)
    _assert_same(_ugly(3, 256), (1, 128), fmt, power_of_2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_number_that_rounds_differently_in_a_block_with_scale_one(fmt: str):
    # all values, the midpoints between them, and what lies just beside a midpoint; the largest value makes the scale 1
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt]).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(float("inf"))
    x = torch.cat([values, middle, middle.nextafter(inf), middle.nextafter(-inf)])
    _assert_same(x[None], (1, x.numel()), fmt)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block", [(1, 128), (6, 200)], ids=["one pass", "two passes"])
def test_nan_and_inf_stay_visible(block: tuple[int, int], bad: float, fmt: str):
    x = torch.randn(10, 300)
    x[1, 140] = bad
    _assert_same(x, block, fmt, power_of_2=True)
    _assert_same(x, block, fmt)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype):
    _assert_same(torch.randn(9, 200).to(dtype), (1, 128), "e4m3")


@pytest.mark.usefixtures("gpu")
def test_a_block_larger_than_a_program_is_one_block():
    _assert_same(torch.randn(3, 20000), (3, 20000), "e4m3")


@pytest.mark.usefixtures("gpu")
def test_batch_dimensions_and_strides():
    x = torch.randn(2, 3, 200, 10)[:, 1:].mT
    _assert_same(x, (1, 128), "e4m3")
    _assert_same(x, (3, 50), "e4m3")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 3, 4)])
def test_empty_tensors(shape: tuple[int, ...]):
    _assert_same(torch.empty(shape), (1, 128), "e4m3")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize(block: tuple[int, int], fmt: str, dtype: torch.dtype):
    data, scale = reference.quantize(_ugly(2, 140, 150)[:, 3:].mT, *block, fmt, False)
    values = quantize.launch_dequantize(data, scale, *block, dtype)
    expected = reference.dequantize(data, scale, *block, dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_dequantizes(dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(dtype)
    values = quantize.launch_dequantize(codes, torch.ones(1, 1), 1, 256, torch.float32)
    torch.testing.assert_close(values, codes.float(), rtol=0, atol=0, equal_nan=True)
