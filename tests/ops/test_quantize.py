"""Tests of octile::quantize, quantize_with_scale and dequantize: bit for bit equal to NumPy, and their error bounds."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.formats import E4M3, E5M2, E5M6, INT8, by_name, unpack12
from octile.ops.quantize import decode, dequantize, quantize, quantize_with_scale

BLOCKS = [(1, 128), (128, 1), (128, 128), (1, 300), (150, 300), (3, 5)]
FORMATS = ["e4m3", "e5m2", "e5m6", "int8"]

every_format = pytest.mark.parametrize("fmt", FORMATS)
both_scales = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])
a_matrix = {"m": st.integers(1, 150), "k": st.integers(1, 150).map(lambda n: 2 * n), "seed": st.integers(0, 2**32 - 1)}


def matrix(m: int, k: int, seed: int = 0, spread: float = 12.0) -> Tensor:
    """Normal variates times powers of two from 2^−spread to 2^spread, so that blocks reach subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * 2.0 ** rng.uniform(-spread, spread, (m, k)).round()
    return torch.from_numpy(x.astype(np.float32))


def round_trip(x: Tensor, block: tuple[int, int], fmt: str, power_of_2: bool) -> Tensor:
    return dequantize(*quantize(x, *block, fmt, power_of_2), *block, torch.float32)


def per_element(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale that each element of a matrix has."""
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def numbers(data: Tensor, fmt: str) -> Tensor:
    """8- and 12-bit data as float32, by the formats' own definition."""
    if fmt == "int8":
        return data.float()
    return E5M6.decode(unpack12(data, data.shape[-1] // 3 * 2)) if fmt == "e5m6" else by_name[fmt].decode(data)


def spacing(y: Tensor, fmt: str) -> Tensor:
    """One unit in the last place of a format at y, float64."""
    if fmt == "int8":
        return torch.ones_like(y, dtype=torch.float64)
    form = by_name[fmt]
    exponent = y.double().abs().clamp(min=form.smallest_normal).frexp().exponent - 1
    return torch.from_numpy(np.ldexp(form.epsilon, exponent.numpy()))


# Quantized blocks


@every_format
@pytest.mark.parametrize("block", [(2**63 - 1, 2**63 - 1), (1_000_000, 128), (1, 2**63 - 1)], ids=str)
def test_blocks_larger_than_the_matrix_end_at_its_edges(block, fmt):
    x = matrix(5, 130)
    like = min(block[0], 5), min(block[1], 130)
    (data, scale), (expected, expected_scale) = quantize(x, *block, fmt, False), quantize(x, *like, fmt, False)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(round_trip(x, block, fmt, False), round_trip(x, like, fmt, False))


@given(
    **a_matrix, block=st.sampled_from(BLOCKS), fmt=st.sampled_from(["e4m3", "e5m2", "int8"]), power_of_2=st.booleans()
)
def test_every_block_is_quantized_as_numpy_does(m, k, seed, block, fmt, power_of_2):
    x, (rows, cols) = matrix(m, k, seed), block
    data, scale = quantize(x, rows, cols, fmt, power_of_2)
    for i in range(-(-m // rows)):
        for j in range(-(-k // cols)):
            part = (slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))
            expected_scale = np.abs(x[part].numpy()).max() / np.float32(by_name[fmt].max)
            if power_of_2:
                mantissa, exponent = np.frexp(expected_scale)
                expected_scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
            limit = np.float32(by_name[fmt].max)
            y = np.clip(x[part].numpy() / expected_scale, -limit, limit)
            peer = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}.get(fmt)
            expected = np.rint(y) if peer is None else y.astype(peer).astype(np.float32)
            assert scale[i, j].item() == expected_scale
            np.testing.assert_array_equal(data[part].float().numpy(), expected)


@given(**a_matrix, power_of_2=st.booleans())
def test_e5m6_data_are_packed_encoded_values(m, k, seed, power_of_2):
    x, block = matrix(m, k, seed), (1, 128)
    data, scale = quantize(x, *block, "e5m6", power_of_2)
    encoded = E5M6.encode(x / per_element(scale, block, x.shape))
    assert torch.equal(unpack12(data, k), encoded)


@pytest.mark.parametrize(("block", "strides"), [((1, 128), (1, 132)), ((128, 1), (132, 1)), ((128, 128), (2, 1))])
def test_scales_have_the_layout_that_gemms_read(block, strides):
    x = matrix(130, 130)
    for source in (x, x.to("meta")):
        _, scale = quantize(source, *block, "e4m3", False)
        assert scale.stride() == strides


def test_the_scales_of_a_batch_are_stored_matrix_by_matrix():
    _, scale = quantize(torch.stack(3 * [matrix(130, 130)]), 1, 128, "e4m3", False)
    assert scale.stride() == (2 * 132, 1, 132)


@pytest.mark.parametrize("block", BLOCKS)
def test_there_is_one_scale_per_block_also_at_the_edges(block):
    _, scale = quantize(matrix(300, 200), *block, "e4m3", False)
    assert scale.shape == (-(-300 // block[0]), -(-200 // block[1]))


@every_format
@both_scales
def test_matrices_of_a_batch_are_quantized_separately(fmt, power_of_2):
    x = torch.stack([matrix(70, 130, seed) for seed in range(3)])
    data, scale = quantize(x, 64, 64, fmt, power_of_2)
    for i, one in enumerate(x):
        one_data, one_scale = quantize(one, 64, 64, fmt, power_of_2)
        assert torch.equal(numbers(data[i], fmt), numbers(one_data, fmt))
        assert torch.equal(scale[i], one_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_input_is_quantized_as_the_same_values_in_float32(dtype):
    x = matrix(40, 140, spread=3).to(dtype)
    found, expected = quantize(x, 1, 128, "e4m3", False), quantize(x.float(), 1, 128, "e4m3", False)
    assert torch.equal(found[0].float(), expected[0].float())
    assert torch.equal(found[1], expected[1])


@every_format
def test_strides_do_not_matter(fmt):
    x = matrix(130, 90)
    found, expected = quantize(x.T, 1, 128, fmt, False), quantize(x.T.contiguous(), 1, 128, fmt, False)
    assert torch.equal(numbers(found[0], fmt), numbers(expected[0], fmt))


@every_format
def test_the_input_is_not_changed(fmt):
    x = matrix(4, 256)
    before = x.clone()
    quantize(x, 1, 128, fmt, False)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 4, 6)])
def test_an_empty_tensor_is_quantized(shape):
    data, scale = quantize(torch.empty(shape), 1, 128, "e4m3", False)
    assert data.shape == shape
    assert dequantize(data, scale, 1, 128, torch.float32).shape == shape


# Error bounds


@given(**a_matrix, block=st.sampled_from(BLOCKS), fmt=st.sampled_from(FORMATS))
def test_with_power_of_2_scales_the_error_is_at_most_half_a_unit_in_the_last_place(m, k, seed, block, fmt):
    """|x − data · scale| ≤ scale · ulp(x / scale) / 2, exactly: dividing by a power of two rounds nothing."""
    x = matrix(m, k, seed)
    data, scale = quantize(x, *block, fmt, True)
    x, scale = x.double(), per_element(scale, block, x.shape).double()
    assert ((x - numbers(data, fmt) * scale).abs() <= scale * spacing(x / scale, fmt) / 2).all()


@given(**a_matrix, block=st.sampled_from(BLOCKS), fmt=st.sampled_from(FORMATS))
def test_with_float32_scales_the_error_is_at_most_half_a_unit_of_the_rounded_quotient(m, k, seed, block, fmt):
    """As above, where x / scale is first rounded to FP32: 2^−24 of x more, 2^−20 of half an E4M3 unit."""
    x = matrix(m, k, seed)
    data, scale = quantize(x, *block, fmt, False)
    quotient = x / per_element(scale, block, x.shape)
    x, scale = x.double(), per_element(scale, block, x.shape).double()
    bound = scale * spacing(quotient, fmt) / 2 + x.abs() * 2.0**-24
    assert ((x - numbers(data, fmt) * scale).abs() <= bound).all()


@given(**a_matrix, fmt=st.sampled_from(FORMATS))
def test_power_of_2_scales_are_rounded_up(m, k, seed, fmt):
    x = matrix(m, k, seed)
    (_, exact), (_, scale) = quantize(x, 1, 128, fmt, False), quantize(x, 1, 128, fmt, True)
    assert (scale.frexp().mantissa == 0.5).all()
    assert ((exact <= scale) & (scale < 2 * exact)).all()


@pytest.mark.one_case
@every_format
@given(**a_matrix)
def test_the_largest_value_of_a_block_becomes_the_largest_of_the_format(fmt, m, k, seed):
    data, _ = quantize(matrix(m, k, seed), 1, 300, fmt, False)
    assert (numbers(data, fmt).abs().amax(1) == by_name[fmt].max).all()


@every_format
def test_values_of_the_format_are_exact(fmt):
    form = by_name[fmt]
    values = torch.arange(-127.0, 128.0) if form is INT8 else form.values()
    x = values[values.isfinite()][None]
    x = x[:, : x.shape[1] // 2 * 2]  # E5M6 takes an even number
    assert x.abs().max() == form.max
    assert torch.equal(round_trip(x, (1, 10_000), fmt, False), x)


@pytest.mark.parametrize("scale", [2.0**-100, 0.25, 2.0**100])
def test_e4m3_values_times_a_power_of_two_are_exact(scale):
    x = E4M3.values()[None].nan_to_num(0.0) * scale
    assert torch.equal(round_trip(x, (1, 256), "e4m3", True), x)


# Zeros, denormals, the ends of the range, Inf and NaN


@every_format
@both_scales
def test_a_block_of_zeros_is_zeros_with_scale_1(fmt, power_of_2):
    x = torch.cat([torch.zeros(2, 128), torch.ones(2, 128)], 1)
    x[1] *= -1
    data, scale = quantize(x, 1, 128, fmt, power_of_2)
    assert scale[:, 0].tolist() == [1, 1]
    assert not numbers(data, fmt)[:, :128].any()


@every_format
@both_scales
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_make_their_whole_block_nan_and_no_other(fmt, power_of_2, bad):
    x = matrix(4, 256, spread=1)
    x[2, 130] = bad
    found = round_trip(x, (2, 128), fmt, power_of_2).isnan()
    expected = torch.zeros(4, 256, dtype=torch.bool)
    expected[2:, 128:] = True
    assert torch.equal(found, expected)


@every_format
@both_scales
@pytest.mark.parametrize("largest", [1e-45, 2.0**-140, 2.0**-126, 2.0**-120, 3.4028235e38])
def test_the_ends_of_float32_keep_the_bound(fmt, power_of_2, largest):
    x = largest * torch.tensor([[1.0, -1.0, 0.5, 0.3, 0.01, 0.0]])
    data, scale = quantize(x, 1, 128, fmt, power_of_2)
    assert scale.item() >= 2.0**-126
    error = x.double() - numbers(data, fmt) * scale.double()
    assert (error.abs() <= scale * spacing(x / scale, fmt) / 2 + x.abs().double() * 2.0**-24).all()


def test_values_at_the_end_of_e4m3_do_not_change():
    x = torch.tensor([[448.0, -448.0, 447.0, 432.0, 431.0, 1.0]])
    data, scale = quantize(x, 1, 128, "e4m3", False)
    assert scale.item() == 1
    assert data.float().tolist() == [[448, -448, 448, 448, 416, 1]]  # 432 is a tie and rounds to even


# A given scale


@pytest.mark.parametrize(("fmt", "largest"), [("e4m3", 448), ("e5m2", 57344)])
def test_a_given_scale_saturates_large_values(fmt, largest):
    x = torch.tensor([[1.0, 1e6, -1e6, torch.inf, -torch.inf]])
    data = quantize_with_scale(x, torch.tensor([0.5]), fmt)
    assert data.float().tolist() == [[2, largest, -largest, largest, -largest]]


def test_a_given_scale_preserves_nan():
    data = quantize_with_scale(torch.tensor([[1.0, torch.nan]]), torch.tensor([1.0]), "e4m3")
    assert data.float().isnan().tolist() == [[False, True]]


@given(**a_matrix)
def test_a_given_scale_quantizes_as_the_same_computed_scale(m, k, seed):
    x = matrix(m, k, seed)
    data, scale = quantize(x, m, k, "e4m3", False)
    assert torch.equal(quantize_with_scale(x, scale.flatten(), "e4m3").float(), data.float())


# Dequantization


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_encoded_value_is_decoded(form):
    encoded = torch.arange(256, dtype=torch.uint8).view(form.dtype)
    np.testing.assert_array_equal(decode(encoded).numpy(), form.values().numpy())


def test_decoding_preserves_the_sign_of_zero():
    zeros = torch.tensor([0.0, -0.0]).to(torch.float8_e4m3fn)
    assert decode(zeros).signbit().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_multiplied_in_float32_and_rounded_once(dtype):
    x, block = matrix(5, 256, spread=2), (1, 128)
    data, scale = quantize(x, *block, "e4m3", False)
    expected = (data.float() * per_element(scale, block, x.shape)).to(dtype)
    assert torch.equal(dequantize(data, scale, *block, dtype), expected)


@every_format
def test_dequantizing_does_not_change_the_data(fmt):
    data, scale = quantize(matrix(4, 256), 1, 128, fmt, False)
    before = data.clone()
    dequantize(data, scale, 1, 128, torch.float32)
    assert torch.equal(numbers(data, fmt), numbers(before, fmt))


# Operator checks of torch


@pytest.mark.one_case
@every_format
@both_scales
def test_quantize_is_a_well_formed_operator(fmt, power_of_2):
    torch.library.opcheck(quantize.overload, (matrix(5, 130), 2, 128, fmt, power_of_2))


def test_quantize_with_scale_is_a_well_formed_operator():
    torch.library.opcheck(quantize_with_scale.overload, (matrix(5, 130), torch.tensor([0.5]), "e4m3"))


@pytest.mark.one_case
@every_format
def test_dequantize_is_a_well_formed_operator(fmt):
    args = (*quantize(matrix(5, 130), 2, 128, fmt, False), 2, 128, torch.bfloat16)
    # test_schema compares the inputs by allclose, which torch lacks for FP8 on a CPU: INT8 and E5M6 are used instead
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(dequantize.overload, args, test_utils=checks if args[0].dtype.is_floating_point else "ALL")


@every_format
def test_meta_tensors_have_the_shapes_and_dtypes_of_real_ones(fmt):
    x = matrix(5, 130)
    real, meta = quantize(x, 2, 128, fmt, False), quantize(x.to("meta"), 2, 128, fmt, False)
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in real]


# Refusals


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_only_16_and_32_bit_floats_are_quantized(dtype):
    with pytest.raises(TypeError, match=f"x must be float32, bfloat16 or float16, not {dtype}"):
        quantize(torch.zeros(2, 2, dtype=dtype), 1, 128, "e4m3", False)


def test_only_matrices_are_quantized():
    with pytest.raises(ValueError, match=r"x must be a matrix \[..., M, K\], not \(5,\)"):
        quantize(torch.zeros(5), 1, 128, "e4m3", False)


@pytest.mark.parametrize("block", [(0, 128), (1, -1)])
def test_a_block_has_at_least_one_element(block):
    with pytest.raises(ValueError, match=f"block must be at least 1×1, not {block[0]}×{block[1]}"):
        quantize(torch.zeros(2, 2), *block, "e4m3", False)


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="not 'ue8m0'"):
        quantize(torch.zeros(2, 2), 1, 128, "ue8m0", False)


def test_e5m6_needs_an_even_number_of_columns():
    with pytest.raises(ValueError, match=r"even number of columns .* not 3"):
        quantize(torch.zeros(2, 3), 1, 128, "e5m6", False)


@pytest.mark.parametrize("fmt", ["int8", "e5m6"])
def test_a_scale_is_given_for_8_bit_floats_only(fmt):
    with pytest.raises(ValueError, match=f"'e4m3' or 'e5m2' with a given scale, not '{fmt}'"):
        quantize_with_scale(torch.zeros(2, 2), torch.ones(1), fmt)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2), r"scale must be float32 \[1\], not torch.float32 \[2\]"),
        (torch.ones(1, dtype=torch.float64), r"scale must be float32 \[1\], not torch.float64 \[1\]"),
        (torch.ones(1, device="meta"), "x is on cpu but its scale on meta"),
    ],
    ids=["shape", "dtype", "device"],
)
@pytest.mark.parametrize(
    "call", [quantize_with_scale.reference, quantize_with_scale.kernels["cuda"]], ids=["cpu", "cuda"]
)
def test_a_given_scale_is_one_number_in_float32_where_x_is(call, scale, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 2), scale, "e4m3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_data_of_another_dtype_is_refused_and_unchanged(dtype):
    data = torch.ones(4, 256, dtype=dtype)
    with pytest.raises(TypeError, match=f"data must be float8_e4m3fn, .* not {dtype}"):
        dequantize(data, torch.full((4, 2), 2.0), 1, 128, torch.float32)
    assert (data == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_values_in_another_dtype_are_refused(dtype):
    data, scale = quantize(torch.ones(4, 256), 1, 128, "e4m3", False)
    with pytest.raises(TypeError, match=f"out_dtype must be float32, bfloat16 or float16, not {dtype}"):
        dequantize(data, scale, 1, 128, dtype)


def test_only_matrices_are_dequantized():
    with pytest.raises(ValueError, match=r"data must be a matrix \[..., M, K\], not \(5,\)"):
        dequantize(torch.zeros(5, dtype=torch.int8), torch.ones(1), 1, 128, torch.float32)
