# mypy: allow-untyped-defs
"""Dense GEMM of block-quantized operands, a[M, K] · b[N, K]ᵀ."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import BLOCK, MX_TILE, TILE
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.triton import compile_cases as cases
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
    out = request.output()
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


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def dense(x: cases.Quantized, w: cases.Quantized, accumulate: bool = False) -> None:
        out = cases.empty(len(x[0]), len(w[0]), dtype=cases.FP32 if accumulate else cases.BF16)
        launch(GemmRequest(Schedule.DENSE, Operand(*x), Operand(*w), out.dtype, out, None, accumulate))

    t, n, k, quantized = cases.T, cases.N, cases.K, cases.quantized
    return {
        "x · wᵀ": lambda: dense(quantized(t, k, TILE), quantized(n, k, BLOCK)),
        "x · wᵀ, 64 rows": lambda: dense(quantized(64, k, TILE), quantized(n, k, BLOCK)),
        "x · wᵀ INT8": lambda: dense(quantized(t, k, TILE, cases.INT8), quantized(n, k, BLOCK, cases.INT8)),
        "dyᵀ · x": lambda: dense(quantized(t, t, TILE), quantized(n, t, TILE), accumulate=True),
        "x · wᵀ MXFP8": lambda: dense(quantized(t, k, MX_TILE), quantized(n, k, MX_TILE)),
    }


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
