"""Tests of the paged latent cache: what is written is read, in high precision and in FP8."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.ops.latent_cache import fp8_rows, read_latents, row_bytes, write_latents
from octile.ops.quantize import dequantize, quantize, round_up_to_bfloat16
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.paged_caches import new_cache, random_rows

C, R, P = 136, 6, 3  # a latent of one whole tile and a partial one
HIGH_PRECISION = [torch.float32, torch.bfloat16, torch.float16]


def test_a_row_of_deepseek_v3_has_656_bytes():
    assert row_bytes(512, 64) == 656


@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_rows_are_rounded_to_the_cache_and_read_back(dtype: torch.dtype):
    cache, slots = new_cache(P, C, R, dtype), torch.tensor([130, 5, 64])
    latent, rope = random_rows(3, C, R)
    write_latents(cache, slots, latent, rope)
    expected = torch.cat((latent, rope), dim=1).to(dtype)
    assert torch.equal(cache.view(-1, C + R)[slots], expected)
    assert torch.equal(read_latents(cache, slots, C, torch.float32), expected.float())


def test_fp8_rows_are_quantized_in_tiles_of_128_and_the_rotary_key_is_not():
    cache, slots = new_cache(P, C, R, torch.uint8), torch.tensor([130, 5, 64])
    latent, rope = random_rows(3, C, R)
    write_latents(cache, slots, latent, rope)
    scale = round_up_to_bfloat16(quantize(latent, 1, 128, "e4m3", False)[1].contiguous())
    data = (latent / scale.repeat_interleave(128, 1)[:, :C]).to(torch.float8_e4m3fn)
    stored = fp8_rows(cache.view(-1, cache.shape[-1])[slots], C)
    assert torch.equal(stored.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(stored.scale, scale)
    assert torch.equal(stored.rope, rope.bfloat16())
    expected = torch.cat((dequantize(data, scale, 1, 128, torch.float32), rope.bfloat16().float()), dim=1)
    assert torch.equal(read_latents(cache, slots, C, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_other_rows_are_not_written(dtype: torch.dtype):
    cache = new_cache(P, C, R, dtype)
    write_latents(cache, torch.tensor([7, 70]), *random_rows(2, C, R))
    written = cache.view(torch.uint8).view(P * 64, -1).any(1)
    assert written.nonzero().flatten().tolist() == [7, 70]


def test_a_row_with_a_negative_slot_is_not_written():
    cache = new_cache(P, C, R, torch.bfloat16)
    write_latents(cache, torch.tensor([-1, 9]), *random_rows(2, C, R))
    assert torch.equal(cache.view(P * 64, -1).any(1).nonzero().flatten(), torch.tensor([9]))


@pytest.mark.parametrize(
    "amax", [1.0, 448.0, 449.0, 1e-3, 2.0**-119, 1e-45, torch.finfo(torch.float32).max, -3.0], ids=str
)
def test_a_scale_is_the_smallest_number_of_bf16_that_keeps_a_tile_in_range(amax: float):
    cache = new_cache(1, 128, 2, torch.uint8)
    write_latents(cache, torch.tensor([0]), torch.tensor([[amax, *[0.0] * 127]]), torch.zeros(1, 2))
    scale = fp8_rows(cache[0, :1], 128).scale.double()
    below = (scale.float().view(torch.int32) - 2**16).view(torch.float32).double()
    assert torch.equal(scale, scale.bfloat16().double())
    assert abs(amax) / 448 <= scale
    assert below < 2.0**-126 or below < abs(amax) / 448


@pytest.mark.parametrize(("value", "scale"), [(0.0, 1.0), (math.inf, math.inf), (-math.inf, math.inf)])
def test_scales_of_zeros_and_infinities(value: float, scale: float):
    cache = new_cache(1, 128, 2, torch.uint8)
    write_latents(cache, torch.tensor([0]), torch.full((1, 128), value), torch.zeros(1, 2))
    assert float(fp8_rows(cache[0, 0], 128).scale) == scale


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40).map(lambda n: 4 * n), st.integers(1, 20).map(lambda n: 2 * n), st.integers(0, 2**31))
def test_the_error_of_fp8_is_that_of_its_spacing(latent_dim: int, rope_dim: int, seed: int):
    """E4M3 has 4 significant bits: half a unit is 2⁻⁴ of a value, and at least 2⁻¹⁰ of the scale."""
    torch.manual_seed(seed)
    latent = torch.randn(5, latent_dim) * torch.exp2(torch.randint(-30, 30, (5, latent_dim)).float())
    cache, slots = new_cache(1, latent_dim, rope_dim, torch.uint8), torch.arange(5)
    write_latents(cache, slots, latent, torch.zeros(5, rope_dim))
    found = read_latents(cache, slots, latent_dim, torch.float32)[:, :latent_dim]
    scale = fp8_rows(cache[0, :5], latent_dim).scale.repeat_interleave(128, 1)[:, :latent_dim]
    assert ((found - latent).abs() <= torch.maximum(latent.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)).all()


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_operators_are_well_formed(dtype: torch.dtype):
    cache, slots = new_cache(P, C, R, dtype), torch.tensor([1, 65])
    assert_well_formed(write_latents, (cache, slots, *random_rows(2, C, R)))
    assert_well_formed(read_latents, (cache, slots, C, torch.bfloat16))
    assert_fake_is_true(read_latents, (cache, slots, C, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": new_cache(P, C, R, torch.float32).double()}, TypeError, "cache must be float32"),
        ({"cache": torch.zeros(P, 63, C + R)}, ValueError, "cache must be \\[P, 64"),
        ({"cache": new_cache(P, C, R + 2, torch.float32)}, ValueError, "rope must have the 8 channels"),
        ({"slots": torch.tensor([1, 2], dtype=torch.int32)}, TypeError, "slots must be int64"),
        ({"slots": torch.tensor([1, 2, 3])}, ValueError, "slots must be \\(2,\\)"),
        ({"slots": torch.tensor([1, P * 64])}, IndexError, "slots must be below the cache's 192"),
        ({"rope": torch.zeros(2, R).bfloat16()}, TypeError, "rope must be torch.float32"),
        ({"latent": torch.zeros(C, 2).mT}, ValueError, "rows of latent and rope must be contiguous"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, error: type[Exception], message: str):
    latent, rope = random_rows(2, C, R)
    arguments = {
        "cache": new_cache(P, C, R, torch.float32), "slots": torch.tensor([1, 2]), "latent": latent, "rope": rope
    }  # fmt: skip
    with pytest.raises(error, match=message):
        write_latents(*(arguments | change).values())


def test_fp8_needs_scales_on_whole_words():
    with pytest.raises(ValueError, match="a multiple of 4 channels, not 6"):
        write_latents(
            torch.zeros(1, 64, 20, dtype=torch.uint8), torch.tensor([0]), torch.zeros(1, 6), torch.zeros(1, 2)
        )
