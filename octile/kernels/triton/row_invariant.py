# mypy: allow-untyped-defs
"""GEMMs in high precision whose rows do not depend on each other, as `octile.ops.row_invariant` specifies.

With few columns K is divided into parts of CHUNK, whose products are added in their order. Where such a GEMM has few
tiles, each part is a program, and a second kernel adds them; otherwise one program computes a tile's parts one after
the other. With WIDE columns or more a row has tiles for many SMs, and K is not divided.

Many rows have larger tiles, which tensor cores add up in the same order of K: a row has the same bits in all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.row_invariant import CHUNK, WIDE
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import DeviceProperties, device_properties
from octile.kernels.triton.launch_config import ROW_INVARIANT, ROW_INVARIANT_OF_MANY, ROW_INVARIANT_WIDE

TOGETHER = 8  # tiles of rows for which programs that follow each other find b in L2
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
    gpu = device_properties(a.device)
    config = choose_tiles(m, n, batch, torch.float32 in (a.dtype, b.dtype), gpu)
    tiles = count_tiles(config, m, n)
    parts = 1 if n >= WIDE else max(triton.cdiv(a.shape[2], CHUNK), 1)
    splits = parts > 1 and tiles * batch < gpu.num_sms
    partials = a.new_empty(parts, *out.shape, dtype=torch.float32) if splits else out[None]
    grid = tiles, batch * (parts if splits else 1)
    with torch.cuda.device_of(a):
        matmul_nt[grid](
            a, b, partials, m, n, a.shape[2], batch, *a.stride(), *b.stride(), *partials.stride()[:3],
            CHUNK=CHUNK if parts > 1 else 0, SPLITS=splits, FP32=a.dtype != b.dtype, TOGETHER=TOGETHER, **config,
        )  # fmt: skip
        if splits:
            add_parts[(triton.cdiv(n, SUMMED), m, batch)](
                partials, out, parts, m, n, out.numel(), out.stride(0), out.stride(1), SUMMED=SUMMED
            )


def choose_tiles(m: int, n: int, batch: int, is_fp32: bool, gpu: DeviceProperties) -> dict[str, int]:
    """Choose the largest tiles of which there are enough for all SMs."""
    if is_fp32:  # on CUDA cores
        return ROW_INVARIANT | {"TILE_M": ROW_INVARIANT["TILE_M"] // 2, "num_stages": 2}  # or it spills on sm_80
    larger = []
    if n >= WIDE and gpu.shared_bytes >= SHARED_BYTES:
        larger.append(ROW_INVARIANT_WIDE)
    if m > ROW_INVARIANT["TILE_M"]:
        larger.append(ROW_INVARIANT_OF_MANY)
    enough = (
        config for config in larger if m > config["TILE_M"] // 2 and count_tiles(config, m, n) * batch >= gpu.num_sms
    )
    return next(enough, ROW_INVARIANT)


def count_tiles(config: dict[str, int], m: int, n: int) -> int:
    """The tiles of a matrix of results [M, N]."""
    return triton.cdiv(m, config["TILE_M"]) * triton.cdiv(n, config["TILE_N"])


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
    FP32: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program computes a tile, over K or, with SPLITS, over a part of it; FP32: the operands are cast to FP32.

    CHUNK is 0 where K is not divided. TOGETHER tiles of rows of the same columns have programs that follow each other.
    """
    batch = (tl.program_id(1) % batches).to(tl.int64)
    part = tl.program_id(1) // batches
    columns = tl.cdiv(N, TILE_N)
    tile_m, tile_n = tl.program_id(0) // columns, tl.program_id(0) % columns
    tile_m, tile_n = tl.swizzle2d(tile_m, tile_n, tl.cdiv(M, TILE_M), columns, TOGETHER)
    m = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    n = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    from_a = a + batch * a_batch + m[:, None] * a_row
    from_b = b + batch * b_batch + n[None, :] * b_row
    if SPLITS or CHUNK == 0:
        begin = part * CHUNK
        end = tl.minimum(begin + CHUNK, K) if SPLITS else K
        total = _products(from_a, from_b, m, n, M, N, K, begin, end, a_col, b_col, TILE_M, TILE_N, BLOCK_K, FP32)
    else:
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for begin in range(0, K, CHUNK):
            end = tl.minimum(begin + CHUNK, K)
            total += _products(from_a, from_b, m, n, M, N, K, begin, end, a_col, b_col, TILE_M, TILE_N, BLOCK_K, FP32)
    at = part.to(tl.int64) * out_part + batch * out_batch + m[:, None] * out_row + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _products(
    from_a, from_b, m, n, M, N, K, begin, end, a_col, b_col,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Multiply the columns from begin to end of the tile's rows."""
    products = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K)[None, :]
        left = tl.load(from_a + k.to(tl.int64)[None, :] * a_col, mask=(m < M)[:, None] & inside, other=0.0)
        right = tl.load(from_b + k.to(tl.int64)[:, None] * b_col, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        if FP32:
            left, right = left.to(tl.float32), right.to(tl.float32)
        products += tl.dot(left, right, input_precision="ieee")
    return products


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
