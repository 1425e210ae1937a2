"""Tests of the fast implementations against the specification, bit for bit, and of the public functions."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octile
from octile.formats import E4M3, FP16
from octile.kernels import native as kernels_native
from octile.lab import tensor_core_matmul, tensor_core_scaled_matmul
from octile.lab.tensor_core import native, reference, vectorized
from octile.lab.tensor_core.architectures import ARCHITECTURES, NAN, find_instruction
from octile.lab.tensor_core.operand import FORMATS, decode
from octile.lab.tensor_core.vectorized import Summation, fma
from tests.lab.matrices import normal, random_bits, same_bits, specified

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [
    pytest.param(arch, a.dtype, b.dtype, id=f"{arch}-{a.name}-{b.name}")
    for arch, rows in ARCHITECTURES.items()
    for row in rows
    if not row.scaled
    for a in row.formats
    for b in row.formats
]
FP16_ROWS = [p for p in ROWS if find_instruction(*p.values).fp16_floor is not None]
FORMS = [pytest.param(native, id="native"), pytest.param(vectorized, id="vectorized")]


def accumulators(shape, seed):
    """From below the smallest FP32 to beyond 2¹⁰⁰, with more bits than a tensor core preserves; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-150, 125, shape, generator=generator)
    c = torch.randn(shape, generator=generator) * torch.exp2(exponent.double()).float()
    return c * torch.randint(0, 4, shape, generator=generator).clamp(max=1)


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("arch", "a_dtype", "b_dtype"), ROWS)
def test_every_implementation_equals_the_specification(form, arch, a_dtype, b_dtype):
    row = find_instruction(arch, a_dtype, b_dtype)
    for a, b, c in [
        (normal(a_dtype, (3, 70), 0), normal(b_dtype, (4, 70), 1), torch.randn(3, 4)),
        (random_bits(a_dtype, (3, 64), 2, True), random_bits(b_dtype, (4, 64), 3, True), accumulators((3, 4), 4)),
        (random_bits(a_dtype, (6, 32), 5), random_bits(b_dtype, (4, 32), 6), torch.zeros(6, 4)),
    ]:
        k = decode(a, row).value.shape[1]
        actual = form.sum_products(decode(a, row), decode(b, row), c, Summation(row, k, promote=False))
        assert same_bits(actual, specified(a, b, c, row))


@pytest.mark.parametrize("form", FORMS)
def test_terms_truncated_downward_equal_the_specification(form):
    row = replace(find_instruction("sm_90", E4, E4), truncation="down")
    a, b = random_bits(E4, (3, 64), 2, True), random_bits(E4, (4, 64), 3, True)
    actual = form.sum_products(decode(a, row), decode(b, row), torch.zeros(3, 4), Summation(row, 64, promote=False))
    assert same_bits(actual, specified(a, b, torch.zeros(3, 4), row))
    assert not same_bits(actual, tensor_core_matmul(a, b))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("arch", "a_dtype", "b_dtype"), [p for p in ROWS if torch.bfloat16 in p.values])
def test_a_negative_sum_too_small_for_fp32_is_plus_zero(form, arch, a_dtype, b_dtype):
    row = find_instruction(arch, a_dtype, b_dtype)
    a, b = torch.tensor([[-(2.0**-100)]]).to(a_dtype), torch.tensor([[2.0**-55]]).to(b_dtype)
    out = form.sum_products(decode(a, row), decode(b, row), torch.zeros(1, 1), Summation(row, row.terms, promote=False))
    assert out.view(torch.int32).item() == 0


@pytest.mark.slow
@given(
    codes=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=64),
    c=st.floats(width=32),
    dtypes=st.tuples(st.sampled_from([E4, E5]), st.sampled_from([E4, E5])),
)
@settings(max_examples=150)
def test_any_hopper_sum_equals_the_specification(codes, c, dtypes):
    a, b = (
        torch.tensor([pair[side] for pair in codes], dtype=torch.uint8).view(dtype)[None]
        for side, dtype in enumerate(dtypes)
    )
    c = torch.tensor([[c]])
    expected = specified(a, b, c, find_instruction("sm_90", *dtypes))
    assert same_bits(tensor_core_matmul(a, b, c), expected)
    row = find_instruction("sm_90", *dtypes)
    whole = Summation(row, decode(a, row).value.shape[1], promote=False)
    assert same_bits(vectorized.sum_products(decode(a, row), decode(b, row), c, whole), expected)


@pytest.mark.one_case
@pytest.mark.parametrize(("arch", "a_dtype", "b_dtype"), FP16_ROWS)
def test_an_fp16_accumulator_equals_the_specification(arch, a_dtype, b_dtype):
    row = find_instruction(arch, a_dtype, b_dtype)
    for a, b in [
        (normal(a_dtype, (3, 64), 0) / 16, normal(b_dtype, (4, 64), 1)) if a_dtype == torch.float16 else
        (normal(a_dtype, (3, 64), 0), normal(b_dtype, (4, 64), 1)),
        (random_bits(a_dtype, (4, 32), 2, True), random_bits(b_dtype, (4, 32), 3, True)),
    ]:  # fmt: skip
        c = torch.randn(len(a), len(b)).half()
        actual = tensor_core_matmul(a, b, c, arch, out_dtype=torch.float16)
        assert actual.dtype == torch.float16
        assert same_bits(actual.float(), specified(a, b, c, row, fp16_accumulator=True))


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("promote", [True, False])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_promotion_and_rescaling_are_fp32_operations_between_chains(form, promote, arch):
    row = find_instruction(arch, E4, E4)
    a, b, c = normal(E4, (3, 192), 0), normal(E4, (5, 192), 1), torch.randn(3, 5)
    generator = torch.Generator().manual_seed(2)
    a_scale, b_scale = torch.rand(3, 3, generator=generator), torch.rand(5, 3, generator=generator)
    expected, accumulator, last = c.clone(), c.clone(), None
    for i in range(3):
        k, scale = slice(64 * i, 64 * i + 64), a_scale[:, i, None] * b_scale[:, i]
        if promote:
            part = specified(a[:, k], b[:, k], torch.zeros(3, 5), row)
            expected = torch.tensor(
                [[rounded(Fraction(x) * Fraction(s) + Fraction(t)) for x, s, t in zip(*r, strict=True)]
                 for r in zip(part.tolist(), scale.tolist(), expected.tolist(), strict=True)]
            )  # fmt: skip
        else:
            accumulator = accumulator if last is None else accumulator * (last / scale)
            accumulator = specified(a[:, k], b[:, k], accumulator, row)
            expected, last = accumulator * scale, scale
    how = Summation(row, 64, promote, a_scale, b_scale)
    assert same_bits(form.sum_products(decode(a, row), decode(b, row), c, how), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [-149, -140, -126, -114, -113, -101, -100, -99, 99, 100, 101, 127])
def test_accumulators_at_the_ends_of_fp32_equal_the_specification(form, exponent):
    row = find_instruction("sm_90", E5, E5)
    a, b = torch.zeros(3, 32), torch.ones(4, 32)
    a[1], a[2] = 2.0**-16, -57344.0  # nothing, the smallest, the largest
    c = torch.tensor([1.0, 1.0 + 2.0**-13, 1.0 + 2.0**-14, -2.0 + 2.0**-12]) * torch.tensor(2.0).double().pow(exponent)
    c = c.float().repeat(3, 1)
    operands = a.to(E5), b.to(E5)
    actual = form.sum_products(*(decode(x, row) for x in operands), c, Summation(row, 32, promote=False))
    assert same_bits(actual, specified(*operands, c, row))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [-120, -90, 90, 120])
def test_rescaling_to_the_ends_of_fp32_equals_the_specification(form, exponent):
    row = find_instruction("sm_90", E4, E4)
    a, b = normal(E4, (3, 64), 0), normal(E4, (5, 64), 1)
    a[1, 32:] = 0.0
    a_scale = torch.tensor([[1.0, 2.0**exponent]]).repeat(3, 1)
    actual = form.sum_products(
        decode(a, row), decode(b, row), torch.zeros(3, 5), Summation(row, 32, False, a_scale, torch.ones(5, 2))
    )
    first = specified(a[:, :32], b[:, :32], torch.zeros(3, 5), row) * (1.0 / a_scale[:, 1:])
    assert same_bits(actual, specified(a[:, 32:], b[:, 32:], first, row) * a_scale[:, 1:])


def test_rows_that_the_compiled_form_skips_equal_the_vectorized_form():
    row = find_instruction("sm_90", E5, E5)
    a, b, c = normal(E5, (6, 192), 0), normal(E5, (5, 192), 1), torch.randn(6, 5)
    a[1, 7], a[2, 150], c[3, 3], c[4, 4] = torch.nan, torch.inf, 2.0**120, -torch.inf
    generator = torch.Generator().manual_seed(2)
    scales = torch.rand(6, 3, generator=generator), torch.rand(5, 3, generator=generator)
    for promote in (True, False):
        for how in (Summation(row, 64, promote), Summation(row, 64, promote, *scales)):
            operands = decode(a, row), decode(b, row), c
            assert same_bits(native.sum_products(*operands, how), vectorized.sum_products(*operands, how))


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_of_zero_gives_the_sign_of_a_multiplication(form):
    row = find_instruction("sm_90", E4, E4)
    a, b = decode(torch.full((1, 32), -1.0).to(E4), row), decode(torch.ones(1, 32).to(E4), row)
    scales = torch.full((1, 1), 2.0**-100), torch.full((1, 1), 2.0**-100)  # whose product is below FP32's range
    out = form.sum_products(a, b, torch.zeros(1, 1), Summation(row, 32, False, *scales))
    assert same_bits(out, torch.tensor([[-0.0]]))


def rounded(x):
    """A rational number → FP32, to nearest: exact arithmetic decides on which side of the midpoint it is."""
    near = torch.tensor(float(x))
    candidates = [near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(-torch.inf))]
    return min((abs(Fraction(c.item()) - x), c.view(torch.int32).item() & 1, c.item()) for c in candidates)[2]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3))
@settings(max_examples=300)
def test_fma_rounds_once(numbers):
    a, b, c = (torch.tensor(x) for x in numbers)
    exact = Fraction(numbers[0]) * Fraction(numbers[1]) + Fraction(numbers[2])
    if abs(exact) < 2**127:
        assert fma(a, b, c).item() == rounded(exact)


@pytest.mark.parametrize("c", [2.0**-60, -(2.0**-60)])
def test_fma_rounds_once_where_float64_has_a_tie(c: float):
    a, b = torch.tensor([1 + 2.0**-12]), torch.tensor([1 + 2.0**-12])  # the product is 1 + 2⁻¹¹ + 2⁻²⁴, half way
    assert fma(a, b, torch.tensor([c])).item() == 1 + 2.0**-11 + (2.0**-23 if c > 0 else 0.0)


def test_scales_of_power_2_belong_to_the_exponents_on_sm_100():
    row = find_instruction("sm_100", E4, E4, scaled=True)
    a, b = random_bits(E4, (3, 64), 0, True), random_bits(E4, (4, 64), 1, True)
    generator = torch.Generator().manual_seed(2)
    codes = [torch.randint(0, 255, (rows, 2), generator=generator, dtype=torch.uint8) for rows in (3, 4)]
    actual = tensor_core_matmul(a, b, arch="sm_100", **scales(*codes))
    for m in range(3):
        for n in range(4):
            x = 0.0
            for i in range(2):
                scale = Fraction(2) ** (int(codes[0][m, i]) + int(codes[1][n, i]) - 254)
                k = slice(32 * i, 32 * i + 32)
                x = reference.step(a[m, k].tolist(), b[n, k].tolist(), x, E4M3, E4M3, row, scale=scale)
            assert actual[m, n].item() == x


def scales(a_codes, b_codes):
    return {"a_scale": a_codes.view(torch.float8_e8m0fnu), "b_scale": b_codes.view(torch.float8_e8m0fnu)}


def test_a_nan_scale_makes_its_row_nan():
    codes = torch.full((2, 1), 127, dtype=torch.uint8)
    broken = codes.clone()
    broken[1] = 255
    out = tensor_core_matmul(normal(E4, (2, 32), 0), normal(E4, (2, 32), 1), arch="sm_100", **scales(broken, codes))
    assert out.isnan().tolist() == [[False] * 2, [True] * 2]


def test_nan_has_the_bits_that_tensor_cores_write():
    a = torch.full((1, 32), torch.nan).to(E4)
    assert tensor_core_matmul(a, a).view(torch.int32).item() == NAN


def test_nan_in_fp16_has_the_bits_that_tensor_cores_write():
    a = torch.full((1, 32), torch.nan).to(E4)
    assert tensor_core_matmul(a, a, out_dtype=torch.float16).view(torch.int16).item() == 0x7FFF


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("arch", "a_dtype", "b_dtype"), ROWS)
def test_a_negative_zero_becomes_positive(form, arch, a_dtype, b_dtype):
    row = find_instruction(arch, a_dtype, b_dtype)
    a, b = decode(torch.full((1, 32), -0.0).to(a_dtype), row), decode(torch.ones(1, 32).to(b_dtype), row)
    out = form.sum_products(a, b, torch.full((1, 1), -0.0), Summation(row, 32, promote=False))
    assert out.view(torch.int32).item() == 0


def test_mma_sync_on_hopper_adds_c_in_fp32():
    a = torch.ones(1, 32).to(E4)
    c = torch.tensor([[2.0**24]])
    assert tensor_core_matmul(a, a, c, arch="sm_90_mma").item() == 2.0**24 + 32
    assert tensor_core_matmul(a, a, c, arch="sm_90").item() == 2.0**24


def test_mma_sync_on_hopper_takes_two_of_every_four_operands_at_a_time():
    # 2¹⁶ and −2¹⁶ cancel in the first half; small values survive in the other half
    a, b = torch.zeros(1, 32), torch.ones(1, 32)
    a[0, :3] = torch.tensor([256.0, -256.0, 2.0**-9])
    b[0, :3] = torch.tensor([256.0, 256.0, 2.0**-9])
    assert tensor_core_matmul(a.to(E4), b.to(E4), arch="sm_90_mma").item() == 2.0**-18
    assert tensor_core_matmul(a.to(E4), b.to(E4), arch="sm_90").item() == 0.0


def test_mma_sync_on_hopper_gives_operands_the_exponents_of_fp16():
    # E4M3's 2⁻⁹ has the exponent −6 as a subnormal number, and as FP16 −9: cut at 2^(6 − 25), not at 2^(9 − 25)
    a, b = torch.zeros(1, 32), torch.zeros(1, 32)
    a[0, [0, 1, 4]] = torch.tensor([2.0**-9, -(2.0**-9), 2.0**-3])
    b[0, [0, 1, 4]] = torch.tensor([2.0**15, 2.0**15, 2.0**-16])
    assert tensor_core_matmul(a.to(E4), b.to(E5), arch="sm_90_mma").item() == 2.0**-19
    assert tensor_core_matmul(a.to(E4), b.to(E5), arch="sm_100").item() == 0.0


def test_operands_need_not_be_contiguous():
    a, b = normal(E4, (40, 8), 0), normal(E5, (40, 9), 1)
    contiguous = tensor_core_matmul(a.T.contiguous(), b.T.contiguous())
    assert same_bits(tensor_core_matmul(a.T, b.T), contiguous)


@pytest.mark.parametrize("shape", [(0, 3, 32), (3, 0, 32), (3, 2, 0)])
def test_empty_gemms(shape):
    m, n, k = shape
    c = torch.randn(m, n)
    assert torch.equal(tensor_core_matmul(torch.zeros(m, k).to(E4), torch.zeros(n, k).to(E4), c), c)


def test_several_threads_give_the_same_bits():
    a, b = normal(E4, (300, 256), 0), normal(E4, (200, 256), 1)
    one = tensor_core_matmul(a, b, promote_every=128)
    torch.set_num_threads(2)
    try:
        assert same_bits(tensor_core_matmul(a, b, promote_every=128), one)
    finally:
        torch.set_num_threads(1)


def test_the_rounding_mode_of_the_caller_is_restored():
    tensor_core_matmul(normal(E4, (2, 32), 0), normal(E4, (2, 32), 1))
    assert torch.tensor(1.0) + torch.tensor(2.0**-24) == 1.0
    assert (torch.tensor(1.0) + torch.tensor(1.5 * 2.0**-24)).item() > 1.0


def test_without_a_compiler_torch_is_used_and_logged(monkeypatch, caplog):
    a, b = normal(E4, (3, 64), 0), normal(E4, (5, 64), 1)
    compiled = tensor_core_matmul(a, b)
    monkeypatch.setattr(kernels_native.shutil, "which", lambda name: None)
    kernels_native.load.cache_clear()
    try:
        assert same_bits(tensor_core_matmul(a, b), compiled)
        assert same_bits(tensor_core_matmul(a, b), compiled)
        assert [r.message for r in caplog.records if "no C++ compiler" in r.message] == [caplog.records[0].message]
    finally:
        kernels_native.load.cache_clear()


def test_a_compiler_is_found_on_this_machine():
    assert native.load() is not None


# ---- block-scaled GEMMs


@pytest.mark.parametrize("b_block", [(128, 128), (1, 128), (None, None)])
def test_a_gemm_with_promotion_is_close_to_the_reference(b_block):
    a = octile.quantize(torch.randn(20, 300), (1, 128))
    b = octile.quantize(torch.randn(30, 300), b_block)
    y = tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, promote_every=128)
    torch.testing.assert_close(y, octile.matmul_nt(a, b, torch.float32), rtol=0, atol=3e-3 * y.std().item())


def test_a_per_tensor_scale_is_applied_to_the_whole_sum():
    a, b = (octile.quantize(torch.randn(9, 256), (None, None)) for _ in range(2))
    y = tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, promote_every=None)
    assert torch.equal(y, tensor_core_matmul(a.data, b.data) * (a.scale * b.scale))


def test_equal_scales_need_no_rescaling():
    data = [normal(E4, (5, 256), seed) for seed in (0, 1)]
    scale = torch.full((5, 2), 0.37)
    y = tensor_core_scaled_matmul(data[0], scale, (1, 128), data[1], scale, (1, 128), promote_every=None)
    assert torch.equal(y, tensor_core_matmul(*data) * (scale[0, 0] * scale[0, 0]))


def test_shorter_blocks_promote_earlier():
    a, b = (octile.quantize(torch.randn(4, 128), (1, 64)) for _ in range(2))
    parts = [
        tensor_core_matmul(a.data[:, k], b.data[:, k]) * (a.scale[:, i, None] * b.scale[:, i])
        for i, k in enumerate((slice(0, 64), slice(64, 128)))
    ]
    y = tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, promote_every=128)
    torch.testing.assert_close(y, parts[0] + parts[1], rtol=1e-6, atol=1e-6)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"b": torch.zeros(2, 31).to(E4)}, ValueError, r"\[M, K\]"),
        ({"arch": "sm_75"}, ValueError, "sm_75"),
        ({"arch": "sm_80"}, TypeError, "sm_80 has no"),
        ({"a": [[0.0] * 32]}, TypeError, "a must be a tensor, not list"),
        ({"c": [[0.0] * 2] * 2}, TypeError, "c must be a tensor, not list"),
        ({"promote_every": 48}, ValueError, "multiple of the 32"),
        ({"promote_every": 0}, ValueError, "multiple of the 32"),
        ({"promote_every": 32.0}, TypeError, "must be an int or None, not 32.0"),
        ({"promote_every": "128"}, TypeError, "must be an int or None, not '128'"),
        ({"promote_every": 32, "arch": "sm_90_mma"}, ValueError, "must be None"),
        ({"promote_every": 32, "out_dtype": torch.float16}, ValueError, "FP16 accumulator"),
        ({"out_dtype": torch.bfloat16}, TypeError, "bfloat16"),
        ({"out_dtype": torch.float16, "arch": "sm_90_mma"}, TypeError, "no FP16 accumulator"),
        ({"c": torch.zeros(2, 2).half()}, TypeError, "c must be"),
        ({"c": torch.zeros(3, 2)}, ValueError, r"c must be \(2, 2\)"),
        ({"b": torch.zeros(2, 32)}, TypeError, "float32"),
        ({"a_scale": torch.ones(2, 1).to(torch.float8_e8m0fnu)}, ValueError, "together"),
        ({"a_scale": torch.ones(2, 1), "b_scale": torch.ones(2, 1)}, TypeError, "float8_e8m0fnu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, words):
    arguments = {"a": torch.zeros(2, 32).to(E4), "b": torch.zeros(2, 32).to(E4)} | change
    with pytest.raises(error, match=words):
        tensor_core_matmul(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a": torch.zeros(4, 1 << 20).to(E4), "a_scale": torch.ones(4, 1 << 13)}, ValueError, "agree in K"),
        ({"b": torch.zeros(5, 128).to(E4), "b_scale": torch.ones(5, 1)}, ValueError, "agree in K"),
        ({"a_scale": torch.ones(3, 2)}, ValueError, r"a's scale must be \(4, 2\)"),
        ({"b_scale": torch.ones(5, 1).expand(5, 3)}, ValueError, r"b's scale must be \(5, 2\)"),
        ({"a_scale": torch.ones(4, 2).half()}, TypeError, "a's scale must be float32"),
        ({"a_scale": [1.0]}, TypeError, "a_scale must be a tensor, not list"),
        ({"b": torch.zeros(256).to(E4)}, ValueError, "b and its block must have 2 dimensions"),
        ({"a_block": (128,)}, ValueError, "a and its block must have 2 dimensions"),
        ({"b": torch.zeros(5, 256)}, TypeError, "sm_90 has no instruction for .* and b of torch.float32"),
        (
            {"b": torch.zeros(5, 256), "arch": find_instruction("sm_90", E4, E4)},
            TypeError,
            "b must be an operand of wgmma.*, not torch.float32",
        ),
        ({"a_block": (0, 128)}, ValueError, "a's block must be at least 1×1"),
        ({"promote_every": 128.0}, TypeError, "must be an int or None"),
    ],
)
def test_block_scaled_operands_that_do_not_fit_are_refused(change, error, words):
    a, b = (torch.zeros(rows, 256).to(E4) for rows in (4, 5))
    arguments = {"a": a, "a_scale": torch.ones(4, 2), "a_block": (1, 128)}
    arguments |= {"b": b, "b_scale": torch.ones(5, 2), "b_block": (1, 128)}
    with pytest.raises(error, match=words):
        tensor_core_scaled_matmul(**(arguments | change))


@pytest.mark.parametrize("promote_every", [512, 1 << 63, 1 << 64])
def test_an_interval_longer_than_k_is_all_of_k(promote_every):
    a, b = (normal(E4, (5, 300), seed) for seed in (0, 1))
    expected = tensor_core_matmul(a, b, promote_every=320)
    assert torch.equal(tensor_core_matmul(a, b, promote_every=promote_every), expected)
    scaled = torch.ones(1, 1), (5, 300)
    assert torch.equal(tensor_core_scaled_matmul(a, *scaled, b, *scaled, promote_every=promote_every), expected)


def test_an_initial_negative_zero_without_products_is_positive_zero():
    empty = torch.zeros(2, 0).to(E4)
    y = tensor_core_matmul(empty, empty, torch.full((2, 2), -0.0))
    assert not y.any()
    assert not y.signbit().any()


def test_blocks_shorter_than_a_k_block_are_refused():
    a, b = (octile.quantize(torch.randn(4, 64), (1, 16)) for _ in range(2))
    with pytest.raises(ValueError, match="multiples of 32 along K"):
        tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block)


def test_every_format_of_the_table_has_a_dtype():
    assert set(FORMATS.values()) >= {fmt for rows in ARCHITECTURES.values() for row in rows for fmt in row.formats}
    assert FORMATS[torch.float16] is FP16
