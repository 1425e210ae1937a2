"""The fast E4M3 decoder against the format's definition, for all 256 codes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octile.formats import E4M3
from octile.kernels.cpu import decode_e4m3

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def test_every_code_is_decoded_to_its_value():
    np.testing.assert_array_equal(decode_e4m3(CODES).numpy(), E4M3.values().numpy())


def test_zeros_keep_their_sign():
    assert decode_e4m3(torch.tensor([0.0, -0.0]).to(torch.float8_e4m3fn)).signbit().tolist() == [False, True]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_of_either_sign_is_found_among_numbers(code):
    codes = torch.tensor([1, code, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert decode_e4m3(codes).isnan().tolist() == [False, True, False]


def test_subnormal_numbers_survive_a_processor_that_flushes_denormals(flushed_denormals):
    assert decode_e4m3(CODES[:8]).mul(512).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_strides_do_not_matter():
    codes = CODES.view(16, 16).T
    np.testing.assert_array_equal(decode_e4m3(codes).numpy(), E4M3.values().view(16, 16).T.numpy())


def test_nothing_is_decoded_to_nothing():
    assert decode_e4m3(CODES[:0].view(0, 7)).shape == (0, 7)


def test_the_data_stay_as_they_were():
    before = CODES.view(torch.uint8).clone()
    decode_e4m3(CODES)
    assert torch.equal(CODES.view(torch.uint8), before)
