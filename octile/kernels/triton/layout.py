# mypy: allow-untyped-defs
"""Copies of GEMM operands to the layout that tensor cores need: contiguous along K, rows at multiples of 16 bytes.

FP8 tensor cores read K-major operands only, and 16 bytes are the widest load. An operand of another layout, such as a
transposed view in wgrad, is copied first. This costs two bytes of traffic per element, a few percent of the time of a
GEMM; single-byte loads in the GEMM would cost a multiple of its time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import VECTOR, padded


def is_vectorizable(x: Tensor) -> bool:
    """Whether Triton can load x [..., M, K] in vectors of 16 bytes.

    For this, K must be a multiple of 16, and the rows or the columns must be contiguous and multiples of 16 elements
    apart. Otherwise each element has an address of its own, and a program must hold fewer elements, or registers spill.
    Spills are slow, and ptxas 12.8 then reads encoded values before it has restored them (seen as wrong results on an
    H200 and confirmed in the machine code).
    """
    steps = sorted(x.stride()[-2:])
    return x.shape[-1] % VECTOR == 0 and steps[0] == 1 and steps[1] % VECTOR == 0


def to_k_major(data: Tensor) -> Tensor:
    """Make data [..., M, K] of a one-byte dtype contiguous along K, with rows padded with zeros to 16 bytes.

    Returns:
        [..., M, padded(K)], data itself if it has this layout already.
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
    """A program copies TILE×TILE bytes. Triton vectorizes the loads along the contiguous dimension of the source."""
    k_tiles = tl.cdiv(PADDED_K, TILE)
    m_tiles = tl.cdiv(M, TILE)
    batch = (tl.program_id(0) // (m_tiles * k_tiles)).to(tl.int64)
    m = (tl.program_id(0) // k_tiles % m_tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    k = (tl.program_id(0) % k_tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    at = source + batch * source_batch + m[:, None] * source_row + k[None, :] * source_col
    encoded = tl.load(at, mask=(m < M)[:, None] & (k < K)[None, :], other=0)
    inside = (m < M)[:, None] & (k < PADDED_K)[None, :]
    tl.store(target + (batch * M + m)[:, None] * PADDED_K + k[None, :], encoded, mask=inside)
