"""Tests of the fast CPU conversions against the formats' definitions: all encoded values, and all ties of E5M6."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octile.formats import E4M3, E5M6, pack12, unpack12
from octile.kernels.cpu import decode_e4m3, decode_e5m6, encode_e5m6

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
