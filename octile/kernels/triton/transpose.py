# mypy: allow-untyped-defs
"""Quantization that also transposes a matrix, in one read of it, bit for bit as `octile.ops.transpose` specifies."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import TILE
from octile.kernels.memory_layout import new_quantized_transposed, new_scale, new_transposed
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton import quantize
from octile.kernels.triton.blocks import (
    rows_of_tile,
    store_data,
    store_data_transposed,
    store_tiles,
    store_tiles_transposed,
)
from octile.kernels.triton.fp8_bits import as_encoded, quantize_constants
from octile.kernels.triton.launch_config import BLOCK_WARPS, EXACT
from octile.kernels.triton.layout import is_vectorizable
from octile.kernels.triton.quantize_kernels import load, program_tile
from octile.kernels.triton.scaling import divide, load_dequantized, magnitude, round_to_format, scale_from_amax


def launch_rows_and_columns(
    x: Tensor, dtype: torch.dtype, power_of_2: bool, tiles: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize x [..., M, K], any strides → data, scale for 1×128; data_t [..., K, M], scale_t for 1×128 along M.

    With tiles [P/128, 2] of groups of rows, P takes the place of M in data_t and scale_t.
    """
    if tiles is None and not is_vectorizable(x):
        encoded, column_scale = quantize.launch(x, 128, 1, dtype, power_of_2)
        return (
            *quantize.launch(x, 1, 128, dtype, power_of_2),
            new_transposed(x, dtype).copy_(encoded.mT),
            column_scale.mT,
        )
    data, scale = torch.empty(x.shape, dtype=dtype, device=x.device), new_scale(x, 1, 128)
    data_t, scale_t = new_quantized_transposed(x, dtype, tiles)
    grouped = {"tiles": scale if tiles is None else tiles, "P": data_t.shape[-1], "GROUPED": tiles is not None}
    _launch(quantize_rows_and_columns, x, power_of_2, data=data, scale=scale, data_t=data_t, scale_t=scale_t, **grouped)
    return data, scale, data_t, scale_t


def launch_joined_rows_and_columns(
    parts: Sequence[Tensor], dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize the columns of matrices [M, K], any strides, as one matrix."""
    return launch_rows_and_columns(torch.cat(list(parts), dim=1), dtype, power_of_2)


def launch_requantize(
    data: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    rows: Tensor | None = None,
    tiles: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Requantize data [..., M, K] (E5M6: [..., M, 3K/2]), scale for 1×128, any strides → data_t [..., K, M], scale_t.

    With rows [R], the rows of one matrix with these indices, in this order; R takes the place of M. With tiles
    [P/128, 2] of groups of these rows, P takes it. With in_blocks, scale_t is for 128×128.
    """
    *batch, m, _ = data.shape
    k = data.shape[-1] // 3 * 2 if data.dtype == torch.uint8 else data.shape[-1]
    r = m if rows is None else len(rows)
    like = torch.empty(*batch, r, k, dtype=dtype, device=data.device)  # never accessed
    data_t, scale_t = new_quantized_transposed(like, dtype, tiles, in_blocks)
    if like.numel() == 0:
        return data_t, scale_t
    encoded = as_encoded(data).reshape(-1, *data.shape[-2:])
    scale = scale.reshape(-1, *scale.shape[-2:])
    p = data_t.shape[-1]
    grid = (len(encoded) * triton.cdiv(p, 128) * triton.cdiv(k, 128),)
    with torch.cuda.device_of(data):
        requantize[grid](
            encoded, r, k, *encoded.stride(), scale, *scale.stride(), scale if rows is None else rows,
            0 if rows is None else rows.stride(0), scale if tiles is None else tiles, p, as_encoded(data_t), scale_t,
            OLD_MANTISSA=quantize_constants(data.dtype)["MANTISSA"], ROWS=rows is not None, GROUPED=tiles is not None,
            IN_BLOCKS=in_blocks, POWER_OF_2=power_of_2,
            **quantize_constants(dtype), **BLOCK_WARPS["requantize"], **EXACT,
        )  # fmt: skip
    return data_t, scale_t


def launch_block(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [..., M, K], any strides → data, scale for 128×128, and data_t [..., K, M]."""
    if not is_vectorizable(x):
        data, scale = quantize.launch(x, 128, 128, dtype, power_of_2)
        return data, scale, new_transposed(x, dtype).copy_(data.mT)
    data, scale = torch.empty(x.shape, dtype=dtype, device=x.device), new_scale(x, 128, 128)
    data_t = new_transposed(x, dtype)
    _launch(quantize_and_transpose, x, power_of_2, data=data, scale=scale, data_t=data_t)
    return data, scale, data_t


def launch_encoded(data: Tensor) -> Tensor:
    """Copy data [..., M, K] of one byte an element, any strides → data_t [..., K, M]."""
    data_t = new_transposed(data, data.dtype)
    if data.numel() == 0:
        return data_t
    m, k = data.shape[-2:]
    matrices = data.view(torch.uint8).reshape(-1, m, k)
    grid = (len(matrices) * triton.cdiv(m, 128) * triton.cdiv(k, 128),)
    with torch.cuda.device_of(data):
        transpose_encoded[grid](
            matrices, m, k, *matrices.stride(), data_t.view(torch.uint8), **BLOCK_WARPS["transpose_encoded"]
        )
    return data_t


def launch_transposed_block(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize x [..., M, K], any strides → data_t [..., K, M], and scale for 128×128 blocks of x."""
    _, scale, data_t = launch_block(x, dtype, power_of_2)
    return data_t, scale


def launch_joined(
    weights: Sequence[Tensor], dtype: torch.dtype, power_of_2: bool, with_data: bool, with_transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the rows of matrices [N, K], any strides, as one matrix; `octile.ops.transpose.quantize_joined`.

    One matrix may also be a batch [..., N, K].
    """
    x = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    nothing = torch.empty(0, 0, dtype=dtype, device=x.device)
    if not with_transposed:
        return *quantize.launch(x, 128, 128, dtype, power_of_2), nothing
    data, scale, data_t = launch_block(x, dtype, power_of_2)
    return data if with_data else nothing, scale, data_t


def launch_matrices(
    groups: Sequence[Sequence[Tensor]], dtype: torch.dtype, power_of_2: bool, with_data: bool, with_transposed: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Quantize groups of matrices; `octile.ops.transpose.quantize_matrices`."""
    return [launch_joined(matrices, dtype, power_of_2, with_data, with_transposed) for matrices in groups]


def _launch(kernel: Any, x: Tensor, power_of_2: bool, data: Tensor, data_t: Tensor, **others: Any) -> None:
    m, k = x.shape[-2:]
    if x.numel() == 0:
        return
    x = x.reshape(-1, m, k)
    grid = (len(x) * triton.cdiv(data_t.shape[-1], 128) * triton.cdiv(k, 128),)
    constants = quantize_constants(data_t.dtype) | BLOCK_WARPS[kernel.__name__] | EXACT
    encoded = {"data": as_encoded(data), "data_t": as_encoded(data_t)}
    with torch.cuda.device_of(x):
        kernel[grid](x, m, k, *x.stride(), **encoded, **others, POWER_OF_2=power_of_2, **constants)


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x, weight = cases.empty(cases.T, cases.K), cases.empty(cases.N, cases.K, dtype=cases.FP32)
    data, scale, _ = cases.quantized(cases.T, cases.K, TILE)
    e5m6, rows = cases.empty(cases.T, cases.K * 3 // 2, dtype=torch.uint8), cases.rows_of_tokens().view(-1)
    e5m6_scale = cases.empty(cases.T, cases.K // 128, dtype=cases.FP32)
    tiles, ragged, dtype = cases.group_tiles(), cases.ragged(), cases.E4M3
    return {
        "rows and columns": lambda: launch_rows_and_columns(x, dtype, False),
        "rows and columns of groups": lambda: launch_rows_and_columns(x, dtype, False, tiles),
        "requantize, transposed": lambda: launch_requantize(data, scale, dtype, True),
        "requantize E5M6, transposed": lambda: launch_requantize(e5m6, e5m6_scale, dtype, True),
        "requantize rows, transposed": lambda: launch_requantize(data, scale, dtype, True, rows),
        "requantize rows of groups, transposed": lambda: launch_requantize(data, scale, dtype, True, rows, tiles),
        "requantize to blocks, transposed": lambda: launch_requantize(data, scale, dtype, True, in_blocks=True),
        "weight and its transpose": lambda: launch_block(weight, dtype, False),
        "ragged: rows and columns": lambda: launch_rows_and_columns(ragged, dtype, False),
        "ragged: weight and its transpose": lambda: launch_block(ragged, dtype, False),
        "ragged: requantize, transposed": lambda: launch_requantize(
            *cases.quantized(700, 1000, TILE)[:2], dtype, False
        ),
    }


@triton.jit(do_not_specialize=["M", "P"])
def quantize_rows_and_columns(
    x, M, K, x_batch, x_row, x_col, data, scale, data_t, scale_t, tiles, P, GROUPED: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Quantize a 128×128 tile of x[B, M, K] twice: in 1×128 tiles, and transposed, in 1×128 tiles along M."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), P, K, 128, 128)
    m_first, m_end = rows_of_tile(tiles, m_tile, M, GROUPED)
    m = m_first + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    value = load(x, batch, m, k, m_end, K, x_batch, x_row, x_col)
    store_tiles_transposed(
        value, data_t, scale_t, batch, m_tile, k_tile, P, K, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS
    )
    # loads again, from the L1 cache, instead of holding the values in registers
    value = load(x, batch, m, k, m_end, K, x_batch, x_row, x_col)
    store_tiles(value, data, scale, batch, m_first, m_end, k_tile, M, K, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M", "P"])
def requantize(
    data, M, K, data_batch, data_row, data_col, scale, scale_batch, scale_row, scale_col, rows, rows_step, tiles, P,
    data_t, scale_t,
    OLD_MANTISSA: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, IN_BLOCKS: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Requantize a 128×128 tile of data[B, M, K] transposed: decode it with its scales, quantize it along M."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), P, K, 128, 128)
    m_first, m_end = rows_of_tile(tiles, m_tile, M, GROUPED)
    m = m_first + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    row = m
    if ROWS:
        row = tl.load(rows + m * rows_step, mask=m < m_end, other=0)
    value = load_dequantized(
        data + batch * data_batch, scale + batch * scale_batch, row, m < m_end, k, k_tile, K,
        data_row, data_col, scale_row, scale_col, OLD_MANTISSA,
    )  # fmt: skip
    store_tiles_transposed(
        value, data_t, scale_t, batch, m_tile, k_tile, P, K, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS, IN_BLOCKS
    )


@triton.jit(do_not_specialize=["M"])
def transpose_encoded(data, M, K, data_batch, data_row, data_col, data_t):
    """Copy a 128×128 block of data[B, M, K] transposed."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), M, K, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    at = batch * data_batch + m.to(tl.int64)[:, None] * data_row + k.to(tl.int64)[None, :] * data_col
    encoded = tl.load(data + at, mask=(m < M)[:, None] & (k < K)[None, :], other=0)
    store_data_transposed(encoded, data_t, batch, m_tile, k_tile, M, K)


@triton.jit(do_not_specialize=["M"])
def quantize_and_transpose(
    x, M, K, x_batch, x_row, x_col, data, scale, data_t,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Quantize a 128×128 block of x[B, M, K] with one scale, and store its data as they are and transposed."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), M, K, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    value = load(x, batch, m, k, M, K, x_batch, x_row, x_col)
    block_scale = scale_from_amax(tl.max(tl.max(magnitude(value), axis=1), axis=0), INVERSE, REST, POWER_OF_2)
    encoded = round_to_format(divide(value, block_scale, POWER_OF_2), data.dtype.element_ty, MANTISSA, BIAS)
    store_data_transposed(encoded, data_t, batch, m_tile, k_tile, M, K)
    # Loads and quantizes again. If the same registers are stored both ways, ptxas 12.8 (of Triton 3.6) transposes them
    # before the encoded values of FP32 inputs are in them (seen as NaN gradients on an H200, then in the machine code).
    value = load(x, batch, m, k, M, K, x_batch, x_row, x_col)
    encoded = round_to_format(divide(value, block_scale, POWER_OF_2), data.dtype.element_ty, MANTISSA, BIAS)
    store_data(encoded, data, batch, m_tile * 128, M, k_tile, M, K)
    tl.store(scale + (batch * tl.cdiv(M, 128) + m_tile) * tl.cdiv(K, 128) + k_tile, block_scale)
