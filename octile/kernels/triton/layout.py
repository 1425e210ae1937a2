# mypy: allow-untyped-defs
"""Operands as tensor cores want them: contiguous along K, rows beginning at multiples of 16 bytes.

FP8 tensor cores read K-major operands only, and 16 bytes are the widest load. An operand that lies otherwise, such as
the transposed views of a weight gradient, is copied first: two bytes of traffic a number, a few percent of a product's
time, where single-byte loads inside the product would cost a multiple of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import VECTOR, padded


def in_vectors(x: Tensor) -> bool:
    """Whether the rows, or the columns, of x [..., M, K] are contiguous and multiples of 16 numbers apart, as K is one.

    Triton's compiler asks for no more to load and store 16 bytes at once. Where it may not, each number has an address
    of its own, and a program must hold fewer, or registers spill to memory. That is slow, and ptxas 12.8 then reads
    codes before it has restored them. (Found by wrong results of an H200, and then in the machine code.)
    """
    steps = sorted(x.stride()[-2:])
    return x.shape[-1] % VECTOR == 0 and steps[0] == 1 and steps[1] % VECTOR == 0


def k_major(data: Tensor) -> Tensor:
    """data [..., M, K] of one byte a number, as it is or copied: K contiguous and padded with zeros to 16 bytes.

    Returns:
        [..., M, padded(K)].
    """
    *batch, m, k = data.shape
    padded_k = padded(k)
    aligned = (data.data_ptr(), *data.stride()[:-1])
    if data.stride(-1) == 1 and padded_k == k and all(n % VECTOR == 0 for n in aligned):
        return data
    out = data.new_empty(*batch, m, padded_k)
    if out.numel() == 0:
        return out
    source, target = (t.view(torch.uint8).reshape(-1, m, t.shape[-1]) for t in (data, out))
    grid = (source.shape[0] * triton.cdiv(m, 128) * triton.cdiv(padded_k, 128),)
    with torch.cuda.device_of(data):
        _copy[grid](source, target, m, k, padded_k, *source.stride(), TILE=128, enable_fp_fusion=False)
    return out


@triton.jit
def _copy(source, target, M, K, PADDED_K, source_batch, source_row, source_col, TILE: tl.constexpr):
    """One program: TILE×TILE bytes. Triton lays out the loads along the source's rows or columns as its strides say."""
    k_tiles = tl.cdiv(PADDED_K, TILE)
    m_tiles = tl.cdiv(M, TILE)
    batch = (tl.program_id(0) // (m_tiles * k_tiles)).to(tl.int64)
    m = (tl.program_id(0) // k_tiles % m_tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    k = (tl.program_id(0) % k_tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    at = source + batch * source_batch + m[:, None] * source_row + k[None, :] * source_col
    codes = tl.load(at, mask=(m < M)[:, None] & (k < K)[None, :], other=0)
    inside = (m < M)[:, None] & (k < PADDED_K)[None, :]
    tl.store(target + (batch * M + m)[:, None] * PADDED_K + k[None, :], codes, mask=inside)
