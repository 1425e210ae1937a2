"""Launcher of Hopper's quantization kernels in CUDA C++, whose results are bit for bit those of Triton's kernels.

    tiles.cu            1×128 tiles; one scale that the caller passes
    blocks.cu           128×128 blocks of the input: tiles along rows and columns, requantization along columns, weights
                        with their transpose
    matrices.cu         many weights in 128×128 blocks by one launch
    swiglu.cu           SwiGLU in 1×128 tiles; its inputs, quantized to be saved for backward
    swiglu_backward.cu  the gradients of SwiGLU and its recomputed result, in tiles along rows and columns
    rms_norm.cu         RMSNorm in 1×128 tiles
    dequantize.cu       encoded values to BF16, FP16 or FP32

They are faster than Triton's for three reasons. One of 16 lanes computes a scale and sends it to the others, pairs of
16-bit values are compared by one instruction, and four values of a column are rounded into one word of the transpose.
Triton cannot express the first and the last, and its exponentials and divisions take several times the instructions.
On an H200 Triton's kernels reach 0.16 to 0.80 of the speed of a copy (benchmarks/LOG.md).

They support contiguous rows of a multiple of 8 elements that begin at multiples of 16 bytes, as training and serving
allocate them. `octile.kernels.backends` calls Triton's kernels for other layouts (`why_unsupported`).

A launch depends on shapes and strides, never on values, so it can be captured in a CUDA graph. The first call of a kind
compiles and loads a kernel, which cannot be captured.

Kernels are loaded and launched as GEMMs are: a kernel with its launch shape is cached by its constants, and a launch by
its arguments (`jit.launch`, `jit.prepared`).
"""

import functools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit.launch import launch, overlaps
from octile.kernels.cuda.jit.prepared import Structures, address_of
from octile.kernels.memory_layout import new_quantized_transposed, new_scale, new_transposed

DTYPES = {  # enum Dtype of scale.cuh
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
    torch.uint8: 6,  # E5M6, packed: two values in three bytes
}
SIDE, MAX_COLUMNS = 128, 16384  # rows and columns of a block; the most columns that RMSNorm supports
BLOCK_THREADS, BLOCK_BYTES = 256, 128 * 128 + 4 * 8 * 128 + 20 * 128 + 32  # smem::bytes of block.cuh
MATRIX = "QQQQQqiiiiiIII"  # struct Matrix of matrices.cu
CAPACITY = 51  # how many of them a launch takes as arguments
BACKWARD_BYTES = 7 * 2 * 16 * BLOCK_THREADS + 4 * 3 * SIDE  # shared memory of swiglu_backward.cu on top

# Settings that decide on the kernels' speed; `octile bench tune-casts` searches for better ones on a GPU.
#   rows           rows of a thread (tiles, swiglu, dequantize), or rows that a block computes in sequence (rms_norm)
#   warps          warps of a block
#   blocks         blocks that must fit on an SM at the same time, which limits the registers of a thread
#   raster_height  128×128 blocks along M that consecutive thread blocks compute
SETTINGS: dict[str, dict[str, int]] = {
    "tiles": {"rows": 8, "warps": 8, "blocks": 3},
    "tiles, 32 bits": {"rows": 4, "warps": 8, "blocks": 3},
    "tiles, E5M6": {"rows": 8, "warps": 8, "blocks": 3},
    "scale given": {"rows": 8, "warps": 8, "blocks": 3},
    "swiglu": {"rows": 2, "warps": 4, "blocks": 8},
    "swiglu, inputs saved": {"rows": 4, "warps": 4, "blocks": 6},
    "both": {"raster_height": 1, "blocks": 3},
    "transposed_only": {"raster_height": 1, "blocks": 4},
    "transposed_block": {"raster_height": 1, "blocks": 4},
    "columns": {"raster_height": 8, "blocks": 3},
    "block": {"raster_height": 8, "blocks": 3},
    "weight": {"raster_height": 8, "blocks": 3},
    "swiglu_backward": {"raster_height": 2, "blocks": 2},
    "swiglu_backward, FP32 or INT8": {"raster_height": 1, "blocks": 1},
    "rms_norm": {"rows": 1, "blocks": 3},
    "rms_norm, FP32 or with y": {"rows": 4, "blocks": 2},
    "dequantize": {"rows": 8, "warps": 8, "blocks": 4},
}
NORM_BYTES = 2 * 4 * 32  # shared memory of rms_norm.cu: two buffers
# Columns up to which Triton's RMSNorm is faster, without and with its result in high precision. On an H200 it is 1.3 to
# 2.8 times as fast for 96 to 384 columns (benchmarks/history/quantize-kernels/narrow_rows.txt); with the result, which
# was not measured, it stays faster up to 256 columns even if the additional bytes take as long as in a copy.
NARROW_ROWS, NARROW_ROWS_WITH_VALUES = 512, 256
NORM_UNITS = 4  # vectors of 8 columns of a row that a thread of rms_norm holds at most; fewer if the row has fewer
FEW_ROWS = 256  # of RMSNorm, up to which each row has a block: a GPU has as many SMs, or half as many
NORM_WARPS = 7  # a block's warps for which the setting `blocks` was measured; smaller blocks are more


MAX_KEYS = 8192  # layouts


class Form(IntEnum):
    """What blocks.cu computes; enum Form of block.cuh."""

    BOTH = 0
    TRANSPOSED_ONLY = 1
    COLUMNS = 2
    BLOCK = 3
    WEIGHT = 4
    TRANSPOSED_BLOCK = 5


def why_unsupported(*matrices: Tensor, out: torch.dtype | None = None) -> str | None:
    """Return why these kernels do not support matrices [..., M, K]; None: they do.

    Args:
        matrices: elements or 8-bit encoded values [..., M, K], or packed E5M6 [..., M, 3K/2], on one device.
        out: dtype of the data to be written.
    """
    return request.why_not_on(matrices[0].device) or layout_error(*matrices, out=out)


def layout_error(*matrices: Tensor, out: torch.dtype | None = None) -> str | None:
    """Return the part of `why_unsupported` that depends on shapes, strides and alignment."""
    for x in matrices:
        error = _layout_error(x.shape, x.stride(), x.dtype, x.data_ptr() % 16, out)
        if error is not None:
            return error
    return None


@functools.lru_cache(MAX_KEYS)  # runs before every launch, and layouts recur
def _layout_error(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, address: int, out: torch.dtype | None
) -> str | None:
    packed, size, columns = dtype == torch.uint8, dtype.itemsize, shape[-1]
    unit, vector = (12, 4) if packed else (8, 8 if size == 1 else 16)
    if not 0 < shape.numel() < 2**31 * SIDE:
        return "it is empty" if shape.numel() == 0 else "it has too many elements for one launch"
    if columns % unit:
        return f"its rows of {columns} are not a multiple of {unit}"
    if strides[-1] != 1 or (matrix_strides := _matrix_strides(shape, strides)) is None:
        return "its rows are not contiguous, or its matrices are not one stride apart"
    if (address | matrix_strides[0] * size | matrix_strides[1] * size) % vector or (
        packed and any(n % unit for n in matrix_strides)
    ):
        return f"its rows do not begin at multiples of {unit if packed else vector} bytes"
    if out == torch.uint8 and columns % 32:
        return f"its rows of {columns} are not a multiple of 32, as packed E5M6 needs"
    return None


def reads_scale(scale: Tensor, block_cols: int) -> bool:
    """Return whether `dequantize` reads such scales: matrices one stride apart, scales of columns contiguous."""
    has_column_tiles = block_cols == 1
    return _strides(scale) is not None and (
        not has_column_tiles or (scale.stride(-1) == 1 and _is_aligned_along(scale, -2))
    )


def reads_tile_scales(scale: Tensor) -> bool:
    """Return whether `requantize` reads such scales of 1×128: contiguous along M, as `new_scale` allocates them."""
    return _strides(scale) is not None and scale.stride(-2) == 1 and _is_aligned_along(scale, -1)


def is_vector(weight: Tensor) -> bool:
    """Return whether `rms_norm` reads such a weight [K]: contiguous and aligned."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0


def quantize(
    x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor]:
    """Quantize x [..., M, K] in blocks of 1×128, 128×1 or 128×128.

    Returns:
        data [..., M, K] (E5M6: [..., M, 3K/2]), and its scale.
    """
    k = x.shape[-1]
    data = x.new_empty(*x.shape[:-1], k // 2 * 3 if dtype == torch.uint8 else k, dtype=dtype)
    scale = new_scale(x, block_rows, block_cols)
    if block_rows == 1:
        needs_registers = x.dtype == torch.float32 or (dtype == torch.uint8 and not power_of_2)
        kind = "tiles, 32 bits" if needs_registers else "tiles, E5M6" if dtype == torch.uint8 else "tiles"
        _launch_tiles(SETTINGS[kind], x, dtype, power_of_2, data=data, scale=scale)
    elif block_cols == 1:
        _launch_blocks(Form.COLUMNS, x, dtype, power_of_2, data=data, scale_t=scale)
    else:
        _launch_blocks(Form.BLOCK, x, dtype, power_of_2, data=data, scale=scale)
    return data, scale


def quantize_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize x [..., M, K] with one scale [1] to data [..., M, K]; values saturate, NaN stays NaN."""
    data = x.new_empty(x.shape, dtype=dtype)
    _launch_tiles(SETTINGS["scale given"], x, dtype, False, data=data, given=scale)
    return data


def dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    """Dequantize contiguous data [..., M, K] to [..., M, K] in out_dtype.

    Blocks are 1×128, 128×1 (scales contiguous along K), 128×128, or the whole matrix: block_rows and block_cols are
    then at least M and K.
    """
    m, k = data.shape[-2:]
    k = k // 3 * 2 if data.dtype == torch.uint8 else k
    out = data.new_empty(*data.shape[:-1], k, dtype=out_dtype)
    settings = SETTINGS["dequantize"]
    constants = {
        "dtype": DTYPES[out_dtype], "format": DTYPES[data.dtype], **settings,
        "scale_rows": 0 if block_rows >= m and block_rows > 1 else block_rows,
        "scale_columns": 0 if block_cols >= k else block_cols,
    }  # fmt: skip
    arguments = (address_of(data), address_of(scale), address_of(out), _batch_stride(scale), *scale.stride()[-2:], m, k)
    blocks = _batches(data) * _ceil_div(m, 2 * settings["rows"] * settings["warps"]) * _ceil_div(k, SIDE)
    _launch("dequantize", constants, data, blocks, 32 * settings["warps"], 0, *arguments)
    return out


def rows_and_columns(
    x: Tensor, dtype: torch.dtype, power_of_2: bool, tiles: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize x [..., M, K] along its rows and along its columns.

    Args:
        tiles: int32 [P/128, 2] of groups of rows (`octile.ops.groups`), so that data_t is [K, P]; None: no groups.

    Returns:
        data [..., M, K] with its scale in 1×128 tiles, data_t [..., K, M] with its scale in 1×128 tiles along M.
    """
    data, scale = x.new_empty(x.shape, dtype=dtype), new_scale(x, 1, SIDE)
    data_t, scale_t = new_quantized_transposed(x, dtype, tiles)
    outs = {"data": data, "scale": scale, "data_t": data_t, "scale_t": scale_t}
    _launch_blocks(Form.BOTH, x, dtype, power_of_2, tiles=tiles, **outs)
    return data, scale, data_t, scale_t


def requantize(
    data: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    rows: Tensor | None = None,
    tiles: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Requantize data [..., M, K] in 1×128 tiles along its columns to data_t [..., K, M] and its scale.

    Args:
        scale: scales of 1×128 tiles, in the layout of `new_scale`.
        rows: int32 [R], contiguous: only these rows, in this order, so that data_t is [K, R]; None: all rows.
        tiles: tiles of groups of these rows, as in `rows_and_columns`.
        in_blocks: the result has 128×128 blocks instead of 1×128 tiles.
    """
    *batch, m, _ = data.shape
    like = data.new_empty(*batch, m if rows is None else len(rows), columns(data), dtype=torch.uint8)
    data_t, scale_t = new_quantized_transposed(like, dtype, tiles, in_blocks)
    if like.numel():
        outs = {"data_t": data_t, "scale" if in_blocks else "scale_t": scale_t}
        form = Form.TRANSPOSED_BLOCK if in_blocks else Form.TRANSPOSED_ONLY
        _launch_blocks(form, data, dtype, power_of_2, old_scale=scale, rows=rows, tiles=tiles, **outs)
    return data_t, scale_t


def quantize_and_transpose(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [..., M, K] in 128×128 blocks to data [..., M, K], its scale, and the transposed data [..., K, M]."""
    data, scale, data_t = x.new_empty(x.shape, dtype=dtype), new_scale(x, SIDE, SIDE), new_transposed(x, dtype)
    _launch_blocks(Form.WEIGHT, x, dtype, power_of_2, data=data, scale=scale, data_t=data_t)
    return data, scale, data_t


def quantize_transposed(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize x [..., M, K] in 128×128 blocks to the transposed data [..., K, M] and the scale of x."""
    data_t, scale = new_transposed(x, dtype), new_scale(x, SIDE, SIDE)
    _launch_blocks(Form.TRANSPOSED_BLOCK, x, dtype, power_of_2, scale=scale, data_t=data_t)
    return data_t, scale


def quantize_joined(
    weights: Sequence[Tensor], dtype: torch.dtype, power_of_2: bool, with_data: bool, with_transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `octile.ops.transpose.quantize_joined`: each matrix is stored in its part of them."""
    (joined,) = quantize_matrices([weights], dtype, power_of_2, with_data, with_transposed)
    return joined


def quantize_matrices(
    groups: Sequence[Sequence[Tensor]], dtype: torch.dtype, power_of_2: bool, with_data: bool, with_transposed: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Quantize many matrices in 128×128 blocks, CAPACITY of them by a launch.

    Args:
        groups: groups of matrices of one dtype. A group is one batch of matrices [..., M, K], or matrices [N_i, K] that
            are quantized as one of all their rows; each but the last one has a multiple of 128 rows.

    Returns:
        data, scale and data_t of each group; those of data and data_t that are not computed are [0, 0].
    """
    form = Form.WEIGHT if with_data and with_transposed else Form.BLOCK if with_data else Form.TRANSPOSED_BLOCK
    results, parts = [], []
    for matrices in groups:
        first = matrices[0]
        like = first.new_empty(()).expand(*first.shape[:-2], sum(x.shape[-2] for x in matrices), first.shape[-1])
        data = first.new_empty(like.shape if with_data else (0, 0), dtype=dtype)
        scale = new_scale(like, SIDE, SIDE)
        data_t = new_transposed(like, dtype) if with_transposed else first.new_empty(0, 0, dtype=dtype)
        begin = 0
        for x in matrices:
            m = x.shape[-2]
            outs: dict[str, Any] = {"scale": scale.narrow(-2, begin // SIDE, _ceil_div(m, SIDE))}
            outs |= {"data": data.narrow(-2, begin, m)} if with_data else {}
            outs |= {"data_t": data_t.narrow(-1, begin, m)} if with_transposed else {}
            parts.append(_Part(x, **outs))
            begin += m
        results.append((data, scale, data_t))
    _launch_matrices(form, parts, dtype, power_of_2)
    return results


def joined_rows_and_columns(
    parts: Sequence[Tensor], dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the results of `rows_and_columns` of the columns of matrices [M, K_i], next to each other.

    Args:
        parts: matrices of one dtype; each but the last one has a multiple of 128 columns.
    """
    first = parts[0]
    x = first.new_empty(()).expand(first.shape[0], sum(part.shape[1] for part in parts))
    data, scale = first.new_empty(x.shape, dtype=dtype), new_scale(x, 1, SIDE)
    data_t, scale_t = new_quantized_transposed(x, dtype, None)
    begins = accumulate((part.shape[1] for part in parts[:-1]), initial=0)
    rows = [_Part(part, data, scale, data_t, scale_t, k) for part, k in zip(parts, begins, strict=True)]
    _launch_matrices(Form.BOTH, rows, dtype, power_of_2, x.shape[1])
    return data, scale, data_t, scale_t


class _Part(NamedTuple):
    """Matrices x, where their results are stored, and of these the column of the first of x."""

    x: Tensor
    data: Tensor | None = None
    scale: Tensor | None = None
    data_t: Tensor | None = None
    scale_t: Tensor | None = None
    first_column: int = 0


def _launch_matrices(
    form: Form, parts: Sequence[_Part], dtype: torch.dtype, power_of_2: bool, all_columns: int | None = None
) -> None:
    """Launch matrices.cu for parts of one dtype; all_columns: of their results, if not the columns of each part."""
    x = parts[0].x
    constants = _constants(form, x.dtype, dtype, power_of_2) | {"capacity": CAPACITY}
    for at in range(0, len(parts), CAPACITY):
        rows, blocks = [], 0
        for part in parts[at : at + CAPACITY]:
            m, k = part.x.shape[-2:]
            k_tiles = _ceil_div(k, SIDE)
            addresses = map(address_of, (part.x, part.data, part.data_t, part.scale, part.scale_t))
            row_bytes_t = 0 if part.data_t is None else part.data_t.stride(-2)
            sizes = m, k, _inverse(constants["raster_height"] * k_tiles), row_bytes_t
            result_columns = all_columns or k, part.first_column // SIDE
            rows.append((*addresses, *(_strides(part.x) or ()), *sizes, blocks, *result_columns))
            blocks += _batches(part.x) * _ceil_div(m, SIDE) * k_tiles
        arguments = Structures(MATRIX, CAPACITY, tuple(rows)), len(rows)
        _launch("matrices", constants, x, blocks, BLOCK_THREADS, BLOCK_BYTES, *arguments)


def swiglu(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    weight: Tensor | None,
    saved_dtype: torch.dtype | None = None,
    saved_power_of_2: bool = False,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute SwiGLU of gate and up [M, H], times weight [M] if given, and quantize it in 1×128 tiles.

    Rows from the last of `ends` on, int32 [G], may be left out.

    Returns:
        data [M, H] and its scale; the quantized inputs [2, M, H] and their scale, or, if saved_dtype is None, data and
        its scale again.
    """
    data, scale = gate.new_empty(gate.shape, dtype=dtype), new_scale(gate, 1, SIDE)
    saved, saved_scale = data, scale
    if saved_dtype is not None:
        saved = gate.new_empty(2, *gate.shape, dtype=saved_dtype)
        saved_scale = new_scale(saved, 1, SIDE)
    m, h = gate.shape
    has_few_rows = saved_dtype is None or gate.dtype == torch.float32  # more rows of FP32 need too many registers
    settings = SETTINGS["swiglu" if has_few_rows else "swiglu, inputs saved"]
    constants = {
        "dtype": DTYPES[gate.dtype], "format": DTYPES[dtype], "power_of_2": power_of_2,
        "weighted": weight is not None, "has_end": ends is not None, "save_inputs": saved_dtype is not None,
        "saved_format": DTYPES[saved.dtype], "saved_power_of_2": saved_power_of_2, **settings,
        "programmatic": overlaps(),
    }  # fmt: skip
    end = None if ends is None else ends[-1:]
    arguments = (
        *map(address_of, (gate, up, weight, end, data, scale, saved, saved_scale)), gate.stride(0), up.stride(0),
        0 if weight is None else weight.stride(0), m, h, _inverse(_ceil_div(h, SIDE)),
    )  # fmt: skip
    blocks = _ceil_div(m, 2 * settings["rows"] * settings["warps"]) * _ceil_div(h, SIDE)
    _launch("swiglu", constants, gate, blocks, 32 * settings["warps"], 0, *arguments)
    return data, scale, saved, saved_scale


def swiglu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    power_of_2: bool,
    h_dtype: torch.dtype,
    h_power_of_2: bool,
    tiles: Tensor | None = None,
    h_in_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the results of `octile.ops.swiglu.swiglu_backward_quantize`; H is a multiple of 128."""
    m, h = gate.shape
    data = gate.new_empty((m, 2 * h), dtype=dtype)
    scale, (data_t, scale_t) = new_scale(data, 1, SIDE), new_quantized_transposed(data, dtype, tiles)
    h_t, h_scale_t = new_quantized_transposed(gate, h_dtype, tiles, h_in_blocks)
    weight_partials = gate.new_empty(0 if weight is None else m, h // SIDE, dtype=torch.float32)
    needs_registers = torch.float32 in (gate.dtype, dh.dtype) or dtype == torch.int8
    kind = "swiglu_backward, FP32 or INT8" if needs_registers else "swiglu_backward"
    constants = {
        "dtype": DTYPES[gate.dtype], "dh_dtype": DTYPES[dh.dtype], "format": DTYPES[dtype],
        "power_of_2": power_of_2, "h_format": DTYPES[h_dtype], "h_power_of_2": h_power_of_2,
        "weighted": weight is not None, "grouped": tiles is not None, "h_in_blocks": h_in_blocks,
        **SETTINGS[kind],
    }  # fmt: skip
    scale_strides = [stride for s in (gate_scale, up_scale) for stride in ((0, 0) if s is None else s.stride())]
    results = (data, scale, data_t, scale_t, h_t, h_scale_t, weight_partials)
    arguments = (
        *map(address_of, (dh, gate, up, gate_scale, up_scale, weight, *results)),
        dh.stride(0), gate.stride(0), up.stride(0), *scale_strides, 0 if weight is None else weight.stride(0), m, h,
        _inverse(constants["raster_height"] * (h // SIDE)), address_of(tiles), 0 if tiles is None else len(tiles),
    )  # fmt: skip
    blocks, shared_bytes = _ceil_div(h_t.shape[1], SIDE) * (h // SIDE), BLOCK_BYTES + BACKWARD_BYTES
    _launch("swiglu_backward", constants, gate, blocks, BLOCK_THREADS, shared_bytes, *arguments)
    return *results[:-1], weight_partials.sum(1)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, power_of_2: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize x [M, K] with a contiguous weight [K] and quantize the result in 1×128 tiles.

    Returns:
        data [M, K], its scale, rstd [M], and y: with `values` the result [M, K] in x's dtype, otherwise [0, K].
    """
    data, scale = x.new_empty(x.shape, dtype=dtype), new_scale(x, 1, SIDE)
    y = x.new_empty(len(x) if values else 0, x.shape[1])
    return data, scale, _normalize(x, weight, eps, data, scale, power_of_2, y if values else None), y


def rms_norm_high_precision(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize x [M, K] with a contiguous weight [K]: the result [M, K] in x's dtype, and rstd [M]."""
    y = x.new_empty(x.shape)
    return y, _normalize(x, weight, eps, None, None, False, y)


def _normalize(
    x: Tensor, weight: Tensor, eps: float, data: Tensor | None, scale: Tensor | None, power_of_2: bool, y: Tensor | None
) -> Tensor:
    """Normalize x into data and scale, y, or both; return rstd."""
    m, k = x.shape
    rstd = x.new_empty(m, dtype=torch.float32)
    needs_registers = y is not None or x.dtype == torch.float32
    kind = "rms_norm, FP32 or with y" if needs_registers else "rms_norm"
    (units, warps), settings = norm_parts(k), SETTINGS[kind]
    blocks = max(min(settings["blocks"], max(1, 28 // warps)), NORM_WARPS * settings["blocks"] // warps)
    rows, early_weight = 1 if m <= FEW_ROWS else settings["rows"], False
    if overlaps() and m <= FEW_ROWS and x.dtype != torch.float32:
        early_weight, blocks = True, min(blocks, 2)  # all rows at once, and registers for the weight
    constants = {
        "dtype": DTYPES[x.dtype], "weight_dtype": DTYPES[weight.dtype],
        "format": DTYPES[torch.float8_e4m3fn if data is None else data.dtype], "power_of_2": power_of_2,
        "quantizes": data is not None, "store_y": y is not None, "units": units, "warps": warps, "rows": rows,
        "blocks": blocks, "programmatic": overlaps(), "early_weight": early_weight,
    }  # fmt: skip
    arguments = (*map(address_of, (x, weight, data, scale, rstd, y)), float(eps), 1.0 / k, x.stride(0), m, k)
    resident = None if y is not None else constants["blocks"]
    _launch("rms_norm", constants, x, _ceil_div(m, rows), 32 * warps, NORM_BYTES, *arguments, resident=resident)
    return rstd


def norm_parts(k: int) -> tuple[int, int]:
    """Return the vectors of a row of k columns that a thread of rms_norm holds, and the warps that have a row."""
    units = min(NORM_UNITS, 1 << (_ceil_div(k, 32 * 8) - 1).bit_length())
    return units, _ceil_div(k, 32 * 8 * units)


def _launch_tiles(
    settings: Mapping[str, int],
    x: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    data: Tensor,
    scale: Tensor | None = None,
    given: Tensor | None = None,
) -> None:
    m, k = x.shape[-2:]
    constants = {
        "dtype": DTYPES[x.dtype], "format": DTYPES[dtype], "power_of_2": power_of_2, "scale_given": given is not None,
        **settings, "programmatic": overlaps(),
    }  # fmt: skip
    arguments = (*map(address_of, (x, data, scale, given)), *(_strides(x) or ()), m, k, _inverse(_ceil_div(k, SIDE)))
    warp_rows, warps = 2 * settings["rows"], settings["warps"]
    shared_bytes = warps * warp_rows * SIDE * 3 // 2 if dtype == torch.uint8 else 0
    blocks = _batches(x) * _ceil_div(m, warp_rows * warps) * _ceil_div(k, SIDE)
    _launch("tiles", constants, x, blocks, 32 * warps, shared_bytes, *arguments)


def _launch_blocks(
    form: Form,
    x: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    data: Tensor | None = None,
    scale: Tensor | None = None,
    data_t: Tensor | None = None,
    scale_t: Tensor | None = None,
    old_scale: Tensor | None = None,
    rows: Tensor | None = None,
    tiles: Tensor | None = None,
) -> None:
    m, k = x.shape[-2] if rows is None else len(rows), columns(x)
    constants = _constants(form, x.dtype, dtype, power_of_2, tiles is not None) | {"gather": rows is not None}
    strides = (n // 3 * 2 if x.dtype == torch.uint8 else n for n in _strides(x) or ())  # in elements, also of E5M6
    old_strides = (0, 0) if old_scale is None else (_batch_stride(old_scale), old_scale.stride(-1))
    arguments = (
        *map(address_of, (x, old_scale, rows, data, scale, data_t, scale_t)), *strides, *old_strides, m, k,
        _inverse(constants["raster_height"] * _ceil_div(k, SIDE)), address_of(tiles),
        0 if tiles is None else len(tiles), 0 if data_t is None else data_t.stride(-2),
    )  # fmt: skip
    m_tiles = _ceil_div(m, SIDE) if tiles is None else len(tiles)
    blocks = _batches(x) * m_tiles * _ceil_div(k, SIDE)
    _launch("blocks", constants, x, blocks, BLOCK_THREADS, BLOCK_BYTES, *arguments)


def _constants(
    form: Form, dtype: torch.dtype, out_dtype: torch.dtype, power_of_2: bool, grouped: bool = False
) -> dict[str, int | bool]:
    """Return the constants of `block.cuh`."""
    settings = SETTINGS[form.name.lower()]
    is_lean = dtype == torch.bfloat16 and out_dtype != torch.int8  # needs the fewest registers
    max_blocks = 4
    if dtype == torch.float32 or (form is Form.BOTH and not is_lean):
        max_blocks = 2
    elif dtype == torch.uint8:
        max_blocks = 3
    return {
        "form": form, "dtype": DTYPES[dtype], "format": DTYPES[out_dtype], "power_of_2": power_of_2,
        "grouped": grouped, **settings, "blocks": min(settings["blocks"], max_blocks),
    }  # fmt: skip


def _launch(
    name: str,
    constants: Mapping[str, int | bool],
    x: Tensor,
    blocks: int,
    threads: int,
    shared: int,
    *arguments: Any,
    resident: int | None = None,
) -> None:
    """Launch a kernel on x's GPU, with at most `resident` blocks per SM if that is given."""
    if resident is not None:
        blocks = min(blocks, resident * num_sms.multiprocessors(x.device))
    launch(name, constants, x.device, blocks, threads, shared, *arguments)


def _strides(x: Tensor) -> tuple[int, int] | None:
    """Return the strides of matrices and of rows in elements; None: the matrices are not one stride apart."""
    return _matrix_strides(x.shape, x.stride())


@functools.lru_cache(MAX_KEYS)
def _matrix_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int] | None:
    *batch_strides, row, _ = strides
    if any(batch_strides[i] != batch_strides[i + 1] * shape[i + 1] for i in range(len(batch_strides) - 1)):
        return None
    return (batch_strides[-1] if batch_strides else 0), row


def _is_aligned_along(scale: Tensor, dim: int) -> bool:
    """Return whether rows along this dimension begin at multiples of 16 bytes."""
    return (scale.data_ptr() | 4 * scale.stride(dim) | 4 * _batch_stride(scale)) % 16 == 0


def _batch_stride(scale: Tensor) -> int:
    return scale.stride(-3) if scale.dim() > 2 else 0


def _batches(x: Tensor) -> int:
    return x.shape[:-2].numel()


def columns(data: Tensor) -> int:
    """Return K of data [..., M, K], or of packed E5M6 [..., M, 3K/2]."""
    return data.shape[-1] // 3 * 2 if data.dtype == torch.uint8 else data.shape[-1]


def _inverse(n: int) -> int:
    """Return the factor by which `quotient` of tile.cuh divides by n."""
    return min(2**31 // n, 2**31 - 1)


def _ceil_div(n: int, unit: int) -> int:
    return -(-n // unit)
