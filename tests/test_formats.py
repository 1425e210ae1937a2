"""Number formats: against ml_dtypes for every encoded value, against exact fractions where it has no such type."""

import re
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E5M6,
    FP16,
    FP32,
    INT8,
    UE8M0,
    FloatFormat,
    by_name,
    pack12,
    unpack12,
)

PEERS = {  # what numpy calls them
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    UE8M0: ml_dtypes.float8_e8m0fnu,
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
}
FLOAT_FORMATS = [*PEERS, E5M6, FP32]
TABLED = [*PEERS, E5M6]  # small enough for a table of all values

every_format = pytest.mark.parametrize("fmt", FLOAT_FORMATS, ids=lambda f: f.name)
every_tabled = pytest.mark.parametrize("fmt", TABLED, ids=lambda f: f.name)
every_peer = pytest.mark.parametrize("fmt", PEERS, ids=lambda f: f.name)

any_float32 = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))  # every NaN too


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def positive_values(fmt: FloatFormat) -> np.ndarray:
    """All finite values above zero in rising order, in float64, where sums and halves of neighbors are exact."""
    values = fmt.values().double().numpy()
    return np.unique(values[np.isfinite(values) & (values > 0)])


def adversarial(fmt: FloatFormat) -> np.ndarray:
    """Where rounding goes wrong: values, ties and their FP32 neighbors, the edges of the range, and special values."""
    values = positive_values(fmt)
    spacing = values[-1] - values[-2]
    with np.errstate(over="ignore"):
        ties = np.concatenate([[values[0] / 2], (values[1:] + values[:-1]) / 2, [values[-1] + spacing / 2]])
        exact = np.concatenate([values, ties, [values[-1] + spacing, values[-1] * 2]]).astype(np.float32)
    exact = np.concatenate([exact, np.float32([0, 1e-45, 2**-126, 2**-127, 1e38, 3.4028235e38, np.inf, np.nan])])
    inf = np.float32(np.inf)
    with np.errstate(over="ignore"):
        magnitudes = np.concatenate([exact, np.nextafter(exact, inf), np.nextafter(exact, np.float32(0))])
    return np.concatenate([magnitudes, -magnitudes])


def random_bits(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def encoded_by_peer(fmt: FloatFormat, x: np.ndarray) -> np.ndarray:
    """The encoded values of numpy's cast, with FP16's quiet NaN for every NaN, whose payload numpy would preserve."""
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = x.astype(PEERS[fmt]).view(np.uint8 if fmt.bits == 8 else np.uint16).astype(np.int64)
    return np.where(np.isnan(x), np.where(np.signbit(x), 0xFE00, 0x7E00), encoded) if fmt is FP16 else encoded


def assert_encodes_as_peer(fmt: FloatFormat, x: np.ndarray) -> None:
    encoded = fmt.encode(torch.from_numpy(x), saturate=False).numpy().astype(np.int64)
    wrong = encoded != encoded_by_peer(fmt, x)
    assert not wrong.any(), f"{x[wrong][:4]} became {encoded[wrong][:4]}"


# What a format is


@pytest.mark.parametrize(
    ("fmt", "bits", "largest", "smallest_normal", "smallest_subnormal", "has_inf"),
    [
        (E4M3, 8, 448, 2**-6, 2**-9, False),
        (E5M2, 8, 57344, 2**-14, 2**-16, True),
        (E5M6, 12, 65024, 2**-14, 2**-20, True),
        (UE8M0, 8, 2**127, 2**-127, 2**-127, False),
        (FP16, 16, 65504, 2**-14, 2**-24, True),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_limits_are_the_published_ones(fmt, bits, largest, smallest_normal, smallest_subnormal, has_inf):
    found = (fmt.bits, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.has_inf)
    assert found == (bits, largest, smallest_normal, smallest_subnormal, has_inf)


@pytest.mark.parametrize("fmt", [*PEERS, FP32], ids=lambda f: f.name)
def test_limits_are_those_of_finfo(fmt):
    finfo = ml_dtypes.finfo(PEERS.get(fmt, np.float32))
    found = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon)
    assert found == tuple(float(v) for v in (finfo.max, finfo.smallest_normal, finfo.smallest_subnormal, finfo.eps))


@every_format
def test_encoded_values_are_as_wide_as_the_torch_dtype(fmt):
    assert fmt.dtype is None or fmt.bits == 8 * fmt.dtype.itemsize


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": 3}, TypeError, "name must be text, not 3"),
        ({"exponent_bits": 0}, ValueError, "exponent_bits must be at least 1, not 0"),
        ({"exponent_bits": 9}, ValueError, "exponent_bits must be at most 8, not 9"),
        ({"exponent_bits": 4.0}, TypeError, "exponent_bits must be a whole number, not 4.0"),
        ({"mantissa_bits": -1}, ValueError, "mantissa_bits must be at least 0, not -1"),
        ({"mantissa_bits": 24}, ValueError, "mantissa_bits must be at most 23, not 24"),
        ({"bias": 128}, ValueError, "bias must be at most 127, not 128"),
        ({"bias": -113}, ValueError, "bias must be at least -112, not -113: the largest number is none of FP32"),
        ({"dtype": "float8_e4m3fn"}, TypeError, "dtype must be a torch.dtype or None, not 'float8_e4m3fn'"),
        ({"mantissa_bits": 6}, ValueError, "dtype must have at least 11 bits, which torch.float8_e4m3fn has not"),
        ({"has_inf": 1}, TypeError, "has_inf must be true or false, not 1"),
        ({"has_inf": True, "has_nan": False}, ValueError, "has_nan must be True, not False, with has_inf"),
        ({"has_inf": True, "mantissa_bits": 0}, ValueError, "mantissa_bits must be at least 1, not 0, with has_inf"),
        ({"signed": False}, ValueError, "mantissa_bits must be 0, not 3, in a format without a sign"),
        ({"signed": False, "mantissa_bits": 0, "has_nan": False}, ValueError, "has_nan must be True, not False, in a"),
        ({"has_inf": True, "exponent_bits": 1}, ValueError, "exponent_bits must be more than 1: no normal number"),
    ],
)
def test_a_format_that_cannot_be_is_refused(changes, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        replace(E4M3, **changes)


@given(st.integers(1, 8), st.integers(0, 6), st.integers(-130, 127), *[st.booleans()] * 3)
def test_the_numbers_of_any_format_that_is_not_refused_encode_to_themselves(
    exponent_bits, mantissa_bits, bias, has_inf, signed, has_nan
):
    try:
        fmt = FloatFormat("any", exponent_bits, mantissa_bits, bias, None, has_inf, signed, has_nan)
    except ValueError:
        return
    encoded = torch.arange(1 << fmt.bits)
    values = fmt.decode(encoded)
    is_finite = values.isfinite()
    assert torch.equal(fmt.encode(values[is_finite]).long(), encoded[is_finite])
    assert values[is_finite].max() == fmt.max
    assert (values.isnan().any(), values.isinf().any()) == (has_nan, has_inf)


def test_formats_are_found_by_name():
    assert list(by_name) == ["e4m3", "e5m2", "e5m6", "e2m1", "ue8m0", "fp16", "bf16", "fp32", "int8"]


# Decoding


@every_peer
def test_every_encoded_value_decodes_as_in_ml_dtypes(fmt):
    encoded = np.arange(2**fmt.bits, dtype=np.uint8 if fmt.bits == 8 else np.uint16)
    expected = encoded.view(PEERS[fmt]).astype(np.float32)
    np.testing.assert_array_equal(fmt.values().numpy(), expected)


@every_peer
def test_zeros_decode_with_their_sign(fmt):
    zeros = fmt.values() == 0
    assert fmt.values()[zeros].signbit().tolist() == ([False, True] if fmt.signed else [])


def test_every_encoded_e5m6_decodes_to_its_fraction():
    for encoded, value in enumerate(E5M6.values().tolist()):
        sign, field, mantissa = encoded >> 11, encoded >> 6 & 31, encoded & 63
        if field == 31:
            assert np.isnan(value) if mantissa else value == (-np.inf if sign else np.inf)
        else:
            significand = mantissa if field == 0 else 64 + mantissa
            assert Fraction(value) == (-1) ** sign * Fraction(significand, 64) * Fraction(2) ** (max(field, 1) - 15)


@given(any_float32)
def test_encoded_fp32_is_its_bits(x):
    x = torch.tensor([x])
    encoded = FP32.encode(x, saturate=False)
    assert x.isnan() or encoded.item() == x.view(torch.int32).item() % 2**32
    assert torch.equal(
        FP32.decode(encoded).nan_to_num(7.0, torch.inf, -torch.inf), x.nan_to_num(7.0, torch.inf, -torch.inf)
    )


def test_8_bit_data_decodes_from_its_own_dtype():
    x = torch.linspace(-400, 400, 99).to(torch.float8_e4m3fn)
    assert torch.equal(E4M3.decode(x), x.float())


def test_bits_above_the_format_are_ignored():
    assert E5M6.decode(torch.tensor([0x5400 - 0x8000, 0x400])).tolist() == [E5M6.decode(torch.tensor(0x400)).item()] * 2


# Encoding


@every_tabled
def test_every_value_encodes_to_itself(fmt):
    values = fmt.values()
    encoded = torch.arange(2**fmt.bits)
    known = ~values.isnan()
    assert torch.equal(fmt.encode(values, saturate=False)[known].long(), encoded[known])


@every_peer
def test_adversarial_floats_encode_as_in_ml_dtypes(fmt):
    assert_encodes_as_peer(fmt, adversarial(fmt))


@every_peer
def test_random_floats_encode_as_in_ml_dtypes(fmt):
    assert_encodes_as_peer(fmt, random_bits(200_000))


@given(st.sampled_from(list(PEERS)), st.lists(any_float32, min_size=1, max_size=64))
def test_any_float_encodes_as_in_ml_dtypes(fmt, x):
    assert_encodes_as_peer(fmt, np.array(x, np.float32))


@every_peer
def test_saturating_is_encoding_what_was_clipped(fmt):
    x = np.concatenate([adversarial(fmt), random_bits(50_000)])
    encoded = fmt.encode(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(encoded, encoded_by_peer(fmt, np.clip(x, np.float32(-fmt.max), np.float32(fmt.max))))


E5M6_FRACTIONS = [Fraction(v) for v in [0.0, *positive_values(E5M6), 65536.0]]  # by encoded value, the last one of Inf


def nearest_e5m6(x: float) -> float:
    """The specification in exact fractions: the nearest value, of two equally near ones the even one."""
    exact = min(abs(Fraction(x)), E5M6_FRACTIONS[-1])
    above = bisect_left(E5M6_FRACTIONS, exact)
    encoded = min(range(max(above - 1, 0), above + 1), key=lambda c: (abs(E5M6_FRACTIONS[c] - exact), c % 2))
    return float(np.copysign(float(E5M6_FRACTIONS[encoded]) if encoded < len(E5M6_FRACTIONS) - 1 else np.inf, x))


def test_adversarial_floats_round_to_the_nearest_e5m6():
    x = adversarial(E5M6)
    x = np.unique(x[np.isfinite(x)])
    rounded = E5M6.round(torch.from_numpy(x), saturate=False).tolist()
    assert rounded == [nearest_e5m6(v) for v in x.tolist()]


@given(
    st.lists(st.floats(-70000, 70000, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32), min_size=1, max_size=64)
)
def test_any_float_rounds_to_the_nearest_e5m6(x):
    assert E5M6.round(floats(*x), saturate=False).tolist() == [nearest_e5m6(v) for v in x]


@every_format
def test_encoding_accepts_any_strides(fmt):
    x = torch.linspace(0.5, 400, 96).view(8, 12)
    assert torch.equal(fmt.encode(x.T), fmt.encode(x).T)


# Rounding


@every_tabled
def test_rounding_is_monotonic(fmt):
    x = torch.from_numpy(
        np.sort(np.concatenate([positive_values(fmt).astype(np.float32), np.abs(random_bits(20_000))]))
    )
    rounded = fmt.round(x[x > 0])
    assert (rounded.diff() >= 0).all()


@every_tabled
def test_rounding_twice_changes_nothing(fmt):
    once = fmt.round(torch.from_numpy(random_bits(20_000)), saturate=False)
    assert torch.equal(fmt.round(once, saturate=False).nan_to_num(7.0), once.nan_to_num(7.0))


@every_tabled
def test_rounding_is_off_by_at_most_half_the_spacing(fmt):
    x = torch.from_numpy(np.abs(random_bits(20_000))).double()
    x = x[(x >= fmt.smallest_normal) & (x <= fmt.max)]
    spacing = fmt.epsilon * 2.0 ** x.log2().floor()
    assert ((fmt.round(x.float()).double() - x).abs() <= spacing / 2).all()


@every_format
def test_overflow_saturates(fmt):
    expected = [fmt.max, -fmt.max] if fmt.signed else [fmt.max]
    assert fmt.round(floats(torch.inf, -torch.inf)[: len(expected)]).tolist() == expected


@every_format
def test_overflow_without_saturation_is_inf_or_nan(fmt):
    rounded = fmt.round(floats(torch.inf, -torch.inf), saturate=False)
    assert rounded.tolist() == [torch.inf, -torch.inf] if fmt.has_inf else rounded.isnan().all()


@every_format
@pytest.mark.parametrize("saturate", [True, False])
def test_nan_stays_nan(fmt, saturate):
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
    assert fmt.round(bits.view(torch.float32), saturate).isnan().all()


@pytest.mark.parametrize("fmt", [f for f in FLOAT_FORMATS if f.signed], ids=lambda f: f.name)
def test_zeros_keep_their_sign(fmt):
    rounded = fmt.round(floats(0.0, -0.0, -1e-45 if fmt.bits < 16 else -0.0))
    assert rounded.tolist() == [0, 0, 0]
    assert rounded.signbit().tolist() == [False, True, True]


def test_ue8m0_has_neither_zero_nor_negative_numbers():
    assert UE8M0.round(floats(0.0, -0.0, -1.0, -torch.inf)).isnan().all()


def test_ue8m0_rounds_to_nearest_and_ties_up():
    assert UE8M0.round(floats(1.0, 1.49, 1.5, 2.99, 3.0, 6.0)).tolist() == [1, 1, 2, 2, 4, 8]


def test_ue8m0_rounds_to_nearest_also_where_fp32_is_subnormal():
    x = torch.tensor([1.01, 1.49, 1.5, 1.99, 2.99, 3.0], dtype=torch.float64) * 2.0**-127
    assert (UE8M0.round(x.float()).double() * 2.0**127).tolist() == [1, 1, 2, 2, 2, 4]


def test_a_format_without_a_sign_rounds_to_nearest_from_its_smallest_value_on():
    fmt = FloatFormat("ue5m0", 5, 0, 15, None, has_inf=False, signed=False)
    assert fmt.encode(floats(0.5, 1.01, 1.49, 1.5, 2.99, 3.0) * 2.0**-15).tolist() == [0, 0, 0, 1, 1, 2]


def test_ue8m0_ends_at_its_smallest_value():
    assert UE8M0.round(floats(1e-45, 2.0**-140, 2.0**-127)).tolist() == [2.0**-127] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_keeps_the_dtype_and_the_values(dtype):
    x = torch.linspace(-500, 500, 333).to(dtype)
    rounded = E4M3.round(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.float(), E4M3.round(x.float()))


def test_meta_tensors_are_encoded():
    encoded = E5M6.encode(torch.empty(3, 5, device="meta"))
    assert (encoded.shape, encoded.dtype, encoded.device.type) == ((3, 5), torch.int32, "meta")


# Integers


def test_int8_is_symmetric_and_ties_to_even():
    assert INT8.round(floats(0.5, 1.5, -2.5, 126.5, 127.5, -128.0, torch.inf)).tolist() == [
        0,
        2,
        -2,
        126,
        127,
        -127,
        127,
    ]


def test_int8_rounding_keeps_nan():
    assert INT8.round(floats(torch.nan)).isnan().all()


# Two 12-bit values in three bytes


@given(st.lists(st.integers(0, 4095), max_size=33), st.integers(1, 3))
def test_packing_is_undone_by_unpacking(encoded, rows):
    encoded = torch.tensor(encoded, dtype=torch.int32).expand(rows, -1)
    assert torch.equal(unpack12(pack12(encoded), encoded.shape[-1]), encoded)


@pytest.mark.parametrize(("n", "size"), [(0, 0), (1, 3), (2, 3), (7, 12), (128, 192)])
def test_two_values_take_three_bytes(n, size):
    packed = pack12(torch.zeros(4, n, dtype=torch.int32))
    assert (packed.shape, packed.dtype) == ((4, size), torch.uint8)


def test_packed_bytes_lie_low_to_high():
    assert pack12(torch.tensor([0xABC, 0x123])).tolist() == [0xBC, 0x3A, 0x12]


# Refusals


@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_only_floats_within_fp32_are_rounded(fmt, dtype):
    with pytest.raises(TypeError, match=f"x must be float32 .* not {dtype}"):
        fmt.round(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2])
def test_only_integers_are_decoded(dtype):
    with pytest.raises(TypeError, match=f"must hold e4m3 in uint8, int16, int32 or int64, not {dtype}"):
        E4M3.decode(torch.zeros(2, dtype=dtype))


def test_no_table_of_all_fp32_values():
    with pytest.raises(ValueError, match=r"fp32 has 2\^32 values"):
        FP32.values()


def test_packing_refuses_bytes():
    with pytest.raises(TypeError, match=r"encoded must be int32 or int64, not torch\.uint8"):
        pack12(torch.zeros(2, dtype=torch.uint8))


def test_unpacking_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"packed must be uint8, not torch\.int32"):
        unpack12(torch.zeros(3, dtype=torch.int32), 2)


@pytest.mark.parametrize("n", [0, 2, 5])
def test_unpacking_refuses_another_length(n):
    with pytest.raises(ValueError, match=f"for n = {n} values, not 6"):
        unpack12(torch.zeros(6, dtype=torch.uint8), n)


# E2M1 has no NaN, so it stands beside the others


def test_e2m1_has_sixteen_numbers():
    assert np.array_equal(
        E2M1.values().numpy(), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float)
    )
    assert (E2M1.bits, E2M1.max, E2M1.smallest_normal, E2M1.smallest_subnormal) == (4, 6.0, 1.0, 0.5)


@pytest.mark.parametrize("saturate", [True, False])
def test_e2m1_encodes_as_its_peer(saturate):
    x = np.concatenate([adversarial(E2M1), random_bits(100_000)])
    x = x[~np.isnan(x)]
    peer = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(E2M1.encode(torch.from_numpy(x), saturate).numpy(), peer)


def test_e2m1_makes_the_largest_number_of_a_nan():
    assert E2M1.encode(floats(float("nan"), -float("nan"))).tolist() == [7, 7]
