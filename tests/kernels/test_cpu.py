"""Tests of the CPU's own functions: conversions against the formats' definitions, quantization against torch's."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.formats import E4M3, E5M6, pack12, unpack12
from octile.kernels import cpu
from octile.kernels.cpu import decode_e4m3, decode_e5m6, encode_e5m6
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.ops.grouped import grouped_wgrad
from octile.ops.groups import align_groups
from octile.ops.matmul import matmul_nt
from octile.ops.quantize import dequantize, quantize
from octile.ops.swiglu import swiglu_backward_quantize
from octile.ops.transpose import quantize_rows_and_columns, requantize_transposed
from tests.processor import needs_bf16

ENCODED = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def test_every_encoded_value_is_decoded():
    np.testing.assert_array_equal(decode_e4m3(ENCODED).numpy(), E4M3.values().numpy())


def test_zeros_keep_their_sign():
    assert decode_e4m3(torch.tensor([0.0, -0.0]).to(torch.float8_e4m3fn)).signbit().tolist() == [False, True]


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_nan_of_either_sign_is_decoded(bits):
    encoded = torch.tensor([1, bits, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert decode_e4m3(encoded).isnan().tolist() == [False, True, False]


def test_subnormals_survive_a_processor_that_flushes_them(flushed_denormals):
    assert decode_e4m3(ENCODED[:8]).mul(512).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_strides_do_not_matter():
    encoded = ENCODED.view(16, 16).T
    np.testing.assert_array_equal(decode_e4m3(encoded).numpy(), E4M3.values().view(16, 16).T.numpy())


def test_an_empty_tensor_is_decoded():
    assert decode_e4m3(ENCODED[:0].view(0, 7)).shape == (0, 7)


def test_decoding_does_not_change_the_data():
    before = ENCODED.view(torch.uint8).clone()
    decode_e4m3(ENCODED)
    assert torch.equal(ENCODED.view(torch.uint8), before)


# E5M6


def assert_encoded_as_defined(x: torch.Tensor) -> None:
    """Check for the same encoded values, and NaN for NaN."""
    found, expected = unpack12(encode_e5m6(x), x.shape[-1]), E5M6.encode(x)
    assert torch.equal(torch.where(x.isnan(), 0, found), torch.where(x.isnan(), 0, expected))
    assert torch.equal(E5M6.decode(found).isnan(), x.isnan())


def test_every_encoded_e5m6_value_is_decoded():
    encoded = torch.arange(4096, dtype=torch.int32).view(4, 1024)
    np.testing.assert_array_equal(decode_e5m6(pack12(encoded)).numpy(), E5M6.decode(encoded).numpy())


@pytest.mark.parametrize("steps", range(-2, 3))
def test_values_near_ties_of_e5m6(steps):
    values = E5M6.values()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    assert_encoded_as_defined(
        (middle.view(torch.int32) + steps).view(torch.float32)[:, None].expand(-1, 2).contiguous()
    )


def test_e5m6_of_all_magnitudes_and_of_nan():
    torch.manual_seed(0)
    x = torch.randn(300, 300) * torch.exp2(torch.randint(-149, 17, (300, 300)).float())
    x[0, :6] = torch.tensor([0.0, -0.0, float("nan"), -1e-30, 1e-45, -1e-45])
    assert_encoded_as_defined(x.clamp(-E5M6.max, E5M6.max))


def test_subnormals_of_e5m6_survive_a_processor_that_flushes_them(flushed_denormals):
    x = torch.arange(-64, 64) * 2.0**-20
    assert torch.equal(decode_e5m6(encode_e5m6(x)), x)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 3, 4)])
def test_e5m6_of_any_shape(shape):
    x = torch.ones(shape)
    assert torch.equal(decode_e5m6(encode_e5m6(x)), x)


def test_packed_rows_may_be_strided():
    packed = encode_e5m6(torch.arange(64.0).view(8, 8))
    assert torch.equal(decode_e5m6(packed[::2]), torch.arange(64.0).view(8, 8)[::2])


# Quantization in C++: bit for bit that of the references

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, -464.0, 2.0**-149, -(2.0**-126), 3.4e38]
BLOCKS = [(1, 128), (128, 1), (128, 128), (3, 5), (1, 300), (300, 300)]
a_matrix = {
    "m": st.integers(0, 300),
    "k": st.integers(0, 300),
    "seed": st.integers(0, 2**32 - 1),
    "special": st.sampled_from([None, *SPECIAL]),
}


def matrix(m: int, k: int, seed: int, special: float | None) -> Tensor:
    """Normal variates of many magnitudes, so that blocks reach subnormal numbers, and one special value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-12, 13, (m, k), generator=generator).float())
    if special is not None and x.numel():
        x.flatten()[seed % x.numel()] = special
    return x


def in_torch(operator: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the references alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "library", lambda: None)
        return operator(*arguments)


def assert_equal_to_torch(operator: Callable[..., Any], *arguments: Any) -> None:
    """Check for the same bits, NaN for NaN, in the same layout."""
    found, expected = operator(*arguments), in_torch(operator, *arguments)
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    for f, e in pairs:
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        assert not f.numel() or all(n == 1 or a == b for n, a, b in zip(f.shape, f.stride(), e.stride(), strict=True))
        f, e = (t.float() for t in (f, e))
        assert torch.equal(f.isnan(), e.isnan())
        assert torch.equal(f.nan_to_num(0.0).view(torch.int32), e.nan_to_num(0.0).view(torch.int32))


def assert_equal_with_any_threads(compute: Callable[[], Tensor]) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(compute())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_compiler_is_found_on_this_machine():
    assert cpu.library() is not None


@given(**a_matrix, block=st.sampled_from(BLOCKS), power_of_2=st.booleans())
def test_blocks_are_quantized_as_in_torch(m, k, seed, special, block, power_of_2):
    assert_equal_to_torch(quantize, matrix(m, k, seed, special), *block, "e4m3", power_of_2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_quantized_as_in_torch(dtype):
    assert_equal_to_torch(quantize, matrix(130, 200, 0, None).to(dtype), 1, 128, "e4m3", False)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_stacked_matrices_are_quantized_as_in_torch(block):
    x = torch.stack([matrix(130, 200, seed, None) for seed in range(6)]).unflatten(0, (2, 3))
    assert_equal_to_torch(quantize, x, *block, "e4m3", False)
    assert_equal_to_torch(dequantize, *quantize(x, *block, "e4m3", False), *block, torch.float32)


def test_values_near_ties_are_rounded_as_in_torch():
    values = E4M3.values()
    values = values[values.isfinite()].sort().values
    middle = ((values[1:] + values[:-1]) / 2).view(torch.int32)
    x = torch.stack([(middle + steps).view(torch.float32) for steps in range(-2, 3)])
    x[:, 0] = 448.0  # so that the scale is 1
    assert_equal_to_torch(quantize, x, 1, x.shape[1], "e4m3", False)


@given(**a_matrix, block=st.sampled_from(BLOCKS))
def test_values_are_dequantized_as_in_torch(m, k, seed, special, block):
    data, scale = quantize(matrix(m, k, seed, special), *block, "e4m3", False)
    assert_equal_to_torch(dequantize, data, scale, *block, torch.float32)


def test_every_encoded_value_is_dequantized_as_in_torch():
    data = ENCODED.view(2, 128)
    for scale in (1.0, 0.0, 2.0**-149, 3.0e38, float("inf"), float("nan")):
        assert_equal_to_torch(dequantize, data, torch.full((2, 1), scale), 1, 128, torch.float32)


def test_strided_rows_are_dequantized_as_in_torch():
    data, scale = quantize(matrix(64, 256, 0, None), 1, 128, "e4m3", False)
    assert_equal_to_torch(dequantize, data[:, 128:], scale[:, 1:], 1, 128, torch.float32)


@given(**a_matrix, power_of_2=st.booleans())
def test_rows_and_columns_are_quantized_as_in_torch(m, k, seed, special, power_of_2):
    assert_equal_to_torch(quantize_rows_and_columns, matrix(m, k, seed, special), "e4m3", power_of_2)


@given(**a_matrix, sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4), power_of_2=st.booleans())
def test_groups_of_rows_are_quantized_as_in_torch(m, k, seed, special, sizes, power_of_2):
    offs = torch.tensor(sizes, dtype=torch.int32).cumsum(0).clamp(max=m).to(torch.int32)
    tiles, _ = align_groups(offs, m)
    assert_equal_to_torch(quantize_rows_and_columns, matrix(m, k, seed, special), "e4m3", power_of_2, tiles)


@given(**a_matrix, power_of_2=st.booleans(), selected=st.integers(0, 300), in_tiles=st.booleans())
def test_rows_are_requantized_as_in_torch(m, k, seed, special, power_of_2, selected, in_tiles):
    data, scale = quantize(matrix(m, k, seed, special), 1, 128, "e4m3", True)
    rows = torch.randint(max(m, 1), (selected if m else 0,), generator=torch.Generator().manual_seed(seed))
    offs = torch.tensor([len(rows) // 3, len(rows) // 2], dtype=torch.int32)
    tiles = align_groups(offs, len(rows))[0] if in_tiles else None
    assert_equal_to_torch(
        requantize_transposed, data, scale, power_of_2, None, rows.to(torch.int32), tiles if m else None
    )
    assert_equal_to_torch(requantize_transposed, data, scale, power_of_2)


def test_a_row_that_does_not_exist_is_refused():
    data, scale = quantize(torch.ones(4, 128), 1, 128, "e4m3", True)
    for row in (-1, 4):
        with pytest.raises(IndexError, match="rows and tiles must name rows from 0 to 3"):
            requantize_transposed(data, scale, True, None, torch.tensor([0, row], dtype=torch.int32))


def test_the_gradients_of_swiglu_are_quantized_as_in_torch():
    dh, gate, up = (matrix(200, 256, seed, None) for seed in range(3))
    tiles, _ = align_groups(torch.tensor([70, 70, 190], dtype=torch.int32), 200)
    weight = torch.rand(200, generator=torch.Generator().manual_seed(0))
    settings = (None, None, weight, "e4m3", False, "e4m3", True)
    assert_equal_to_torch(swiglu_backward_quantize, dh, gate, up, *settings, tiles)


def test_subnormals_are_quantized_on_a_processor_that_flushes_them(flushed_denormals):
    x = torch.arange(-64.0, 64.0)[None] / 512
    x[0, 0] = 448.0
    assert_equal_to_torch(quantize, x, 1, 128, "e4m3", False)
    assert torch.equal(dequantize(*quantize(x, 1, 128, "e4m3", False), 1, 128, torch.float32)[:, 56:72], x[:, 56:72])


# GEMMs in C++; tests/ops/test_matmul.py and test_grouped.py check the bound of their error, whatever computes them


def product(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ of encoded values, whose scales are 1."""
    ones_a, ones_b = (torch.ones(len(t), -(-t.shape[1] // 128)) for t in (a, b))
    return matmul_nt(a, ones_a, (1, 128), b, ones_b, (1, 128), torch.float32)


def encoded(rows: int, k: int, seed: int) -> Tensor:
    return quantize(matrix(rows, k, seed, None), 1, 128, "e4m3", True)[0]


def test_what_is_multiplied_in_cpp():
    e4m3, e5m2 = (torch.ones(4, 128).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    scale = torch.ones(4, 1)

    def why_not(data: Tensor, block: tuple[int, int]) -> str:
        operands = Operand(data, scale, block), Operand(e4m3, scale, (1, 128))
        return cpu.why_not_multiply(GemmRequest(Schedule.DENSE, *operands, torch.float32))

    assert (why_not(e4m3, (1, 128)) == "") == cpu.can_multiply()
    assert why_not(e5m2, (1, 128)) == "an operand is torch.float8_e5m2, not float8_e4m3fn"
    assert why_not(e4m3, (4, 256)) == "a block has 256 values along K, not 128"


@needs_bf16
def test_the_product_of_every_two_encoded_values_is_exact():
    found, values = product(ENCODED[:, None], ENCODED[:, None]), E4M3.values().double()
    np.testing.assert_array_equal(found.double().numpy(), torch.outer(values, values).numpy())


@needs_bf16
def test_products_of_subnormals_are_exact_on_a_processor_that_flushes_them(flushed_denormals):
    assert product(ENCODED[:8, None], ENCODED[:8, None]).mul(2**18).tolist() == [
        [float(i * j) for j in range(8)] for i in range(8)
    ]


@needs_bf16
@given(m=st.integers(1, 70), n=st.integers(1, 70), k=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_the_layout_of_operands_changes_no_bit(m, n, k, seed):
    a, b = encoded(m, k, seed), encoded(n, k, seed + 1)
    expected = product(a, b)
    for of_a in (a, a.mT.contiguous().mT, torch.stack((a, a), 2)[..., 0]):
        for of_b in (b, b.mT.contiguous().mT, torch.stack((b, b), 2)[..., 0]):
            assert torch.equal(product(of_a, of_b), expected)


@needs_bf16
def test_the_number_of_threads_changes_no_bit():
    a, b = encoded(300, 400, 0), encoded(200, 400, 1)
    assert_equal_with_any_threads(lambda: product(a, b))


@needs_bf16
def test_groups_of_wgrad_that_begin_within_a_tile_are_left_to_the_reference():
    dy, x = (quantize(matrix(256, n, n, None), 128, 1, "e4m3", True) for n in (40, 50))
    operands = (*dy, (128, 1), *x, (128, 1))
    for end in (100, 128):
        arguments = (*operands, torch.tensor([end, 256], dtype=torch.int32), torch.float32)
        is_reference = torch.equal(grouped_wgrad(*arguments), grouped_wgrad.reference(*arguments))
        assert is_reference == (end == 100)


@given(
    m=st.integers(0, 30), n=st.integers(0, 40), k=st.integers(0, 70), batch=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_rows_are_multiplied_one_product_after_the_other(m, n, k, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(batch, rows, k, generator=generator) for rows in (m, n))
    found, expected = cpu.multiply_rows(a, b), a.double() @ b.double().mT
    assert ((found - expected).abs() <= k * 2.0**-23 * (a.double().abs() @ b.double().abs().mT)).all()


@given(m=st.integers(1, 200), n=st.integers(1, 40), rows=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_row_has_the_same_bits_among_any_others_and_in_any_layout(m, n, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, m, 33, generator=generator), torch.randn(2, n, 33, generator=generator)
    first = seed % m
    together, alone = cpu.multiply_rows(a, b), cpu.multiply_rows(a[:, first : first + rows], b)
    assert torch.equal(together[:, first : first + rows], alone)
    strided = torch.randn(n, 2, 66)[..., ::2].copy_(b.transpose(0, 1)).transpose(0, 1)
    for other in (strided, b.mT.contiguous().mT):
        assert torch.equal(cpu.multiply_rows(a, other), together)


def test_what_is_not_finite_stays_in_its_row_and_column():
    a, b = torch.ones(1, 20, 8), torch.ones(1, 20, 8)
    a[0, 17, 3], b[0, 5, 0] = math.nan, math.inf
    found = cpu.multiply_rows(a, b)[0]
    assert found[17].isnan().all()
    others = torch.arange(20) != 17
    assert (found[others, 5] == math.inf).all()
    assert (found[others][:, torch.arange(20) != 5] == 8).all()


def test_the_number_of_threads_changes_no_bit_of_rows():
    a, b = torch.randn(1, 300, 200), torch.randn(1, 200, 200)
    assert_equal_with_any_threads(lambda: cpu.multiply_rows(a, b))
