# mypy: allow-untyped-defs
"""GEMMs in high precision in tiles of one size, as `octile.ops.row_invariant` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import ROW_INVARIANT


def launch(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply a[B, M, K] · b[B, N, K]ᵀ, any strides → [B, M, N] in out_dtype."""
    (batch, m, k), n = a.shape, b.shape[1]
    out = a.new_empty(batch, m, n, dtype=out_dtype)
    if out.numel():
        grid = (triton.cdiv(n, ROW_INVARIANT["TILE_N"]), triton.cdiv(m, ROW_INVARIANT["TILE_M"]), batch)
        with torch.cuda.device_of(a):
            matmul_nt[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), FP32=a.dtype != b.dtype, **ROW_INVARIANT)
    return out


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x, weight = cases.empty(1, cases.T, cases.K), cases.empty(1, cases.N, cases.K)
    return {
        "rows that do not depend on each other": lambda: launch(x, weight, cases.FP32),
        "the same in FP32": lambda: launch(x, cases.empty(1, 256, cases.K, dtype=cases.FP32), cases.FP32),
    }


@triton.jit(do_not_specialize=["M"])
def matmul_nt(
    a, b, out, M, N, K, a_batch, a_row, a_col, b_batch, b_row, b_col,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """A program computes one tile, over all of K; FP32: both operands are multiplied in FP32."""
    batch = tl.program_id(2).to(tl.int64)
    m = (tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    from_a = a + batch * a_batch + m[:, None] * a_row
    from_b = b + batch * b_batch + n[None, :] * b_row
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(from_a + k.to(tl.int64)[None, :] * a_col, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(from_b + k.to(tl.int64)[:, None] * b_col, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        if FP32:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total += tl.dot(left, right, input_precision="ieee")
    at = (batch * M + m)[:, None] * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
