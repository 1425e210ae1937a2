"""Tests of octile::matmul_nt and matmul_nt_out: the error bound of FP32 summation, and refused arguments.

The bound: both operands are decoded and multiplied by their scales (one FP32 rounding each), multiplied with one
another (one), and K products are added up (K − 1 roundings), so |error| ≤ (K + 2) · 2⁻²⁴ · Σ|a||b|, up to second
order. A BF16 result is rounded once more.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.matmul import check_operand, check_pair, matmul_nt, matmul_nt_out
from octile.ops.quantize import quantize
from tests.ops.operators import WITHOUT_ALLCLOSE

Operand = tuple[Tensor, Tensor, tuple[int, int]]

FORMATS = ["e4m3", "e5m2", "int8"]
BLOCKS = [(1, 128), (128, 1), (128, 128), (7, 9), (1000, 1000)]

every_format = pytest.mark.parametrize("fmt", FORMATS)
sizes = st.integers(1, 140)
operands = {"fmt": st.sampled_from(FORMATS), "block": st.sampled_from(BLOCKS)}


def operand(rows: int, cols: int, fmt: str = "e4m3", block: tuple[int, int] = (1, 128), seed: int = 0) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-6, 7, (rows, cols), generator=generator)
    return (*quantize(torch.ldexp(torch.randn(rows, cols, generator=generator), spread), *block, fmt, False), block)


def exact(data: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """data · scale in FP64, where nothing is rounded."""
    rows, cols = data.shape[-2:]
    scale = scale.double().repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :cols]
    return data.double() * scale


def bound(a: Tensor, b: Tensor) -> Tensor:
    """The error bound of FP32 summation; see above."""
    return (a.shape[-1] + 2) * 2.0**-24 * (a.abs() @ b.abs().mT) * (1 + 1e-4)


# Results


@pytest.mark.oldest_torch
@given(m=sizes, n=sizes, k=st.integers(1, 400), seed=st.integers(0, 2**31), **operands)
def test_a_result_is_within_the_bound_of_fp32_summation(m, n, k, seed, fmt, block):
    a, b = operand(m, k, fmt, block, seed), operand(n, k, fmt, (128, 128), seed + 1)
    error = matmul_nt(*a, *b, torch.float32).double() - exact(*a) @ exact(*b).T
    assert (error.abs() <= bound(exact(*a), exact(*b))).all()


@given(m=sizes, n=sizes, k=sizes)
def test_a_bf16_result_is_the_fp32_one_rounded(m, n, k):
    a, b = operand(m, k), operand(n, k)
    assert torch.equal(matmul_nt(*a, *b, torch.bfloat16), matmul_nt(*a, *b, torch.float32).bfloat16())


@pytest.mark.parametrize("pair", [("e4m3", "e5m2"), ("int8", "e4m3")])
def test_formats_may_be_mixed(pair):
    a, b = operand(5, 130, pair[0]), operand(6, 130, pair[1])
    error = matmul_nt(*a, *b, torch.float32).double() - exact(*a) @ exact(*b).T
    assert (error.abs() <= bound(exact(*a), exact(*b))).all()


@every_format
def test_a_transposed_view_equals_its_contiguous_copy(fmt):
    (a, a_scale, _), b = operand(140, 9, fmt, (128, 1)), operand(6, 140, fmt)
    shown = exact(a.mT.contiguous(), a_scale.mT.contiguous(), (1, 128))
    y = matmul_nt(a.mT, a_scale.mT, (1, 128), *b, torch.float32)
    assert ((y.double() - shown @ exact(*b).T).abs() <= bound(shown, exact(*b))).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 8), (4, 0, 8), (4, 3, 0)])
def test_an_empty_dimension_gives_an_empty_result_or_zeros(m, n, k):
    y = matmul_nt(*operand(m, k), *operand(n, k), torch.float32)
    assert torch.equal(y, torch.zeros(m, n))


def test_autocast_changes_nothing():
    a, b = operand(20, 300), operand(30, 300)
    with torch.autocast("cpu", torch.bfloat16):
        inside = matmul_nt(*a, *b, torch.float32)
    assert torch.equal(inside, matmul_nt(*a, *b, torch.float32))


# NaN and Inf


def test_a_nan_reaches_its_row_and_no_other():
    a, b = operand(5, 130), operand(6, 130)
    a[0].view(torch.uint8)[2, 3] = 0x7F
    assert matmul_nt(*a, *b, torch.float32).isnan().all(1).tolist() == [False, False, True, False, False]


@every_format
def test_a_quantized_block_with_a_nan_is_nan_in_the_result(fmt):
    x = torch.ones(3, 256)
    x[1, 200] = torch.nan
    y = matmul_nt(*quantize(x, 1, 128, fmt, False), (1, 128), *operand(4, 256, fmt), torch.float32)
    assert y.isnan().all(1).tolist() == [False, True, False]


def test_an_inf_of_e5m2_stays_inf():
    a = torch.tensor([[1.0, torch.inf]]).to(torch.float8_e5m2)
    y = matmul_nt(a, torch.ones(1, 1), (1, 2), a[:, :1].expand(1, 2), torch.ones(1, 1), (1, 2), torch.float32)
    assert y.item() == torch.inf


# With a given output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_overwritten(dtype):
    a, b, out = operand(5, 130), operand(6, 130), torch.full((5, 6), torch.nan, dtype=dtype)
    matmul_nt_out(out, *a, *b, False)
    assert torch.equal(out, matmul_nt(*a, *b, dtype))


def test_accumulation_is_in_fp32():
    a, b, before = operand(5, 130), operand(6, 130), torch.randn(5, 6)
    matmul_nt_out(out := before.clone(), *a, *b, True)
    assert torch.equal(out, before + matmul_nt(*a, *b, torch.float32))


def test_accumulation_in_bf16_rounds_once():
    a, b, before = operand(5, 130), operand(6, 130), torch.randn(5, 6).bfloat16()
    matmul_nt_out(out := before.clone(), *a, *b, True)
    assert torch.equal(out, (before.float() + matmul_nt(*a, *b, torch.float32)).bfloat16())


def test_out_may_be_a_transposed_view():
    a, b, out = operand(5, 130), operand(6, 130), torch.zeros(6, 5)
    matmul_nt_out(out.mT, *a, *b, True)
    assert torch.equal(out.mT, matmul_nt(*a, *b, torch.float32))


# Operator checks of torch. They detect mutated inputs by allclose, which torch lacks for FP8 on a CPU: INT8 is used
# instead.


def checks(fmt: str):
    return "ALL" if fmt == "int8" else WITHOUT_ALLCLOSE


@pytest.mark.one_case
@pytest.mark.each_value
@every_format
@pytest.mark.parametrize("shape", [(5, 6, 130), (1, 1, 1), (0, 6, 128), (5, 6, 0)], ids=str)
def test_matmul_nt_is_a_well_formed_operator(fmt, shape):
    m, n, k = shape
    arguments = (*operand(m, k, fmt), *operand(n, k, fmt, (128, 128)), torch.bfloat16)
    torch.library.opcheck(matmul_nt.overload, arguments, test_utils=checks(fmt))


@pytest.mark.one_case
@every_format
def test_matmul_nt_takes_transposed_views_as_a_well_formed_operator(fmt):
    (a, a_scale, _), (b, b_scale, _) = operand(130, 5, fmt, (128, 1)), operand(130, 6, fmt, (128, 1))
    arguments = (a.mT, a_scale.mT, (1, 128), b.mT, b_scale.mT, (1, 128), torch.float32)
    torch.library.opcheck(matmul_nt.overload, arguments, test_utils=checks(fmt))


@pytest.mark.one_case
@pytest.mark.each_value
@every_format
@pytest.mark.parametrize("accumulate", [False, True])
def test_matmul_nt_out_is_a_well_formed_operator(fmt, accumulate):
    arguments = (torch.zeros(5, 6), *operand(5, 130, fmt), *operand(6, 130, fmt), accumulate)
    torch.library.opcheck(matmul_nt_out.overload, arguments, test_utils=checks(fmt))


# Refusals


def change(position: int, value: object) -> tuple:
    arguments = [*operand(5, 300), *operand(6, 300), torch.float32]
    arguments[position] = value
    return tuple(arguments)


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, torch.zeros(5, 300), TypeError, "a must be float8_e4m3fn, float8_e5m2 or int8, not torch.float32"),
        (3, torch.zeros(6, 300, dtype=torch.uint8), TypeError, "b must be float8_e4m3fn, .* not torch.uint8"),
        (1, torch.ones(5, 3, dtype=torch.bfloat16), TypeError, "a's scale must be float32, not torch.bfloat16"),
        (6, torch.float16, TypeError, "out_dtype must be bfloat16 or float32, not torch.float16"),
        (0, torch.zeros(2, 5, 300, dtype=torch.int8), ValueError, r"a must have 2 dimensions, .* \(2, 5, 300\)"),
        (
            4,
            torch.ones(6, 2),
            ValueError,
            r"b's scale must be \(6, 3\) for \(6, 300\) in blocks of 1×128, not \(6, 2\)",
        ),
        (2, (1, 0), ValueError, "a's block must be at least 1×1, not 1×0"),
        (2, (1, 2, 3), ValueError, r"a's block must be two extents \(rows, columns\), not \(1, 2, 3\)"),
    ],
    ids=[
        "dtype of a",
        "dtype of b",
        "dtype of scale",
        "out_dtype",
        "dimensions",
        "shape of scale",
        "empty block",
        "3-D block",
    ],
)
def test_arguments_that_do_not_fit_are_refused(position, value, error, message):
    with pytest.raises(error, match=message):
        matmul_nt(*change(position, value))


def test_data_and_scale_must_lie_on_one_device():
    with pytest.raises(ValueError, match="a is on cpu but its scale on meta"):
        check_operand("a", torch.zeros(5, 9, dtype=torch.int8), torch.ones(5, 1, device="meta"), (1, 128), ndim=2)


def test_operands_must_lie_on_one_device():
    with pytest.raises(ValueError, match="a is on cpu but b on meta"):
        check_pair(torch.zeros(5, 9), torch.zeros(6, 9, device="meta"), torch.float32)


def test_operands_must_agree_in_k():
    with pytest.raises(ValueError, match=r"a and b must agree in K: a is \(5, 300\), b is \(6, 299\)"):
        matmul_nt(*operand(5, 300), *operand(6, 299), torch.float32)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(6, 5), ValueError, r"out must be \(5, 6\), not \(6, 5\)"),
        (torch.zeros(5, 6, dtype=torch.float16), TypeError, "out must be bfloat16 or float32, not torch.float16"),
        (
            torch.zeros(1, 6).expand(5, 6),
            ValueError,
            r"out must not overlap itself, as \(5, 6\) with strides \(0, 1\) does",
        ),
        (torch.zeros(30).as_strided((5, 6), (3, 1)), ValueError, "out must not overlap itself"),
        (torch.zeros(30).as_strided((5, 6), (5, 1)), ValueError, "out must not overlap itself"),
    ],
    ids=["shape", "dtype", "one row", "rows in each other", "rows that share an element"],
)
def test_an_out_that_does_not_fit_is_refused(out, error, message):
    with pytest.raises(error, match=message):
        matmul_nt_out(out, *operand(5, 130), *operand(6, 130), False)
