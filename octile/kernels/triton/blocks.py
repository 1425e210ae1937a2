# mypy: allow-untyped-defs
"""Quantization and stores of a 128×128 block of FP32 values that a program holds, along rows or transposed.

Tiles along the rows and tiles along the columns share 128×128 blocks, so a program that writes both reads a block once.
Values are rounded before they are transposed, so that one byte per element passes through shared memory, not four.

Shapes: data [B, M, K], data_t [B, K, M], and their scales for 1×128 tiles, in the layout of
`octile.kernels.memory_layout`. Elements of a block outside of the matrix must be zero: they pad the rows of data_t. In
tiles of groups of rows data_t is [K, P]; a tile then ends with rows of zeros.
"""

import triton
import triton.language as tl

from octile.kernels.triton.scaling import divide, magnitude, round_to_format, scale_from_amax


@triton.jit
def store_tiles(
    value, data, scale, batch, m_first, m_end, k_tile, M, K,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Quantize value [m, 128], rows m_first to at most m_end, in 1×128 tiles and store data and scales."""
    tile_scale = scale_from_amax(tl.max(magnitude(value), axis=1), INVERSE, REST, POWER_OF_2)
    scaled = divide(value, tile_scale[:, None], POWER_OF_2)
    encoded = round_to_format(scaled, data.dtype.element_ty, MANTISSA, BIAS)
    store_data(encoded, data, batch, m_first, m_end, k_tile, M, K)
    m = m_first + tl.arange(0, value.shape[0])
    at = (batch * tl.cdiv(K, 128) + k_tile) * (tl.cdiv(M, 4) * 4) + m
    tl.store(scale + at, tile_scale, mask=m < m_end)


@triton.jit
def store_tiles_transposed(
    value, data_t, scale_t, batch, m_tile, k_tile, M, K,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    IN_BLOCKS: tl.constexpr = False,
):  # fmt: skip
    """Quantize value [128, 128] in 128×1 tiles, or IN_BLOCKS with one scale, and store data and scales transposed."""
    amax = tl.max(magnitude(value), axis=0)
    if IN_BLOCKS:
        amax = tl.max(amax, axis=0)
    tile_scale = scale_from_amax(amax, INVERSE, REST, POWER_OF_2)
    scaled = divide(value, tile_scale if IN_BLOCKS else tile_scale[None, :], POWER_OF_2)
    encoded = round_to_format(scaled, data_t.dtype.element_ty, MANTISSA, BIAS)
    store_data_transposed(encoded, data_t, batch, m_tile, k_tile, M, K)
    row = batch * tl.cdiv(M, 128) + m_tile
    if IN_BLOCKS:
        tl.store(scale_t + row * tl.cdiv(K, 128) + k_tile, tile_scale)
    else:
        k = k_tile * 128 + tl.arange(0, 128)
        tl.store(scale_t + row * (tl.cdiv(K, 4) * 4) + k, tile_scale, mask=k < K)


@triton.jit
def store_data(encoded, data, batch, m_first, m_end, k_tile, M, K):
    """Store encoded values [m, 128] to rows m_first to at most m_end of data."""
    m = (m_first + tl.arange(0, encoded.shape[0])).to(tl.int64)
    k = k_tile * 128 + tl.arange(0, 128)
    tl.store(data + (batch * M + m)[:, None] * K + k[None, :], encoded, mask=(m < m_end)[:, None] & (k < K)[None, :])


@triton.jit
def rows_of_tile(tiles, m_tile, M, GROUPED: tl.constexpr):
    """The first row and the end of the rows of a tile of 128, which holds rows of one group where they are GROUPED."""
    if GROUPED:
        return tl.load(tiles + 2 * m_tile), tl.load(tiles + 2 * m_tile + 1)
    else:
        return m_tile * 128, M


@triton.jit
def store_data_transposed(encoded, data_t, batch, m_tile, k_tile, M, K):
    """Store encoded values [128, 128] to data_t, transposed, with zeros in the padding of its rows."""
    m = m_tile * 128 + tl.arange(0, 128)
    k = (k_tile * 128 + tl.arange(0, 128)).to(tl.int64)
    row = tl.cdiv(M, 16) * 16  # includes the padding, so that all stores are whole vectors
    at = (batch * K + k)[:, None] * row + m[None, :]
    tl.store(data_t + at, tl.trans(encoded), mask=(k < K)[:, None] & (m < row)[None, :])
