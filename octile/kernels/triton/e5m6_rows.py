# mypy: allow-untyped-defs
"""Rows of 12-bit codes, two in three bytes as `octile.formats.pack12` lays them out: a stream from the low bits up."""

import triton
import triton.language as tl


@triton.jit
def store_packed(data, codes, row, cols, row_inside, col_end, K):
    """codes [R, C], int32, at rows [R] and columns [C]; into int32 data eight codes in three words, else in bytes.

    The first column must be a multiple of 8, or of 2 for bytes, and so must col_end.
    """
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    a, b = tl.split(tl.reshape(codes, [R, C // 2, 2]))
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
def load_packed(base, cols, step, inside):
    """The codes at columns [C] of rows that begin at base [R, 1], int32: each lies in two bytes of its three."""
    at = base + (cols * 3 // 2)[None, :] * step
    low = tl.load(at, mask=inside, other=0).to(tl.int32)
    high = tl.load(at + step, mask=inside, other=0).to(tl.int32)
    return ((low | (high << 8)) >> (cols % 2 * 4).to(tl.int32)[None, :]) & 0xFFF
