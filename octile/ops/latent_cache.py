"""The paged latent cache of latent attention (MLA): rows of latents and rotary keys in pages, written and read by slot.

A page holds the rows of PAGE positions of one text. Slot s is row s % PAGE of page s // PAGE. A row is

    in high precision    the latent's C channels, then the rotary key's R, all in one dtype
    in FP8               C bytes of E4M3, one float32 scale per 128 channels, and the rotary key in BF16:
                         656 bytes for C = 512 and R = 64

The latent is quantized as activations are, in 1×128 tiles, but for the scales: amax / 448 is rounded up to a number of
BF16. So attention can multiply by them in BF16, and rounds a product once. A NaN or an Inf makes the scale of its tile
NaN or Inf: an E4M3 value that is NaN, with a finite scale, is not a row of this cache. The rotary key is not quantized:
its channels decide where attention looks.

`write_and_rotate` is all that decode rows do between the projections of latent attention and attention over the pages,
in one launch:

    latent        RMSNorm, rounded, then written to the row's slot of the paged cache
    rotary key    rotated, rounded, then written there, too
    queries       the rotary channels are rotated into the absorbed queries, whose other channels a GEMM writes

In separate operators these are five launches of some microseconds each, in which a GPU computes next to nothing.

Source: FlashMLA's FP8 cache (https://github.com/deepseek-ai/FlashMLA); DeepSeek-V2 (arXiv 2405.04434) §2.1.
Shapes: T rows, P pages, H heads, X channels of a query, C of a latent, R of the rotary key.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels import backends
from octile.kernels.cuda.quantize.launcher import norm_parts
from octile.kernels.memory_layout import new_scale
from octile.ops.norm import check_operands, rms_norm
from octile.ops.operator import operator
from octile.ops.quantize import (
    INPUT_DTYPES,
    check_device,
    check_input_dtype,
    dequantize,
    quantize_rounding_scales,
    round_up_to_bfloat16,
)
from octile.ops.rope import rotated

PAGE = 64  # positions of a page


class Fp8Rows(NamedTuple):
    """The parts of rows in FP8: views of their bytes."""

    data: Tensor  # float8_e4m3fn [..., C]
    scale: Tensor  # float32 [..., ⌈C/128⌉], numbers of BF16
    rope: Tensor  # bfloat16 [..., R]


def row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Return the bytes of a row in FP8."""
    return latent_dim + 4 * -(-latent_dim // TILE[1]) + 2 * rope_dim


def rope_dim_of(cache: Tensor, latent_dim: int) -> int:
    """Return R of a cache, whose latents have C channels."""
    if cache.dtype != torch.uint8:
        return cache.shape[-1] - latent_dim
    return (cache.shape[-1] - row_bytes(latent_dim, 0)) // 2


def fp8_rows(rows: Tensor, latent_dim: int) -> Fp8Rows:
    """View rows [..., bytes] uint8 as their parts."""
    scale_end = row_bytes(latent_dim, 0)
    return Fp8Rows(
        rows[..., :latent_dim].view(torch.float8_e4m3fn),
        rows[..., latent_dim:scale_end].view(torch.float32),
        rows[..., scale_end:].view(torch.bfloat16),
    )


def rows_in_float32(rows: Tensor, latent_dim: int) -> Tensor:
    """Return rows [..., C + R], or [..., bytes] uint8 in FP8, as float32 [..., C + R]."""
    if rows.dtype != torch.uint8:
        return rows.float()
    data, scale, rope = fp8_rows(rows, latent_dim)
    return torch.cat((dequantize(data.contiguous(), scale, *TILE, torch.float32), rope.float()), dim=-1)


@operator(writes=("cache",))
def write_latents(cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """Write rows to slots of a cache.

    Args:
        cache: [P, 64, C + R] float32, bfloat16 or float16; or FP8 rows, [P, 64, `row_bytes`] uint8. Contiguous.
        slots: int64 [T], each from 0 to 64·P − 1 and at most once; a row whose slot is negative is not written.
        latent: [T, C], float32, bfloat16 or float16, rows contiguous; in FP8 C is a multiple of 4.
        rope: [T, R] in latent's dtype, rotated, rows contiguous; R even.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together.
        IndexError: on a CPU, a slot is not in the cache. A GPU does not write such a row.
    """
    check_write(cache, slots, latent, rope)
    if slots.numel() and int(slots.max()) >= cache.shape[0] * PAGE:
        raise IndexError(f"slots must be below the cache's {cache.shape[0] * PAGE}, not {int(slots.max())}")
    if cache.dtype == torch.uint8:
        data, scale = quantize_rounding_scales(latent, *TILE, "e4m3", round_up_to_bfloat16)
        scale = scale.clone(memory_format=torch.contiguous_format)
        rows = torch.cat([t.contiguous().view(torch.uint8) for t in (data, scale, rope.bfloat16())], dim=1)
    else:
        rows = torch.cat((latent, rope), dim=1).to(cache.dtype)
    if slots.numel() and int(slots.min()) < 0:
        slots, rows = slots[slots >= 0], rows[slots >= 0]
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, rows)


@write_latents.register_fake
def _(cache, slots, latent, rope):
    return None


@write_latents.register_kernel("cuda")
def _(cache, slots, latent, rope):
    from octile.kernels.triton import latent_cache as kernel  # late: a machine without a GPU has no Triton

    check_write(cache, slots, latent, rope)
    kernel.launch_write(cache, slots, latent, rope)


@operator()
def read_latents(cache: Tensor, slots: Tensor, latent_dim: int, out_dtype: torch.dtype) -> Tensor:
    """Read rows from slots of a cache.

    Args:
        cache: as in `write_latents`.
        slots: int64 [T], each from 0 to 64·P − 1.
        latent_dim: C.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [T, C + R] in out_dtype: latents, dequantized in FP32 and rounded once, and rotary keys.

    Raises:
        TypeError: a tensor has another dtype, or out_dtype is another one.
        ValueError: shapes or devices do not fit together.
    """
    _check_read(cache, slots, latent_dim, out_dtype)
    rows = cache.view(-1, cache.shape[-1]).index_select(0, slots)
    if cache.dtype != torch.uint8:
        return rows.to(out_dtype)
    data, scale, rope = fp8_rows(rows, latent_dim)
    scale = new_scale(data, *TILE).copy_(scale)
    return torch.cat((dequantize(data.contiguous(), scale, *TILE, out_dtype), rope.to(out_dtype)), dim=1)


@read_latents.register_fake
def _(cache, slots, latent_dim, out_dtype):
    width = latent_dim + rope_dim_of(cache, latent_dim)
    return cache.new_empty(slots.shape[0], width, dtype=out_dtype)


def check_write(cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """Raise TypeError or ValueError if rows cannot be written to a cache, as `write_latents` says."""
    check_input_dtype("latent", latent)
    if rope.dtype != latent.dtype:
        raise TypeError(f"rope must be {latent.dtype} as latent, not {rope.dtype}")
    if latent.dim() != 2 or rope.dim() != 2 or len(latent) != len(rope):
        raise ValueError(
            f"latent and rope must be [T, C] and [T, R], not {tuple(latent.shape)} and {tuple(rope.shape)}"
        )
    if (latent.stride(1), rope.stride(1)) != (1, 1) and len(latent):
        raise ValueError(
            f"rows of latent and rope must be contiguous, not have strides {latent.stride()} and {rope.stride()}"
        )
    check_cache(cache, latent.shape[1])
    if rope_dim_of(cache, latent.shape[1]) != rope.shape[1]:
        raise ValueError(
            f"rope must have the {rope_dim_of(cache, latent.shape[1])} channels of the cache, not {rope.shape[1]}"
        )
    _check_slots(cache, slots)
    if len(slots) != len(latent):
        raise ValueError(f"slots must be ({len(latent)},), one for each row, not {tuple(slots.shape)}")
    check_device("cache", cache, "latent", latent)
    check_device("cache", cache, "rope", rope)


def _check_read(cache: Tensor, slots: Tensor, latent_dim: int, out_dtype: torch.dtype) -> None:
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")
    check_cache(cache, latent_dim)
    _check_slots(cache, slots)


def _check_slots(cache: Tensor, slots: Tensor) -> None:
    if slots.dtype != torch.int64:
        raise TypeError(f"slots must be int64, not {slots.dtype}")
    if slots.dim() != 1:
        raise ValueError(f"slots must be [T], not {tuple(slots.shape)}")
    check_device("cache", cache, "slots", slots)


def check_cache(cache: Tensor, latent_dim: int) -> None:
    """Raise TypeError or ValueError if cache is not a paged cache of latents of C channels."""
    if cache.dtype not in (*INPUT_DTYPES, torch.uint8):
        raise TypeError(f"cache must be float32, bfloat16, float16 or, for FP8 rows, uint8, not {cache.dtype}")
    if cache.dim() != 3 or cache.shape[1] != PAGE or not cache.is_contiguous():
        raise ValueError(f"cache must be [P, {PAGE}, channels or bytes], contiguous, not {tuple(cache.shape)}")
    check_row(cache, latent_dim)


def check_row(rows: Tensor, latent_dim: int) -> None:
    """Raise ValueError if rows [..., channels], or [..., bytes] in FP8, cannot hold latents of C channels."""
    is_fp8, size = rows.dtype == torch.uint8, rows.shape[-1]
    if is_fp8 and latent_dim % 4:
        raise ValueError(f"latents in FP8 must have a multiple of 4 channels, not {latent_dim}")
    least = row_bytes(latent_dim, 0) if is_fp8 else latent_dim
    if latent_dim < 1 or size < least or (is_fp8 and (size - least) % 4):
        unit = "bytes" if is_fp8 else "channels"
        raise ValueError(f"rows of {size} {unit} cannot hold latents of {latent_dim} channels")


@operator(writes=("cache", "absorbed"))
def write_and_rotate(
    cache: Tensor,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    absorbed: Tensor,
) -> None:
    """Normalize latents, rotate keys and write both to a cache; rotate queries into the absorbed ones.

    Latents have the bits that the operator `rms_norm` gives them if `normalizes_as_rms_norm`.

    Args:
        cache, slots: as in `octile.ops.latent_cache.write_latents`.
        latent: [T, C], float32, bfloat16 or float16, rows contiguous, before the norm.
        rope: [T, R] in latent's dtype, rows contiguous, not rotated.
        weight: weight of the norm [C], float32, bfloat16 or float16; None: latents are normalized already.
        eps: what the norm adds to the mean of the squares.
        cos, sin: float32 [T, R/2], contiguous, as in `octile.ops.rope.rotate_`.
        q: [T, H, X] in latent's dtype, channels contiguous, of which the last R are rotated.
        absorbed: [T, H, C + R] in latent's dtype, contiguous, of which the last R channels are written.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together.
        IndexError: on a CPU, a slot is not in the cache. A GPU does not write such a row.
    """
    _check_decode(cache, slots, latent, rope, weight, cos, sin, q, absorbed)
    r = rope.shape[1]
    rotated_key = rotated(rope[:, None], cos, sin)[:, 0].to(rope.dtype)
    normed = latent if weight is None else rms_norm(latent, weight, eps)[0]
    write_latents(cache, slots, normed, rotated_key)
    absorbed[..., absorbed.shape[-1] - r :] = rotated(q[..., q.shape[-1] - r :], cos, sin)


@write_and_rotate.register_fake
def _(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed):
    return None


@write_and_rotate.register_kernel("cuda")
def _(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed):
    from octile.kernels.triton import decode_latents as kernel  # late: a machine without a GPU has no Triton

    _check_decode(cache, slots, latent, rope, weight, cos, sin, q, absorbed)
    kernel.launch(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed)


def normalizes_as_rms_norm(latent: Tensor, weight: Tensor) -> bool:
    """Return whether a kernel of `write_and_rotate` normalizes latents [T, C] with the bits of the operator `rms_norm`.

    On a CPU it calls that operator itself.
    """
    one_warp = norm_parts(latent.shape[1])[1] == 1
    return latent.is_cuda and one_warp and backends.has_hopper_kernel("rms_norm", latent, weight, 0.0)


def _check_decode(
    cache: Tensor,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    absorbed: Tensor,
) -> None:
    check_write(cache, slots, latent, rope)
    if weight is not None:
        check_operands(latent, weight)
    (t, c), r = latent.shape, rope.shape[1]
    for name, factor in (("cos", cos), ("sin", sin)):
        if factor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {factor.dtype}")
        if 2 * factor.shape[-1] != r or factor.shape[:-1] != (t,) or not factor.is_contiguous():
            raise ValueError(f"{name} must be ({t}, {r} / 2), contiguous, not {tuple(factor.shape)}")
    for name, queries in (("q", q), ("absorbed", absorbed)):
        if queries.dtype != latent.dtype:
            raise TypeError(f"{name} must be {latent.dtype} as latent, not {queries.dtype}")
    if q.dim() != 3 or len(q) != t or q.shape[2] < r or (q.numel() and q.stride(2) != 1):
        raise ValueError(f"q must be ({t}, H, at least {r}), channels contiguous, not {tuple(q.shape)}")
    if absorbed.shape != (*q.shape[:2], c + r) or not absorbed.is_contiguous():
        raise ValueError(f"absorbed must be {(*q.shape[:2], c + r)}, contiguous, not {tuple(absorbed.shape)}")
    for name, other in (("cos", cos), ("sin", sin), ("q", q), ("absorbed", absorbed)):
        check_device("cache", cache, name, other)
