# mypy: allow-untyped-defs
"""RMSNorm, cast as it is made; `octile.ops.norm` specifies it and says what is bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.storage import new_scale
from octile.kernels.triton import tuning
from octile.kernels.triton.codes import as_codes, cast_constants
from octile.kernels.triton.quantize_kernels import load
from octile.kernels.triton.scaling import divide, magnitude, scale_of, to_codes
from octile.kernels.triton.tuning import EXACT


def launch(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], any strides → data [M, K], scale in 1×128, rstd [M]."""
    m, k = x.shape
    data, scale = torch.empty(x.shape, dtype=dtype, device=x.device), new_scale(x, 1, 128)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        tiles = triton.next_power_of_2(triton.cdiv(max(k, 1), 128))
        rows = max(tuning.NORM_NUMBERS // (128 * tiles), 1)
        warps = min(max(rows * tiles * 128 // tuning.NUMBERS_A_WARP, 4), 32)
        with torch.cuda.device_of(x):
            rms_norm[(triton.cdiv(m, rows),)](
                x, weight, eps, m, k, *x.stride(), weight.stride(0), as_codes(data), scale, rstd,
                POWER_OF_2=power_of_2, ROWS=rows, TILES=tiles, num_warps=warps, **cast_constants(dtype), **EXACT,
            )  # fmt: skip
    return data, scale, rstd


@triton.jit(do_not_specialize=["M"])
def rms_norm(
    x, weight, eps, M, K, x_row, x_col, weight_step, data, scale, rstd,
    ROWS: tl.constexpr, TILES: tl.constexpr, POWER_OF_2: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows, in TILES tiles each."""
    first = tl.program_id(0) * ROWS
    m = first + tl.arange(0, ROWS)
    k = tl.arange(0, TILES * 128)
    value = load(x, 0, m, k, M, K, 0, x_row, x_col)
    factor = tl.rsqrt(tl.sum(value * value, axis=1) / K + eps)
    tl.store(rstd + m, factor, mask=m < M)
    w = tl.load(weight + k * weight_step, mask=k < K, other=0.0).to(tl.float32)
    value = value * factor[:, None] * w[None, :]

    tiles = tl.reshape(value, [ROWS, TILES, 128])
    tile_scale = scale_of(tl.max(magnitude(tiles), axis=2), INVERSE, REST, POWER_OF_2)
    codes = to_codes(divide(tiles, tile_scale[:, :, None], POWER_OF_2), data.dtype.element_ty, MANTISSA, BIAS)
    at = m.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(data + at, tl.reshape(codes, [ROWS, TILES * 128]), mask=(m < M)[:, None] & (k < K)[None, :])
    tile = tl.arange(0, TILES)
    at = tile[None, :] * (tl.cdiv(M, 4) * 4) + m[:, None]
    tl.store(scale + at, tile_scale, mask=(m < M)[:, None] & (tile < tl.cdiv(K, 128))[None, :])
