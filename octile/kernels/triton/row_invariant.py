# mypy: allow-untyped-defs
"""GEMMs in high precision in tiles of one size, as `octile.ops.row_invariant` specifies.

K is divided into parts of CHUNK, whose products are added in their order. Where a GEMM has few tiles, each part is a
program, and a second kernel adds them; otherwise one program computes a tile's parts one after the other. Both have the
same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.launch_config import ROW_INVARIANT

SUMMED = 256  # results of a program that adds parts


def launch(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply a[B, M, K] · b[B, N, K]ᵀ, any strides → [B, M, N] in out_dtype."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    launch_out(out, a, b)
    return out


def launch_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the same to out [B, M, N], whose rows are contiguous."""
    batch, m, n = out.shape
    if not out.numel():
        return
    is_fp32 = torch.float32 in (a.dtype, b.dtype)
    config = ROW_INVARIANT | ({"TILE_M": ROW_INVARIANT["TILE_M"] // 2} if is_fp32 else {})  # or it spills on sm_80
    tiles = triton.cdiv(n, config["TILE_N"]), triton.cdiv(m, config["TILE_M"])
    parts = max(triton.cdiv(a.shape[2], config["CHUNK"]), 1)
    splits = parts > 1 and tiles[0] * tiles[1] * batch < device_properties(a.device).num_sms
    partials = a.new_empty(parts, *out.shape, dtype=torch.float32) if splits else out[None]
    grid = *tiles, batch * (parts if splits else 1)
    with torch.cuda.device_of(a):
        matmul_nt[grid](
            a, b, partials, m, n, a.shape[2], batch, *a.stride(), *b.stride(), *partials.stride()[:3], SPLITS=splits,
            FP32=a.dtype != b.dtype, **config,
        )  # fmt: skip
        if splits:
            add_parts[(triton.cdiv(n, SUMMED), m, batch)](
                partials, out, parts, m, n, out.numel(), out.stride(0), out.stride(1), SUMMED=SUMMED
            )


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x, weight = cases.empty(1, cases.T, cases.K), cases.empty(1, cases.N, cases.K)
    return {
        "rows that do not depend on each other": lambda: launch(x, weight, cases.FP32),
        "the same of few rows": lambda: launch(x[:, :4], weight[:, :32], cases.FP32),
        "the same in FP32": lambda: launch(x, cases.empty(1, 256, cases.K, dtype=cases.FP32), cases.FP32),
    }


@triton.jit(do_not_specialize=["M", "batches"])
def matmul_nt(
    a, b, out, M, N, K, batches, a_batch, a_row, a_col, b_batch, b_row, b_col, out_part, out_batch, out_row,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    FP32: tl.constexpr,
):  # fmt: skip
    """A program computes a tile, over K or, with SPLITS, over a part of it; FP32: the operands are cast to FP32."""
    batch = (tl.program_id(2) % batches).to(tl.int64)
    part = tl.program_id(2) // batches
    m = (tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    from_a = a + batch * a_batch + m[:, None] * a_row
    from_b = b + batch * b_batch + n[None, :] * b_row
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    begin = part * CHUNK if SPLITS else 0
    end = tl.minimum(begin + CHUNK, K) if SPLITS else K
    for first in range(begin, end, CHUNK):
        products = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(first, tl.minimum(first + CHUNK, K), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < K)[None, :]
            left = tl.load(from_a + k.to(tl.int64)[None, :] * a_col, mask=(m < M)[:, None] & inside, other=0.0)
            right = tl.load(
                from_b + k.to(tl.int64)[:, None] * b_col, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0
            )
            if FP32:
                left, right = left.to(tl.float32), right.to(tl.float32)
            products += tl.dot(left, right, input_precision="ieee")
        total += products
    at = part.to(tl.int64) * out_part + batch * out_batch + m[:, None] * out_row + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["parts", "M", "total"])
def add_parts(partials, out, parts, M, N, total, out_batch, out_row, SUMMED: tl.constexpr):
    """Add the parts of some results of a row, in their order."""
    n = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    row, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    partials += (batch * M + row) * N
    sums = tl.zeros([SUMMED], tl.float32)
    for _ in range(parts):
        sums += tl.load(partials + n, mask=n < N, other=0.0)
        partials += total
    tl.store(out + batch * out_batch + row * out_row + n, sums.to(out.dtype.element_ty), mask=n < N)
