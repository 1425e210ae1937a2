# mypy: allow-untyped-defs
"""Dense GEMM of block-quantized operands, a[M, K] · b[N, K]ᵀ."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.cuda.gemm.request import GemmRequest
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.k_loop import choose_tile, operand_arguments, raster_tile, store_tile, sum_over_k


def launch(request: GemmRequest) -> Tensor:
    """Compute a[M, K] · b[N, K]ᵀ of a dense request, any sizes and strides, and return its out.

    Raises:
        ValueError: the kernel does not support the blocks; see `choose_tile`.
    """
    a, b = request.a, request.b
    (m, k), n = a.data.shape, b.data.shape[0]
    gpu = device_properties(a.data.device)
    tile = choose_tile(m, n, k, 1, a.block, b.block, gpu)
    out = request.new_out() if request.out is None else request.out
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(n, tile["TILE_N"]),)
    with torch.cuda.device_of(a.data):
        _matmul[grid](
            out=out,
            out_row=out.stride(0),
            out_col=out.stride(1),
            M=m,
            N=n,
            ACCUMULATE=request.accumulate,
            **operand_arguments(a, b, tile["BLOCK_K"], gpu),
            **tile,
        )
    return out


@triton.jit(do_not_specialize=["M"])
def _matmul(
    out, out_row, out_col, M, N, K,
    a, a_scale, a_group, a_row, a_scale_group, a_scale_row, a_scale_col,
    b, b_scale, b_group, b_row, b_scale_group, b_scale_row, b_scale_col,
    A_ROWS: tl.constexpr, A_COLS: tl.constexpr, A_MANTISSA: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLS: tl.constexpr, B_MANTISSA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A program computes TILE_M×TILE_N of the output."""
    m_tile, n_tile = raster_tile(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N))
    m_first = m_tile * TILE_M
    n_first = n_tile * TILE_N
    total = sum_over_k(
        a, a_row, a_scale, a_scale_row, a_scale_col, m_first, M,
        b, b_row, b_scale, b_scale_row, b_scale_col, n_first, N, K, 0, K,
        A_ROWS, A_COLS, A_MANTISSA, B_ROWS, B_COLS, B_MANTISSA, TILE_M, TILE_N, BLOCK_K, MASK_K,
    )  # fmt: skip
    store_tile(out, out_row, out_col, total, m_first, M, n_first, N, ACCUMULATE)
