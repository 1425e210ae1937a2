# mypy: allow-untyped-defs
"""Loads and stores of packed E5M6 rows: two 12-bit values in three bytes, as `octile.formats.pack12` lays them out."""

import triton
import triton.language as tl


@triton.jit
def store_e5m6(data, encoded, row, cols, row_inside, col_end, K):
    """Store encoded values [R, C] in int32 at rows [R] and columns [C].

    If data is int32, 8 values are stored as three words, and the first column and col_end must be multiples of 8.
    Otherwise 2 values are stored as three bytes, and they must be multiples of 2.
    """
    R: tl.constexpr = encoded.shape[0]
    C: tl.constexpr = encoded.shape[1]
    a, b = tl.split(tl.reshape(encoded, [R, C // 2, 2]))
    pairs = a | (b << 12)  # 24 bits
    if data.dtype.element_ty == tl.int32:
        even, odd = tl.split(tl.reshape(pairs, [R, C // 4, 2]))
        p0, p2 = tl.split(tl.reshape(even, [R, C // 8, 2]))
        p1, p3 = tl.split(tl.reshape(odd, [R, C // 8, 2]))
        words = (p0 | (p1 << 24), ((p1 >> 8) & 0xFFFF) | (p2 << 16), ((p2 >> 16) & 0xFF) | (p3 << 8))
        first = tl.min(cols, axis=0) // 8 + tl.arange(0, C // 8)
        at = data + row[:, None] * (K // 8 * 3) + (first * 3)[None, :]
        mask = row_inside[:, None] & (first * 8 < col_end)[None, :]
    else:
        words = (pairs, pairs >> 8, pairs >> 16)
        first = tl.min(cols, axis=0) // 2 + tl.arange(0, C // 2)
        at = data + row[:, None] * (K // 2 * 3) + (first * 3)[None, :]
        mask = row_inside[:, None] & (first * 2 < col_end)[None, :]
    for i in tl.static_range(3):
        tl.store(at + i, words[i].to(data.dtype.element_ty), mask=mask)


@triton.jit
def load_e5m6(base, cols, step, inside):
    """Load encoded values in int32 at columns [C] of rows that begin at base [R, 1]; each lies in two bytes."""
    at = base + (cols * 3 // 2)[None, :] * step
    low = tl.load(at, mask=inside, other=0).to(tl.int32)
    high = tl.load(at + step, mask=inside, other=0).to(tl.int32)
    return ((low | (high << 8)) >> (cols % 2 * 4).to(tl.int32)[None, :]) & 0xFFF
