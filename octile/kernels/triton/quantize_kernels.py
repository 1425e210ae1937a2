# mypy: allow-untyped-defs
"""Kernels that quantize and dequantize; `quantize` chooses and launches them.

Shapes: x [B, M, K] with all leading dimensions in B, blocks of R×C; a program takes a tile of ROWS×COLS.
"""

import triton
import triton.language as tl

from octile.kernels.triton.e5m6_rows import load_e5m6, store_e5m6
from octile.kernels.triton.fp8_bits import encode, to_float
from octile.kernels.triton.scaling import divide, magnitude, round_to_format, scale_from_amax


@triton.jit(do_not_specialize=["M", "m_blocks"])
def quantize_blocks(
    x, data, scale, M, K, x_batch, x_row, x_col, m_blocks, k_blocks, scale_batch, scale_row, scale_col,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, POWER_OF_2: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program quantizes a tile of ROWS×COLS, which is a whole number of R×C blocks along rows and columns."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), M, K, ROWS, COLS)
    rows = m_tile * ROWS + tl.arange(0, ROWS)
    cols = k_tile * COLS + tl.arange(0, COLS)
    value = load(x, batch, rows, cols, M, K, x_batch, x_row, x_col)
    blocks = tl.reshape(value, [ROWS // R, R, COLS // C, C])
    amax = tl.max(tl.max(magnitude(blocks), axis=3), axis=1)
    block_scale = scale_from_amax(amax, INVERSE, REST, POWER_OF_2)
    scaled = divide(blocks, block_scale[:, None, :, None], POWER_OF_2)
    _store(data, tl.reshape(scaled, [ROWS, COLS]), batch, rows, cols, M, K, M, K, MANTISSA, BIAS)

    m_block = (m_tile * (ROWS // R) + tl.arange(0, ROWS // R)).to(tl.int64)
    k_block = (k_tile * (COLS // C) + tl.arange(0, COLS // C)).to(tl.int64)
    at = batch * scale_batch + m_block[:, None] * scale_row + k_block[None, :] * scale_col
    tl.store(scale + at, block_scale, mask=(m_block < m_blocks)[:, None] & (k_block < k_blocks)[None, :])


@triton.jit(do_not_specialize=["M", "m_blocks"])
def block_amax(x, amax, M, K, x_batch, x_row, x_col, m_blocks, k_blocks, R, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A program updates the amax of a block, FP32 bits in int32 and zero initially, with ROWS×COLS of its elements."""
    block, batch, rows, cols, row_end, col_end = _program_part(m_blocks, k_blocks, M, K, R, C, ROWS, COLS)
    value = load(x, batch, rows, cols, row_end, col_end, x_batch, x_row, x_col)
    tl.atomic_max(amax + block, tl.max(tl.max(magnitude(value), axis=1), axis=0))


@triton.jit(do_not_specialize=["M", "m_blocks"])
def quantize_large_block(
    x, amax, M, K, x_batch, x_row, x_col, m_blocks, k_blocks, R, C, data, scale, scale_batch, scale_row, scale_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, POWER_OF_2: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program quantizes ROWS×COLS elements of a block whose amax is known."""
    block, batch, rows, cols, row_end, col_end = _program_part(m_blocks, k_blocks, M, K, R, C, ROWS, COLS)
    block_scale = scale_from_amax(tl.load(amax + block), INVERSE, REST, POWER_OF_2)
    m_block = (block // k_blocks % m_blocks).to(tl.int64)
    k_block = (block % k_blocks).to(tl.int64)
    at = batch * scale_batch + m_block * scale_row + k_block * scale_col
    tl.store(scale + at, block_scale)  # all programs of a block store the same value
    value = load(x, batch, rows, cols, row_end, col_end, x_batch, x_row, x_col)
    scaled = divide(value, block_scale, POWER_OF_2)
    _store(data, scaled, batch, rows, cols, row_end, col_end, M, K, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def quantize_with_scale(
    x, M, K, x_batch, x_row, x_col, data, scale,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program quantizes ROWS×COLS. The given scale need not fit the values, so this takes a full division."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), M, K, ROWS, COLS)
    rows = m_tile * ROWS + tl.arange(0, ROWS)
    cols = k_tile * COLS + tl.arange(0, COLS)
    scaled = tl.div_rn(load(x, batch, rows, cols, M, K, x_batch, x_row, x_col), tl.load(scale))
    scaled = tl.clamp(scaled, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    _store(data, scaled, batch, rows, cols, M, K, M, K, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def dequantize(
    data, scale, out, M, K, data_batch, data_row, data_col, scale_batch, scale_row, scale_col, R, C,
    MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program dequantizes ROWS×COLS."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), M, K, ROWS, COLS)
    rows = (m_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = (k_tile * COLS + tl.arange(0, COLS)).to(tl.int64)
    inside = (rows < M)[:, None] & (cols < K)[None, :]

    base = data + batch * data_batch + rows[:, None] * data_row
    if MANTISSA == 6:
        encoded = load_e5m6(base, cols, data_col, inside)
    else:
        encoded = tl.load(base + cols[None, :] * data_col, mask=inside, other=0.0)
    block_scale = tl.load(
        scale + batch * scale_batch + (rows // R)[:, None] * scale_row + (cols // C)[None, :] * scale_col,
        mask=inside,
        other=0.0,
    )
    value = to_float(encoded, MANTISSA) * block_scale
    tl.store(out + (batch * M + rows)[:, None] * K + cols[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def program_tile(program, M, K, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The matrix and tile indices of a program; consecutive programs take neighboring tiles along K."""
    m_tiles = tl.cdiv(M, ROWS)
    k_tiles = tl.cdiv(K, COLS)
    return (program // (m_tiles * k_tiles)).to(tl.int64), program // k_tiles % m_tiles, program % k_tiles


@triton.jit
def _program_part(m_blocks, k_blocks, M, K, R, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The part of a large block that a program takes: block index, matrix, rows and columns, and their ends."""
    parts_across = tl.cdiv(C, COLS)
    parts = tl.cdiv(R, ROWS) * parts_across
    block = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    first_row = block // k_blocks % m_blocks * R
    first_col = block % k_blocks * C
    rows = first_row + part // parts_across * ROWS + tl.arange(0, ROWS)
    cols = first_col + part % parts_across * COLS + tl.arange(0, COLS)
    return block, block // (m_blocks * k_blocks), rows, cols, tl.minimum(first_row + R, M), tl.minimum(first_col + C, K)


@triton.jit
def load(x, batch, rows, cols, row_end, col_end, x_batch, x_row, x_col):
    """Load x at rows × cols as float32; zero past the ends."""
    at = tl.cast(batch, tl.int64) * x_batch + rows.to(tl.int64)[:, None] * x_row + cols.to(tl.int64)[None, :] * x_col
    return tl.load(x + at, mask=(rows < row_end)[:, None] & (cols < col_end)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(
    data, scaled, batch, rows, cols, row_end, col_end, M, K, MANTISSA: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Round scaled values to the format and store them."""
    row = batch.to(tl.int64) * M + rows.to(tl.int64)
    if MANTISSA == 6:
        store_e5m6(data, encode(scaled, MANTISSA, BIAS), row, cols, rows < row_end, col_end, K)
    else:
        mask = (rows < row_end)[:, None] & (cols < col_end)[None, :]
        encoded = round_to_format(scaled, data.dtype.element_ty, MANTISSA, BIAS)
        tl.store(data + row[:, None] * K + cols[None, :], encoded, mask=mask)
