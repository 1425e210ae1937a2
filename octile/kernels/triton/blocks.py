# mypy: allow-untyped-defs
"""What a program does with a square of 128×128 numbers that it holds in FP32: casts it along the rows or the columns.

A square is all that a tile along the rows and one along the columns share, so whoever writes both reads it once. It is
rounded to codes before it is turned: one byte a number goes through shared memory, not four.

Shapes: data [B, M, K], data_t [B, K, M], scales in tiles of 128 of either; laid out as `octile.kernels.memory_layout`
says.
What a square has past the ends of the matrix must be zeros: they pad the rows of data_t.
"""

import triton
import triton.language as tl

from octile.kernels.triton.scaling import divide, magnitude, scale_of, to_codes


@triton.jit
def store_tiles(
    value, data, scale, batch, m_tile, k_tile, M, K,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """In 1×128 tiles: rows [m, k] of data, each with its scale. Here it need not be square: any number of rows."""
    tile_scale = scale_of(tl.max(magnitude(value), axis=1), INVERSE, REST, POWER_OF_2)
    scaled = divide(value, tile_scale[:, None], POWER_OF_2)
    store_codes(to_codes(scaled, data.dtype.element_ty, MANTISSA, BIAS), data, batch, m_tile, k_tile, M, K)
    m = m_tile * value.shape[0] + tl.arange(0, value.shape[0])
    at = (batch * tl.cdiv(K, 128) + k_tile) * (tl.cdiv(M, 4) * 4) + m
    tl.store(scale + at, tile_scale, mask=m < M)


@triton.jit
def store_turned_tiles(
    value, data_t, scale_t, batch, m_tile, k_tile, M, K,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """In 1×128 tiles of the transpose: rows [k, m] of data_t, each with its scale."""
    tile_scale = scale_of(tl.max(magnitude(value), axis=0), INVERSE, REST, POWER_OF_2)
    scaled = divide(value, tile_scale[None, :], POWER_OF_2)
    store_turned_codes(to_codes(scaled, data_t.dtype.element_ty, MANTISSA, BIAS), data_t, batch, m_tile, k_tile, M, K)
    k = k_tile * 128 + tl.arange(0, 128)
    at = (batch * tl.cdiv(M, 128) + m_tile) * (tl.cdiv(K, 4) * 4) + k
    tl.store(scale_t + at, tile_scale, mask=k < K)


@triton.jit
def store_codes(codes, data, batch, m_tile, k_tile, M, K):
    m = (m_tile * codes.shape[0] + tl.arange(0, codes.shape[0])).to(tl.int64)
    k = k_tile * 128 + tl.arange(0, 128)
    tl.store(data + (batch * M + m)[:, None] * K + k[None, :], codes, mask=(m < M)[:, None] & (k < K)[None, :])


@triton.jit
def store_turned_codes(codes, data_t, batch, m_tile, k_tile, M, K):
    m = m_tile * 128 + tl.arange(0, 128)
    k = (k_tile * 128 + tl.arange(0, 128)).to(tl.int64)
    row = tl.cdiv(M, 16) * 16  # whole vectors, the padding too, so that no store has to take single bytes
    at = (batch * K + k)[:, None] * row + m[None, :]
    tl.store(data_t + at, tl.trans(codes), mask=(k < K)[:, None] & (m < row)[None, :])
