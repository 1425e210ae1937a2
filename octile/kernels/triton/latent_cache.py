# mypy: allow-untyped-defs
"""Writing rows of the paged latent cache, bit for bit as `octile.ops.latent_cache` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.fp8_bits import as_encoded, quantize_constants
from octile.kernels.triton.launch_config import EXACT, WRITE_LATENTS
from octile.kernels.triton.scaling import divide, magnitude, round_to_format, round_up, scale_from_amax


def launch_write(cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """Write rows latent [T, C] and rope [T, R] to slots [T] of a cache [P, 64, ·]."""
    (t, c), r = latent.shape, rope.shape[1]
    if not t:
        return
    rows, shape = cache.shape[0] * cache.shape[1], {"C": c, "R": r, "RS": triton.next_power_of_2(r)}
    with torch.cuda.device_of(cache):
        if cache.dtype == torch.uint8:
            data, scales, ropes = (cache.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16))
            write_fp8[(t,)](
                as_encoded(data), scales, ropes, slots, latent, rope, rows, cache.shape[2], slots.stride(0),
                latent.stride(0), rope.stride(0), **shape, TILES=triton.next_power_of_2(triton.cdiv(c, 128)),
                **quantize_constants(torch.float8_e4m3fn), **WRITE_LATENTS, **EXACT,
            )  # fmt: skip
        else:
            write_values[(t,)](
                cache, slots, latent, rope, rows, slots.stride(0), latent.stride(0), rope.stride(0), **shape,
                CS=triton.next_power_of_2(c), **WRITE_LATENTS, **EXACT,
            )  # fmt: skip


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    latents, slots = cases.empty(256, 576), cases.empty(256, dtype=torch.int64)
    halves = latents[:, :512], latents[:, 512:]
    return {
        "write latents": lambda: launch_write(cases.latent_cache(cases.BF16), slots, *halves),
        "write latents, FP8": lambda: launch_write(cases.latent_cache(torch.uint8), slots, *halves),
    }


@triton.jit
def write_values(
    cache, slots, latent, rope, rows, slot_step, latent_row, rope_row,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr,
):  # fmt: skip
    """A program writes one row in high precision."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t * slot_step)
    inside = tl.where((slot >= 0) & (slot < rows), 1, 0)  # a factor of the numbers of channels that are written
    c, r = tl.arange(0, CS), tl.arange(0, RS)
    to = cache + slot * (C + R)
    value = tl.load(latent + t * latent_row + c, mask=c < C)
    rotary = tl.load(rope + t * rope_row + r, mask=r < R)
    store_values(to, value, rotary, inside, C, CS, R, RS)


@triton.jit
def write_fp8(
    data, scales, ropes, slots, latent, rope, rows, row_bytes, slot_step, latent_row, rope_row,
    C: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, TILES: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program writes one row in FP8: the same bytes are addressed as encoded values, scales and BF16 numbers."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t * slot_step)
    inside = tl.where((slot >= 0) & (slot < rows), 1, 0)  # a factor of the numbers of channels that are written
    c = tl.arange(0, TILES * 128)
    value = tl.load(latent + t * latent_row + c, mask=c < C, other=0.0).to(tl.float32)
    r = tl.arange(0, RS)
    rotary = tl.load(rope + t * rope_row + r, mask=r < R)
    start = slot * row_bytes
    store_fp8(data, scales, ropes, start, value, rotary, inside, C, R, RS, TILES, INVERSE, REST, MANTISSA, BIAS)


@triton.jit
def store_values(
    to, value, rotary, inside, C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr
):  # fmt: skip
    """Store a latent [CS] and a rotary key [RS] as the row at `to`, if inside is 1; if it is 0, nothing."""
    c, r = tl.arange(0, CS), tl.arange(0, RS)
    tl.store(to + c, value.to(to.dtype.element_ty), mask=c < C * inside)
    tl.store(to + C + r, rotary.to(to.dtype.element_ty), mask=r < R * inside)


@triton.jit
def store_fp8(
    data, scales, ropes, start, value, rotary, inside,
    C: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, TILES: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store a latent [TILES · 128], float32, zeros from C on, and a rotary key [RS] as the row at byte `start`."""
    c, r = tl.arange(0, TILES * 128), tl.arange(0, RS)
    tiles = tl.reshape(value, [TILES, 128])
    scale = round_up(scale_from_amax(tl.max(magnitude(tiles), axis=1), INVERSE, REST, False), 0xFFFF)  # to BF16
    encoded = round_to_format(divide(tiles, scale[:, None], False), data.dtype.element_ty, MANTISSA, BIAS)
    tl.store(data + start + c, tl.reshape(encoded, [TILES * 128]), mask=c < C * inside)
    tile = tl.arange(0, TILES)
    tl.store(scales + (start + C) // 4 + tile, scale, mask=tile * 128 < C * inside)
    at = (start + C + (C + 127) // 128 * 4) // 2 + r
    tl.store(ropes + at, rotary.to(tl.bfloat16), mask=r < R * inside)
