"""The quantization kernels equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from octile import formats
from octile.kernels.triton import quantize
from octile.ops import quantize as reference
from octile.ops.quantize import STORAGE_DTYPES
from tests.kernels.triton.comparison import assert_same, extreme, finite
from tests.kernels.triton.gpus import any_gpu, every_format, hopper

pytestmark = pytest.mark.usefixtures("gpu")


def _assert_same(x: Tensor, block: tuple[int, int], fmt: str, power_of_2: bool = False) -> None:
    found = quantize.launch(x, *block, STORAGE_DTYPES[fmt], power_of_2)
    assert_same(found, reference.quantize(x, *block, fmt, power_of_2))


@pytest.mark.one_case
@hopper
@pytest.mark.parametrize(
    "block",
    [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 200), (131, 200), (16, 32), (50, 70)],
    ids=["tile", "column tile", "block", "MX", "MX column", "row", "tensor", "small block", "no power of two"],
)
def test_blocks_on_a_ragged_matrix(block: tuple[int, int]):
    torch.manual_seed(1)
    _assert_same(torch.randn(131, 200) * torch.exp2(torch.randn(131, 1) * 8), block, "e4m3")


@pytest.mark.one_case
@every_format
@pytest.mark.parametrize("power_of_2", [False, True])
def test_magnitudes_of_all_of_fp32(fmt: str, power_of_2: bool):
    _assert_same(extreme(40, 128), (1, 1), fmt, power_of_2)
    _assert_same(extreme(3, 256), (1, 128), fmt, power_of_2)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_rounding_in_a_block_with_scale_one(fmt: str):
    # All values, the midpoints between them, and the values next to a midpoint; the largest value makes the scale 1.
    values = torch.arange(256, dtype=torch.uint8).view(STORAGE_DTYPES[fmt]).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(float("inf"))
    x = torch.cat([values, middle, middle.nextafter(inf), middle.nextafter(-inf)])
    _assert_same(x[None], (1, x.numel()), fmt)


@pytest.mark.one_case
@pytest.mark.each_pair
@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block", [(1, 128), (6, 200)], ids=["one pass", "two passes"])
def test_nan_and_inf_stay_visible(block: tuple[int, int], bad: float, fmt: str):
    x = torch.randn(10, 300)
    x[1, 140] = bad
    _assert_same(x, block, fmt, power_of_2=True)
    _assert_same(x, block, fmt)


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype):
    _assert_same(torch.randn(9, 200).to(dtype), (1, 128), "e4m3")


@hopper
def test_a_block_larger_than_a_program_is_one_block():
    _assert_same(torch.randn(3, 20000), (3, 20000), "e4m3")


@hopper
def test_batch_dimensions_and_strides():
    x = torch.randn(2, 3, 200, 10)[:, 1:].mT
    _assert_same(x, (1, 128), "e4m3")
    _assert_same(x, (3, 50), "e4m3")


@hopper
@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 3, 4)])
def test_empty_tensors(shape: tuple[int, ...]):
    _assert_same(torch.empty(shape), (1, 128), "e4m3")


@pytest.mark.one_case
@pytest.mark.each_pair
@every_format
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize(block: tuple[int, int], fmt: str, dtype: torch.dtype):
    data, scale = reference.quantize(extreme(2, 140, 150)[:, 3:].mT, *block, fmt, False)
    values = quantize.launch_dequantize(data, scale, *block, dtype)
    expected = reference.dequantize(data, scale, *block, dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_encoded_value_dequantizes(dtype: torch.dtype):
    encoded = torch.arange(256, dtype=torch.uint8).view(1, 256).view(dtype)
    values = quantize.launch_dequantize(encoded, torch.ones(1, 1), 1, 256, torch.float32)
    torch.testing.assert_close(values, encoded.float(), rtol=0, atol=0, equal_nan=True)


# E5M6: two values in three bytes


def _same_values(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Check for the same bytes, except that any NaN equals any other."""
    (data, scale), (expected_data, expected_scale) = found, expected
    assert (data.dtype, data.shape) == (expected_data.dtype, expected_data.shape)
    numbers, expected_numbers = reference.decode(data), reference.decode(expected_data)
    torch.testing.assert_close(numbers, expected_numbers, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    if not expected_numbers.isnan().any():
        assert torch.equal(data, expected_data)


@pytest.mark.one_case
@pytest.mark.each_pair
@any_gpu
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("k", [200, 130])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 50), (1, 200)])
def test_e5m6(block: tuple[int, int], k: int, power_of_2: bool):
    x = finite(2, 5, k)
    _same_values(quantize.launch(x, *block, torch.uint8, power_of_2), reference.quantize(x, *block, "e5m6", power_of_2))


@any_gpu
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_e5m6_of_extreme_values(bad: float):
    x = extreme(30, 256)
    x[3, 200] = bad
    _same_values(quantize.launch(x, 1, 128, torch.uint8, True), reference.quantize(x, 1, 128, "e5m6", True))


@any_gpu
def test_every_encoded_e5m6_value_is_written_and_read():
    encoded = torch.arange(4096)
    x = formats.E5M6.decode(encoded)[None]
    x = x.masked_fill(~x.isfinite(), 0.0)
    data, scale = quantize.launch(x, 1, 4096, torch.uint8, False)
    assert scale.item() == 1
    assert torch.equal(reference.decode(data), x)
    packed = formats.pack12(encoded)[None]
    values = quantize.launch_dequantize(packed, torch.ones(1, 1), 1, 4096, torch.float32)
    torch.testing.assert_close(values, reference.decode(packed), rtol=0, atol=0, equal_nan=True)


@any_gpu
@pytest.mark.parametrize("block", [(1, 128), (3, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_e5m6(block: tuple[int, int], dtype: torch.dtype):
    data, scale = reference.quantize(extreme(2, 30, 150)[:, 3:], *block, "e5m6", False)
    values = quantize.launch_dequantize(data, scale, *block, dtype)
    expected = reference.dequantize(data, scale, *block, dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@any_gpu
def test_e5m6_in_blocks_of_odd_width_is_refused():
    with pytest.raises(ValueError, match="even number of columns on a GPU, not 75"):
        quantize.launch(torch.zeros(3, 150), 3, 75, torch.uint8, False)


# A given scale


@pytest.mark.each_pair
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [0.37, 2.0**-10, float("nan"), float("inf")])
def test_a_given_scale(fmt: str, scale: float):
    x, given = extreme(2, 35, 130)[..., 1:].mT, torch.tensor([scale])
    x[0, 3, 4], x[0, 5, 6] = float("nan"), float("-inf")
    found = quantize.launch_with_scale(x, given, STORAGE_DTYPES[fmt])
    assert_same([found], [reference.quantize_with_scale(x, given, fmt)])
