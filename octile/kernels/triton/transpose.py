# mypy: allow-untyped-defs
"""Casts that also turn the matrix, in one read of it; bit for bit what `octile.ops.transpose` specifies."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.storage import new_scale, new_transposed
from octile.kernels.triton.codes import as_codes, cast_constants, to_float
from octile.kernels.triton.quantize_kernels import load, place
from octile.kernels.triton.scaling import divide, magnitude, scale_of, to_codes
from octile.kernels.triton.squares import (
    store_codes,
    store_tiles,
    store_turned_codes,
    store_turned_tiles,
)
from octile.kernels.triton.tuning import EXACT, SQUARES


def launch_rows_and_columns(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., M, K], any strides → data, scale in 1×128; data_t [..., K, M], scale_t in 1×128 along M."""
    data, scale = torch.empty(x.shape, dtype=dtype, device=x.device), new_scale(x, 1, 128)
    data_t, scale_t = new_transposed(x, dtype), new_scale(x, 128, 1).mT
    _launch(quantize_both, x, power_of_2, data=data, scale=scale, data_t=data_t, scale_t=scale_t)
    return data, scale, data_t, scale_t


def launch_requantize(data: Tensor, scale: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """data [..., M, K] with scale in 1×128, any strides → data_t [..., K, M], scale_t in 1×128 along M."""
    data_t, scale_t = new_transposed(data, data.dtype), new_scale(data, 128, 1).mT
    scale = scale.reshape(math.prod(scale.shape[:-2]), *scale.shape[-2:])
    old = dict(zip(("old_batch", "old_row", "old_col"), scale.stride(), strict=True))
    _launch(requantize, as_codes(data), power_of_2, data_t=data_t, scale_t=scale_t, old_scale=scale, **old)
    return data_t, scale_t


def launch_block(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., M, K], any strides → data, scale in 128×128, and data_t [..., K, M]."""
    data, scale = torch.empty(x.shape, dtype=dtype, device=x.device), new_scale(x, 128, 128)
    data_t = new_transposed(x, dtype)
    _launch(quantize_block, x, power_of_2, data=data, scale=scale, data_t=data_t)
    return data, scale, data_t


def _launch(kernel: Any, x: Tensor, power_of_2: bool, data_t: Tensor, **arguments: Any) -> None:
    m, k = x.shape[-2:]
    if x.numel() == 0:
        return
    x = x.reshape(-1, m, k)
    grid = (len(x) * triton.cdiv(m, 128) * triton.cdiv(k, 128),)
    constants = cast_constants(data_t.dtype) | SQUARES[kernel.__name__] | EXACT
    if "data" in arguments:
        arguments["data"] = as_codes(arguments["data"])
    with torch.cuda.device_of(x):
        kernel[grid](x, m, k, *x.stride(), data_t=as_codes(data_t), **arguments, POWER_OF_2=power_of_2, **constants)


@triton.jit(do_not_specialize=["M"])
def quantize_both(
    x, M, K, x_batch, x_row, x_col, data, scale, data_t, scale_t,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    batch, m_tile, k_tile = place(tl.program_id(0), M, K, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    value = load(x, batch, m, k, M, K, x_batch, x_row, x_col)
    store_turned_tiles(value, data_t, scale_t, batch, m_tile, k_tile, M, K, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)
    value = load(x, batch, m, k, M, K, x_batch, x_row, x_col)  # again, from the L1 cache, rather than held till here
    store_tiles(value, data, scale, batch, m_tile, k_tile, M, K, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def requantize(
    data, M, K, data_batch, data_row, data_col, old_scale, old_batch, old_row, old_col, data_t, scale_t,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    batch, m_tile, k_tile = place(tl.program_id(0), M, K, 128, 128)
    m = (m_tile * 128 + tl.arange(0, 128)).to(tl.int64)
    k = (k_tile * 128 + tl.arange(0, 128)).to(tl.int64)
    at = batch * data_batch + m[:, None] * data_row + k[None, :] * data_col
    codes = tl.load(data + at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    old = tl.load(old_scale + batch * old_batch + m * old_row + k_tile * old_col, mask=m < M, other=0.0)
    value = to_float(codes, MANTISSA) * old[:, None]
    store_turned_tiles(value, data_t, scale_t, batch, m_tile, k_tile, M, K, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def quantize_block(
    x, M, K, x_batch, x_row, x_col, data, scale, data_t,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    batch, m_tile, k_tile = place(tl.program_id(0), M, K, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    value = load(x, batch, m, k, M, K, x_batch, x_row, x_col)
    block_scale = scale_of(tl.max(tl.max(magnitude(value), axis=1), axis=0), INVERSE, REST, POWER_OF_2)
    codes = to_codes(divide(value, block_scale, POWER_OF_2), data.dtype.element_ty, MANTISSA, BIAS)
    store_codes(codes, data, batch, m_tile, k_tile, M, K)
    store_turned_codes(codes, data_t, batch, m_tile, k_tile, M, K)
    tl.store(scale + (batch * tl.cdiv(M, 128) + m_tile) * tl.cdiv(K, 128) + k_tile, block_scale)
