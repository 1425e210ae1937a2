# mypy: allow-untyped-defs
"""What runs on the GPU to quantise and dequantise; `quantize` chooses and launches it.

Magnitudes are compared as integers: without their sign, FP32 numbers sort like their bits, and NaN lies above all. So a
NaN wins every maximum, where floating-point comparisons would lose it.

Shapes: x [B, M, K] with all leading dimensions in B, blocks R×C; a program takes ROWS×COLS.
"""

import triton
import triton.language as tl

from octile.kernels.triton.codes import encode, to_half


@triton.jit(do_not_specialize=["M", "m_blocks"])
def quantize_blocks(
    x, data, scale, M, K, x_batch, x_row, x_col, m_blocks, k_blocks,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, POWER_OF_2: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ROWS×COLS, a whole number of R×C blocks each way."""
    k_tiles = tl.cdiv(K, COLS)
    m_tiles = tl.cdiv(M, ROWS)
    tile = tl.program_id(0)
    batch = tile // (m_tiles * k_tiles)
    m_tile = tile // k_tiles % m_tiles
    k_tile = tile % k_tiles

    rows = m_tile * ROWS + tl.arange(0, ROWS)
    cols = k_tile * COLS + tl.arange(0, COLS)
    value = _load(x, batch, rows, cols, M, K, x_batch, x_row, x_col)
    blocks = tl.reshape(value, [ROWS // R, R, COLS // C, C])
    amax = tl.max(tl.max(_magnitude(blocks), axis=3), axis=1)
    block_scale = _scale(amax, MAX, POWER_OF_2)
    scaled = _divide(blocks, block_scale[:, None, :, None], POWER_OF_2)
    _store(data, tl.reshape(scaled, [ROWS, COLS]), batch, rows, cols, M, K, M, K, MAX, MANTISSA, BIAS)

    m_block = m_tile * (ROWS // R) + tl.arange(0, ROWS // R)
    k_block = k_tile * (COLS // C) + tl.arange(0, COLS // C)
    at = (batch.to(tl.int64) * m_blocks + m_block[:, None]) * k_blocks + k_block[None, :]
    tl.store(scale + at, block_scale, mask=(m_block < m_blocks)[:, None] & (k_block < k_blocks)[None, :])


@triton.jit(do_not_specialize=["M", "m_blocks"])
def block_amax(x, amax, M, K, x_batch, x_row, x_col, m_blocks, k_blocks, R, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program: ROWS×COLS of one block raise its amax (FP32 bits in int32, zero before)."""
    block, batch, rows, cols, row_end, col_end = _part_of_block(m_blocks, k_blocks, M, K, R, C, ROWS, COLS)
    value = _load(x, batch, rows, cols, row_end, col_end, x_batch, x_row, x_col)
    tl.atomic_max(amax + block, tl.max(tl.max(_magnitude(value), axis=1), axis=0))


@triton.jit(do_not_specialize=["M", "m_blocks"])
def cast_block(
    x, amax, M, K, x_batch, x_row, x_col, m_blocks, k_blocks, R, C, data, scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, POWER_OF_2: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: casts ROWS×COLS of one block, by its amax."""
    block, batch, rows, cols, row_end, col_end = _part_of_block(m_blocks, k_blocks, M, K, R, C, ROWS, COLS)
    block_scale = _scale(tl.load(amax + block), MAX, POWER_OF_2)
    tl.store(scale + block, block_scale)  # every program of the block stores the same
    value = _load(x, batch, rows, cols, row_end, col_end, x_batch, x_row, x_col)
    scaled = _divide(value, block_scale, POWER_OF_2)
    _store(data, scaled, batch, rows, cols, row_end, col_end, M, K, MAX, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def dequantize(
    data, scale, out, M, K, data_batch, data_row, data_col, scale_batch, scale_row, scale_col, R, C,
    MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS×COLS of the result."""
    k_tiles = tl.cdiv(K, COLS)
    m_tiles = tl.cdiv(M, ROWS)
    batch = (tl.program_id(0) // (m_tiles * k_tiles)).to(tl.int64)
    rows = (tl.program_id(0) // k_tiles % m_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = (tl.program_id(0) % k_tiles * COLS + tl.arange(0, COLS)).to(tl.int64)
    inside = (rows < M)[:, None] & (cols < K)[None, :]

    base = data + batch * data_batch + rows[:, None] * data_row
    code = tl.load(base + cols[None, :] * data_col, mask=inside, other=0)
    block_scale = tl.load(
        scale + batch * scale_batch + (rows // R)[:, None] * scale_row + (cols // C)[None, :] * scale_col,
        mask=inside,
        other=0.0,
    )
    value = to_half(code, MANTISSA).to(tl.float32) * block_scale
    tl.store(out + (batch * M + rows)[:, None] * K + cols[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _part_of_block(m_blocks, k_blocks, M, K, R, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which part of which block this program takes: the block, its matrix, rows and columns and where they end."""
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
def _load(x, batch, rows, cols, row_end, col_end, x_batch, x_row, x_col):
    """x at rows × cols as float32; zero past the ends."""
    at = batch.to(tl.int64) * x_batch + rows.to(tl.int64)[:, None] * x_row + cols.to(tl.int64)[None, :] * x_col
    return tl.load(x + at, mask=(rows < row_end)[:, None] & (cols < col_end)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _magnitude(value):
    """|value| as integers that sort like the numbers, NaN above all."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(amax, MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """From the bits of the largest magnitude, float32: amax / MAX but a normal number, or 1 for zeros. NaN stays."""
    number = amax.to(tl.float32, bitcast=True)
    scale = tl.div_rn(number, MAX)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    if POWER_OF_2:
        # an all-ones mantissa carries into the exponent unless the number is a power of two already
        rounded_up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, rounded_up, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def _divide(value, scale, POWER_OF_2: tl.constexpr):
    """value / scale, rounded correctly. The reciprocal of a power of two is exact, so one division a block will do."""
    if POWER_OF_2:
        return value * tl.div_rn(1.0, scale)
    else:
        return tl.div_rn(value, scale)


@triton.jit
def _store(
    data, scaled, batch, rows, cols, row_end, col_end, M, K,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Saturates, rounds and stores. `data` is FP8 where the GPU casts to it, else the integers of the codes."""
    scaled = tl.clamp(scaled, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    if data.dtype.element_ty == tl.uint8 or data.dtype.element_ty == tl.int8:
        scaled = encode(scaled, MANTISSA, BIAS)
    at = (batch.to(tl.int64) * M + rows.to(tl.int64))[:, None] * K + cols[None, :]
    mask = (rows < row_end)[:, None] & (cols < col_end)[None, :]
    tl.store(data + at, scaled.to(data.dtype.element_ty), mask=mask)
