"""The kernels that quantize and transpose equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import transpose
from octile.ops import transpose as reference
from octile.ops.groups import align_groups
from octile.ops.quantize import STORAGE_DTYPES, quantize
from tests.kernels.triton.comparison import assert_same, extreme
from tests.kernels.triton.gpus import any_gpu, every_format, hopper

pytestmark = pytest.mark.usefixtures("gpu")
both_scales = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])


def _ordinary(shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape) * torch.exp2(torch.randn(*shape[:-1], 1) * 8)


def _both(x: Tensor, power_of_2: bool, fmt: str = "e4m3") -> None:
    found = transpose.launch_rows_and_columns(x, STORAGE_DTYPES[fmt], power_of_2)
    assert_same(found, reference.quantize_rows_and_columns(x, fmt, power_of_2))


def _block(x: Tensor, power_of_2: bool, fmt: str = "e4m3") -> None:
    found = transpose.launch_block(x, STORAGE_DTYPES[fmt], power_of_2)
    assert_same(found, reference.quantize_and_transpose(x, fmt, power_of_2))


def _requantize(x: Tensor, power_of_2: bool, fmt: str = "e4m3") -> None:
    data, scale = quantize(x, 1, 128, fmt, power_of_2)
    found = transpose.launch_requantize(data, scale, data.dtype, power_of_2)
    assert_same(found, reference.requantize_transposed(data, scale, power_of_2))


every_operator = pytest.mark.parametrize("operator", [_both, _block, _requantize], ids=["both", "block", "again"])


@hopper
def test_many_matrices():
    groups = [[_ordinary((2, 140, 208))], [_ordinary((128, 144)), _ordinary((5, 144))]]
    weights = [w for group in groups for w in group]
    for with_transposed in (True, False):
        found = transpose.launch_matrices(groups, torch.float8_e4m3fn, True, True, with_transposed)
        expected = reference.quantize_matrices(weights, [1, 2], "e4m3", True, with_transposed)
        assert_same([part for results in found for part in results], expected)


@hopper
def test_rows_and_columns_of_parts():
    parts = [_ordinary((130, 128)), _ordinary((130, 80))]
    found = transpose.launch_joined_rows_and_columns(parts, torch.float8_e4m3fn, True)
    assert_same(found, reference.quantize_joined_rows_and_columns(parts, "e4m3", True))


@pytest.mark.one_case
@hopper
@every_operator
@pytest.mark.parametrize("shape", [(130, 200), (128, 128), (1, 5), (2, 140, 208), (0, 128), (5, 0)], ids=str)
def test_any_shape(operator, shape: tuple[int, ...]):
    operator(_ordinary(shape), False)


@pytest.mark.one_case
@hopper
@every_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [140, 144], ids=["one by one", "vectorized"])
def test_half_precision_and_strides(operator, k: int, dtype: torch.dtype):
    operator(torch.randn(2, k, 32).to(dtype)[..., 16:].mT, True)


@pytest.mark.one_case
@every_format
@every_operator
@both_scales
def test_magnitudes_of_all_of_fp32(operator, fmt: str, power_of_2: bool):
    operator(extreme(20, 160), power_of_2, fmt)


@pytest.mark.one_case
@pytest.mark.each_pair
@every_format
@every_operator
@both_scales
def test_nan_and_inf_stay_visible(operator, fmt: str, power_of_2: bool):
    x = _ordinary((10, 400))
    x[1, 7], x[3, 130], x[4, 300] = float("nan"), float("inf"), float("-inf")  # each in a tile and block of its own
    operator(x, power_of_2, fmt)


@pytest.mark.one_case
@every_format
@both_scales
@pytest.mark.parametrize("shape", [(130, 200), (5, 8)], ids=str)
def test_e5m6_becomes_8_bits(shape: tuple[int, ...], power_of_2: bool, fmt: str):
    data, scale = quantize(extreme(*shape), 1, 128, "e5m6", True)
    found = transpose.launch_requantize(data, scale, STORAGE_DTYPES[fmt], power_of_2)
    assert_same(found, reference.requantize_transposed(data, scale, power_of_2, fmt))


def _groups(k: int, power_of_2: bool, fmt: str) -> None:
    x, dtype = _ordinary((300, k)), STORAGE_DTYPES[fmt]
    x[7, 3] = float("nan")
    tiles, _ = align_groups(torch.tensor([130, 130, 137, 290], dtype=torch.int32), 300)
    found = transpose.launch_rows_and_columns(x, dtype, power_of_2, tiles)
    assert_same(found, reference.quantize_rows_and_columns(x, fmt, power_of_2, tiles))
    data, scale = quantize(x, 1, 128, fmt, power_of_2)
    for rows in (None, torch.randperm(300).to(torch.int32)):
        for in_blocks in (False, True):
            found = transpose.launch_requantize(data, scale, dtype, power_of_2, rows, tiles, in_blocks)
            settings = (power_of_2, fmt, rows, tiles, in_blocks)
            assert_same(found, reference.requantize_transposed(data, scale, *settings))


@pytest.mark.slow
@hopper
@both_scales
def test_groups(power_of_2: bool):
    _groups(200, power_of_2, "e4m3")


@pytest.mark.one_case
@every_format
def test_groups_in_every_format(fmt: str):
    _groups(9, True, fmt)


@hopper
@both_scales
def test_blocks_without_groups(power_of_2: bool):
    data, scale = quantize(_ordinary((2, 130, 200)), 1, 128, "e4m3", power_of_2)
    found = transpose.launch_requantize(data, scale, data.dtype, power_of_2, in_blocks=True)
    assert_same(found, reference.requantize_transposed(data, scale, power_of_2, in_blocks=True))


@hopper
def test_rows_in_another_order():
    rows = torch.randint(0, 130, (300,)).to(torch.int32)[::2]
    data, scale = quantize(extreme(130, 200), 1, 128, "e4m3", True)
    found = transpose.launch_requantize(data, scale, data.dtype, True, rows)
    assert_same(found, reference.requantize_transposed(data, scale, True, None, rows))


@hopper
@both_scales
def test_joined_weights(power_of_2: bool):
    weights = [_ordinary((128, 208)), _ordinary((5, 208))]
    for with_data, with_transposed in ((True, True), (True, False), (False, True)):
        found = transpose.launch_joined(weights, torch.float8_e4m3fn, power_of_2, with_data, with_transposed)
        assert_same(found, reference.quantize_joined.reference(weights, "e4m3", power_of_2, with_data, with_transposed))


@any_gpu
@pytest.mark.parametrize("shape", [(130, 200), (2, 5, 9), (0, 3), (128, 256)], ids=str)
def test_encoded_values_are_only_moved(shape: tuple[int, ...]):
    data = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for values in (data, data.mT):
        found, expected = transpose.launch_encoded(values), reference.transpose_encoded.reference(values)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert found.stride() == expected.stride()
