# mypy: allow-untyped-defs
"""Latents and rotary channels of decode rows, as `octile.ops.latent_cache` specifies them.

All but the norm's sum of squares is bit for bit what the specification gives. Where one warp of rms_norm.cu has a row,
the squares are added in its order, so that a latent has the same bits among few rows and among many.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.cuda.quantize.launcher import norm_parts
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.fp8_bits import as_encoded, quantize_constants
from octile.kernels.triton.latent_cache import store_fp8, store_values
from octile.kernels.triton.launch_config import DECODE_LATENTS, EXACT
from octile.kernels.triton.overlap import overlap_options, wait_for_previous
from octile.kernels.triton.rope import rotate_pairs


def launch(
    cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor, weight: Tensor | None, eps: float, cos: Tensor,
    sin: Tensor, q: Tensor, absorbed: Tensor,
) -> None:  # fmt: skip
    """Write latent [T, C] and rope [T, R] to slots [T] of a cache, and what q [T, H, X] rotates to absorbed."""
    (t, c), r, heads = latent.shape, rope.shape[1], q.shape[1]
    if not t:
        return
    is_fp8 = cache.dtype == torch.uint8
    tiles, (units, warps) = triton.next_power_of_2(triton.cdiv(c, 128)), norm_parts(c)
    rows, row = cache.shape[0] * cache.shape[1], cache.shape[2]
    stored: tuple[Tensor, ...] = (cache, cache, cache)
    constants: dict[str, Any] = {"INVERSE": 0.0, "REST": 0.0, "MANTISSA": 0, "BIAS": 0}  # not used
    if is_fp8:
        data, scales, ropes = (cache.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16))
        stored, constants = (as_encoded(data), scales, ropes), quantize_constants(torch.float8_e4m3fn)
    with torch.cuda.device_of(cache):
        write_and_rotate[(t, 1 + triton.cdiv(heads, DECODE_LATENTS["HEADS"]))](
            *stored, slots, latent, rope, latent if weight is None else weight, eps, 1.0 / c, cos, sin, q, absorbed,
            rows, row, slots.stride(0), latent.stride(0), rope.stride(0), 0 if weight is None else weight.stride(0),
            q.stride(0), q.stride(1), heads, q.shape[2] - r, NORMS=weight is not None, C=c, TILES=tiles,
            UNITS=units, WARPS=triton.next_power_of_2(warps), R=r, RS=triton.next_power_of_2(r), FP8=is_fp8,
            **constants, **DECODE_LATENTS, **EXACT, **overlap_options(cache.device),
        )  # fmt: skip


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    latents, slots = cases.empty(256, 576), cases.empty(256, dtype=torch.int64)
    cos = cases.empty(256, 32, dtype=cases.FP32)

    def written(heads: int, cached: torch.dtype, norms: bool = True) -> None:
        launch(
            cases.latent_cache(cached), slots, latents[:, :512], latents[:, 512:], cases.empty(512) if norms else None,
            1e-6, cos, cos, cases.empty(256, heads, 192), cases.empty(256, heads, 576),
        )  # fmt: skip

    return {
        "latents of a decode step": lambda: written(16, cases.BF16),
        "normalized latents of a decode step": lambda: written(16, cases.BF16, norms=False),
        "latents of a decode step of V3, FP8": lambda: written(128, torch.uint8),
    }


@triton.jit
def write_and_rotate(
    data, scales, ropes, slots, latent, rope, weight, eps, inverse_c, cos, sin, q, absorbed, rows, row, slot_step,
    latent_row, rope_row, weight_step, q_row, q_head, H, N,
    NORMS: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr,
    R: tl.constexpr, RS: tl.constexpr, FP8: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The first program of a row writes to the cache, the others rotate HEADS heads each.

    What the previous kernel may have written is loaded at once. The weight, which it must not write, is loaded before.
    """
    t = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, RS)
    pair = tl.arange(0, RS // 2)[None, None, :]
    angle = t * (R // 2) + pair
    if tl.program_id(1) == 0:
        c = tl.arange(0, TILES * 128)
        if NORMS:
            factor = tl.load(weight + c * weight_step, mask=c < C, other=0.0)
        wait_for_previous(OVERLAPS)
        slot = tl.load(slots + t * slot_step)
        value = tl.load(latent + t * latent_row + c, mask=c < C, other=0.0)
        key = tl.load(rope + t * rope_row + r, mask=r < R, other=0.0)
        cosine = tl.load(cos + angle, mask=pair < R // 2, other=0.0)
        sine = tl.load(sin + angle, mask=pair < R // 2, other=0.0)
        inside = tl.where((slot >= 0) & (slot < rows), 1, 0)  # a factor of the numbers of channels that are written
        if NORMS:
            squares = _sum_of_squares(latent + t * latent_row, C, UNITS, WARPS)
            value = value.to(tl.float32) * tl.rsqrt(squares * inverse_c + eps)
            value = value * factor.to(tl.float32)
            value = value.to(latent.dtype.element_ty)
        rotated = rotate_pairs(key.to(tl.float32)[None, None, :], cosine, sine)
        rotary = tl.reshape(rotated, [RS]).to(rope.dtype.element_ty)
        if FP8:
            value = value.to(tl.float32)
            start = slot * row
            store_fp8(data, scales, ropes, start, value, rotary, inside, C, R, RS, TILES, INVERSE, REST, MANTISSA, BIAS)
        else:
            store_values(data + slot * (C + R), value, rotary, inside, C, TILES * 128, R, RS)
    else:
        wait_for_previous(OVERLAPS)
        h = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS).to(tl.int64)[None, :, None]
        channel = r[None, None, :]
        there = (h < H) & (channel < R)
        heads = tl.load(q + t * q_row + h * q_head + N + channel, mask=there, other=0.0).to(tl.float32)
        cosine = tl.load(cos + angle, mask=pair < R // 2, other=0.0)
        sine = tl.load(sin + angle, mask=pair < R // 2, other=0.0)
        to = absorbed + (t * H + h) * (C + R) + C + channel
        tl.store(to, rotate_pairs(heads, cosine, sine).to(absorbed.dtype.element_ty), mask=there)


@triton.jit
def _sum_of_squares(row, C: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr):
    """Add the squares of a row as rms_norm.cu does: in a thread, over the threads of each warp, and over the warps.

    A thread has UNITS vectors of 8 channels, one for each of as many parts of the row.
    """
    sums = tl.zeros([32 * WARPS], tl.float32)
    for unit in tl.static_range(UNITS):
        c = (unit * 32 * WARPS + tl.arange(0, 32 * WARPS)[:, None]) * 8 + tl.arange(0, 8)[None, :]
        x = tl.load(row + c, mask=c < C, other=0.0).to(tl.float32)
        x_0246, x_1357 = tl.split(tl.reshape(x, [32 * WARPS, 4, 2]))
        x_04, x_26 = tl.split(tl.reshape(x_0246, [32 * WARPS, 2, 2]))
        x_15, x_37 = tl.split(tl.reshape(x_1357, [32 * WARPS, 2, 2]))
        x_0, x_4 = tl.split(x_04)
        x_1, x_5 = tl.split(x_15)
        x_2, x_6 = tl.split(x_26)
        x_3, x_7 = tl.split(x_37)
        sums = tl.fma(x_3, x_3, tl.fma(x_2, x_2, tl.fma(x_1, x_1, tl.fma(x_0, x_0, sums))))
        sums = tl.fma(x_7, x_7, tl.fma(x_6, x_6, tl.fma(x_5, x_5, tl.fma(x_4, x_4, sums))))
    lanes = tl.reshape(sums, [WARPS, 2, 16])
    lanes = tl.reshape(tl.sum(lanes, axis=1), [WARPS, 2, 8])  # two at a time, which have no order
    lanes = tl.reshape(tl.sum(lanes, axis=1), [WARPS, 2, 4])
    lanes = tl.reshape(tl.sum(lanes, axis=1), [WARPS, 2, 2])
    lanes = tl.reshape(tl.sum(lanes, axis=1), [WARPS, 2])
    return tl.sum(tl.sum(lanes, axis=1), axis=0)
