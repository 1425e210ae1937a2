"""Quantization that also transposes a matrix, in one read of it.

Hopper's FP8 tensor cores need both operands contiguous along the summed dimension. A training step sums over both
dimensions of each matrix: fprop (y = x · wᵀ) and wgrad (dw = dyᵀ · x) read x along its channels and along its tokens.
fprop and dgrad (dx = dy · w) read w along K and along N. So a matrix is needed quantized along its rows and along its
columns, and one kernel that holds it in registers writes both.

    quantize_rows_and_columns   the gradient of an output: 1×128 for dgrad, transposed 1×128 for wgrad
    quantize_joined_rows_and_columns  the same of the gradients of outputs whose layers read one input, as one matrix
    requantize_transposed       the input of a layer, saved in FP8 for backward: 1×128 → transposed 1×128
    quantize_and_transpose      a weight: 128×128, and the same data transposed
    quantize_transposed         a weight for dgrad alone, in the backward pass
    transpose_encoded           a weight that is quantized already, in the backward pass
    quantize_joined             weights that multiply one input, as one matrix of their rows
    quantize_matrices           many weights, by one launch

The rows of a mixture's experts come with `tiles`, which say which rows each 128×1 tile of the transposed result holds:
rows of one expert (`octile.ops.groups`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2 and §3.5.2, which asks for this transposition in hardware.
Shapes: [..., M, K] → [..., K, M], with tiles [..., K, P]. The rows of a transposed matrix are padded in memory to a
multiple of 16 bytes.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, GEMM_FORMATS, STORAGE_DTYPES, TILE
from octile.kernels import backends, cpu
from octile.kernels.memory_layout import new_quantized_transposed, new_scale, new_transposed
from octile.ops.groups import check_tiles, take_tiles
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, check_scale, columns, dequantize, quantize


@operator()
def quantize_rows_and_columns(
    x: Tensor, fmt: str, power_of_2: bool, tiles: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize matrices in 1×128 tiles, and in 128×1 tiles with the result transposed.

    Args:
        x: [..., M, K], float32, bfloat16 or float16, any M and K.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: whether to round each scale up to a power of two.
        tiles: int32 [P/128, 2], of groups of rows of one matrix (`align_groups`); None: rows 0 … 127, 128 … 255, ….

    Returns:
        data [..., M, K] and scale [..., M, ⌈K/128⌉], bit for bit `quantize(x, 1, 128, …)`. Then data_t [..., K, M] and
        scale_t [..., K, ⌈M/128⌉], bit for bit the transposes of `quantize(x, 128, 1, …)`, or with tiles [K, P] and
        [K, P/128], those of `quantize(take_tiles(x, tiles), 128, 1, …)`.

    Raises:
        TypeError: x or tiles has another dtype.
        ValueError: x has fewer than two dimensions, fmt is another one, or tiles does not fit.
    """
    _check(x, fmt)
    check_tiles("x", x, tiles)
    data, scale = quantize(x, *TILE, fmt, power_of_2)
    data_t, scale_t = quantize_columns(x, fmt, power_of_2, tiles)
    return data, scale, data_t, scale_t


def quantize_columns(
    x: Tensor, fmt: str, power_of_2: bool, tiles: Tensor | None = None, in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """The reference of transposed results: `quantize(x, 128, 1, …)` transposed, [..., K, M] and [..., K, ⌈M/128⌉]."""
    x = x if tiles is None else take_tiles(x, tiles)
    data, scale = quantize(x, *(BLOCK if in_blocks else COLUMN_TILE), fmt, power_of_2)
    return new_transposed(x, data.dtype).copy_(data.mT), scale.mT


@quantize_rows_and_columns.register_fake
def _(x, fmt, power_of_2, tiles=None):
    dtype = STORAGE_DTYPES[fmt]
    return x.new_empty(x.shape, dtype=dtype), new_scale(x, *TILE), *new_quantized_transposed(x, dtype, tiles)


@quantize_rows_and_columns.register_kernel("cpu")
def _(x, fmt, power_of_2, tiles=None):
    if not cpu.can_quantize(fmt) or x.dim() != 2:
        return quantize_rows_and_columns.reference(x, fmt, power_of_2, tiles)
    _check(x, fmt)
    check_tiles("x", x, tiles)
    return *cpu.quantize(x, *TILE, power_of_2), *cpu.quantize_columns(x, power_of_2, tiles)


@quantize_rows_and_columns.register_kernel("cuda")
def _(x, fmt, power_of_2, tiles=None):
    _check(x, fmt)
    check_tiles("x", x, tiles)
    return backends.run("quantize_rows_and_columns", x, STORAGE_DTYPES[fmt], power_of_2, tiles)


@operator()
def quantize_joined_rows_and_columns(
    parts: list[Tensor], fmt: str, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize matrices in 1×128 and 128×1 tiles as one matrix of all their columns, which no kernel copies before.

    Args:
        parts: [M, K_i], float32, bfloat16 or float16, all of one dtype. K_i is a multiple of 128, except for the last
            one, so that no tile has columns of two matrices.
        fmt, power_of_2: as in `quantize_rows_and_columns`.

    Returns:
        data, scale, data_t and scale_t, bit for bit those of `quantize_rows_and_columns(torch.cat(parts, 1), …)`.

    Raises:
        TypeError: a matrix has another dtype, or they differ in dtype.
        ValueError: there are none, their shapes or devices do not fit, or fmt is another one.
    """
    _check_joined("parts", parts, 1, fmt)
    return quantize_rows_and_columns.reference(torch.cat(parts, dim=1), fmt, power_of_2)


@quantize_joined_rows_and_columns.register_fake
def _(parts, fmt, power_of_2):
    x, dtype = _joined_columns(parts), STORAGE_DTYPES[fmt]
    return x.new_empty(x.shape, dtype=dtype), new_scale(x, *TILE), *new_quantized_transposed(x, dtype, None)


@quantize_joined_rows_and_columns.register_kernel("cpu")
def _(parts, fmt, power_of_2):
    _check_joined("parts", parts, 1, fmt)
    return quantize_rows_and_columns(torch.cat(parts, dim=1), fmt, power_of_2)


@quantize_joined_rows_and_columns.register_kernel("cuda")
def _(parts, fmt, power_of_2):
    _check_joined("parts", parts, 1, fmt)
    return backends.run("quantize_joined_rows_and_columns", parts, STORAGE_DTYPES[fmt], power_of_2)


def _joined_columns(parts: Sequence[Tensor]) -> Tensor:
    """An uninitialized matrix of the size of all columns."""
    return parts[0].new_empty(parts[0].shape[0], sum(part.shape[1] for part in parts))


@operator()
def requantize_transposed(
    data: Tensor,
    scale: Tensor,
    power_of_2: bool,
    fmt: str | None = None,
    rows: Tensor | None = None,
    tiles: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Requantize matrices in 1×128 tiles to their transposes in 1×128 tiles, from the values in FP32.

    With power-of-two scales before and after, requantizing only shifts: bits are lost only where a value falls below
    the normal range of its new tile, or where the new format has fewer mantissa bits.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K], or uint8 [..., M, 3K/2] for E5M6.
        scale: float32 [..., M, ⌈K/128⌉].
        power_of_2: whether to round each new scale up to a power of two.
        fmt: new format, "e4m3", "e5m2" or "int8"; None: the format of data, which must then be one of these.
        rows: int32 [R], indices of rows of one matrix [M, K], in their new order; None: all rows.
        tiles: int32 [P/128, 2], of groups of these R rows (`align_groups`); None: rows 0 … 127, 128 … 255, ….
        in_blocks: whether the result is in 128×128 blocks instead, with a scale_t [..., ⌈K/128⌉, ⌈M/128⌉].

    Returns:
        data_t [..., K, M] in the format's dtype and scale_t [..., K, ⌈M/128⌉]: bit for bit the transposes of
        `quantize(dequantize(data, scale, 1, 128, torch.float32)[rows], 128, 1, …)`. With rows, R takes M's place, and
        with tiles P, as in `quantize_rows_and_columns`.

    Raises:
        TypeError: data, scale, rows or tiles has another dtype.
        ValueError: data has fewer than two dimensions, scale, rows or tiles does not fit it, or fmt is another one.
    """
    _check_requantize(data, scale, fmt, rows, tiles)
    values = dequantize(data, scale, *TILE, torch.float32)
    values = values if rows is None else values.index_select(0, rows)
    return quantize_columns(values, fmt or _format(data), power_of_2, tiles, in_blocks)


@requantize_transposed.register_fake
def _(data, scale, power_of_2, fmt=None, rows=None, tiles=None, in_blocks=False):
    *batch, m, _ = data.shape
    like = data.new_empty(*batch, m if rows is None else rows.shape[0], columns(data), dtype=torch.uint8)
    return new_quantized_transposed(like, STORAGE_DTYPES[fmt or _format(data)], tiles, in_blocks)


@requantize_transposed.register_kernel("cpu")
def _(data, scale, power_of_2, fmt=None, rows=None, tiles=None, in_blocks=False):
    if in_blocks or data.dim() != 2 or not cpu.can_quantize(fmt or "e4m3", data):
        return requantize_transposed.reference(data, scale, power_of_2, fmt, rows, tiles, in_blocks)
    _check_requantize(data, scale, fmt, rows, tiles)
    return cpu.requantize_transposed(data, scale, power_of_2, rows, tiles)


@requantize_transposed.register_kernel("cuda")
def _(data, scale, power_of_2, fmt=None, rows=None, tiles=None, in_blocks=False):
    _check_requantize(data, scale, fmt, rows, tiles)
    dtype = STORAGE_DTYPES[fmt or _format(data)]
    return backends.run("requantize_transposed", data, scale, dtype, power_of_2, rows, tiles, in_blocks)


@operator()
def quantize_and_transpose(x: Tensor, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize matrices in 128×128 blocks, and return the data transposed as well.

    Args:
        x: [..., M, K], float32, bfloat16 or float16, any M and K.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: whether to round each scale up to a power of two.

    Returns:
        data [..., M, K] and scale [..., ⌈M/128⌉, ⌈K/128⌉], bit for bit `quantize(x, 128, 128, …)`, and data_t
        [..., K, M], the transpose of data, whose scale is `scale.mT`.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has fewer than two dimensions, or fmt is another one.
    """
    _check(x, fmt)
    data, scale = quantize(x, *BLOCK, fmt, power_of_2)
    return data, scale, new_transposed(x, data.dtype).copy_(data.mT)


@quantize_and_transpose.register_fake
def _(x, fmt, power_of_2):
    dtype = STORAGE_DTYPES[fmt]
    return x.new_empty(x.shape, dtype=dtype), new_scale(x, *BLOCK), new_transposed(x, dtype)


@quantize_and_transpose.register_kernel("cuda")
def _(x, fmt, power_of_2):
    _check(x, fmt)
    return backends.run("quantize_and_transpose", x, STORAGE_DTYPES[fmt], power_of_2)


@operator()
def quantize_transposed(x: Tensor, fmt: str, power_of_2: bool, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize matrices in 128×128 blocks, and return the data transposed only.

    Args:
        x, fmt, power_of_2: as in `quantize_and_transpose`.
        dy: the gradient that will be multiplied. It is not read. A compiler computes in the forward pass what depends
            on no gradient, and saves it for backward.

    Returns:
        data_t [..., K, M] and the scale [..., ⌈M/128⌉, ⌈K/128⌉] of `quantize_and_transpose`.

    Raises:
        TypeError, ValueError: as in `quantize_and_transpose`.
    """
    _, scale, data_t = quantize_and_transpose.reference(x, fmt, power_of_2)
    return data_t, scale


@quantize_transposed.register_fake
def _(x, fmt, power_of_2, dy):
    return new_transposed(x, STORAGE_DTYPES[fmt]), new_scale(x, *BLOCK)


@quantize_transposed.register_kernel("cuda")
def _(x, fmt, power_of_2, dy):
    _check(x, fmt)
    return backends.run("quantize_transposed", x, STORAGE_DTYPES[fmt], power_of_2)


@operator()
def quantize_joined(
    weights: list[Tensor],
    fmt: str,
    power_of_2: bool,
    with_data: bool,
    with_transposed: bool,
    dy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize matrices in 128×128 blocks as one matrix of all their rows, N, which no kernel copies before.

    Args:
        weights: [N_i, K], float32, bfloat16 or float16, all of one dtype. N_i is a multiple of 128, except for the
            last one, so that no block has rows of two matrices.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: whether to round each scale up to a power of two.
        with_data, with_transposed: which of data and data_t to compute; the other one is [0, 0].
        dy: as in `quantize_transposed`.

    Returns:
        data [N, K], scale [⌈N/128⌉, ⌈K/128⌉] and data_t [K, N], bit for bit `quantize_and_transpose(cat(weights), …)`.

    Raises:
        TypeError: a matrix has another dtype, or they differ in dtype.
        ValueError: there are none, their shapes or devices do not fit, or fmt is another one.
    """
    _check_joined("weights", weights, 0, fmt)
    x = torch.cat(weights)
    data, scale = quantize(x, *BLOCK, fmt, power_of_2)
    data_t = new_transposed(x, data.dtype).copy_(data.mT) if with_transposed else data.new_empty(0, 0)
    return data if with_data else data.new_empty(0, 0), scale, data_t


@quantize_joined.register_fake
def _(weights, fmt, power_of_2, with_data, with_transposed, dy=None):
    dtype, first = STORAGE_DTYPES[fmt], weights[0]
    x = first.new_empty(sum(w.shape[0] for w in weights), first.shape[1])
    data = x.new_empty(x.shape if with_data else (0, 0), dtype=dtype)
    return data, new_scale(x, *BLOCK), new_transposed(x, dtype) if with_transposed else x.new_empty(0, 0, dtype=dtype)


@quantize_joined.register_kernel("cuda")
def _(weights, fmt, power_of_2, with_data, with_transposed, dy=None):
    _check_joined("weights", weights, 0, fmt)
    return backends.run("quantize_joined", weights, STORAGE_DTYPES[fmt], power_of_2, with_data, with_transposed)


@operator()
def quantize_matrices(
    weights: list[Tensor], sizes: list[int], fmt: str, power_of_2: bool, with_transposed: bool
) -> list[Tensor]:
    """Quantize many matrices in 128×128 blocks, on a GPU by as few launches as possible.

    Args:
        weights: [..., M, K], float32, bfloat16 or float16, all of one dtype.
        sizes: the number of weights in each group, in their order. The weights of a group are quantized as one matrix;
            several of them are [N_i, K] as in `quantize_joined`.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: whether to round each scale up to a power of two.
        with_transposed: whether to compute data_t; it is [0, 0] otherwise.

    Returns:
        data [..., M, K], scale [..., ⌈M/128⌉, ⌈K/128⌉] and data_t [..., K, M] of the first group, then of the others,
        bit for bit those of `quantize_and_transpose` or `quantize_joined`.

    Raises:
        TypeError: a matrix has another dtype, or they differ in dtype.
        ValueError: there are none, their shapes, devices or sizes do not fit, or fmt is another one.
    """
    _check_matrices(weights, sizes, fmt)
    results: list[Tensor] = []
    for group in _groups(weights, sizes):
        if len(group) > 1:
            results += quantize_joined.reference(group, fmt, power_of_2, True, with_transposed)
        else:
            data, scale, data_t = quantize_and_transpose.reference(group[0], fmt, power_of_2)
            results += data, scale, data_t if with_transposed else data.new_empty(0, 0)
    return results


@quantize_matrices.register_fake
def _(weights, sizes, fmt, power_of_2, with_transposed):
    dtype = STORAGE_DTYPES[fmt]
    results: list[Tensor] = []
    for first, *others in _groups(weights, sizes):
        m = sum(w.shape[-2] for w in (first, *others))
        x = first.new_empty(*first.shape[:-2], m, first.shape[-1])
        data_t = new_transposed(x, dtype) if with_transposed else x.new_empty(0, 0, dtype=dtype)
        results += x.new_empty(x.shape, dtype=dtype), new_scale(x, *BLOCK), data_t
    return results


@quantize_matrices.register_kernel("cuda")
def _(weights, sizes, fmt, power_of_2, with_transposed):
    _check_matrices(weights, sizes, fmt)
    settings = STORAGE_DTYPES[fmt], power_of_2, True, with_transposed
    return [part for group in backends.run("quantize_matrices", _groups(weights, sizes), *settings) for part in group]


def _groups(weights: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    ends = accumulate(sizes)
    return [weights[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@operator()
def transpose_encoded(data: Tensor, dy: Tensor | None = None) -> Tensor:
    """Copy encoded values transposed, as dgrad's GEMM reads a weight that was quantized in 128×128 blocks.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K], any strides.
        dy: as in `quantize_transposed`.

    Returns:
        data_t [..., K, M], whose scale is that of data transposed.

    Raises:
        TypeError: data has another dtype.
        ValueError: data has fewer than two dimensions.
    """
    _check_encoded(data)
    return new_transposed(data, data.dtype).copy_(data.mT)


@transpose_encoded.register_fake
def _(data, dy=None):
    return new_transposed(data, data.dtype)


@transpose_encoded.register_kernel("cuda")
def _(data, dy=None):
    from octile.kernels.triton import transpose as kernel  # late: a machine without a GPU has no Triton

    _check_encoded(data)
    return kernel.launch_encoded(data)


def _check_encoded(data: Tensor) -> None:
    dtypes = [STORAGE_DTYPES[fmt] for fmt in GEMM_FORMATS]
    if data.dtype not in dtypes:
        raise TypeError(f"data must be one of {', '.join(map(str, dtypes))}, not {data.dtype}")
    if data.dim() < 2:
        raise ValueError(f"data must be a matrix [..., M, K], not {tuple(data.shape)}")


def _check(x: Tensor, fmt: str) -> None:
    check_input_dtype("x", x)
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix [..., M, K], not {tuple(x.shape)}")
    if fmt not in GEMM_FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8' for a transposed result, not {fmt!r}")


def why_not_join(name: str, matrices: Sequence[Tensor], dim: int) -> str | None:
    """Return why matrices cannot be quantized as one, tile for tile as each of them alone; None: they can.

    Args:
        name: name of the matrices, in the reason.
        matrices: one below the other (dim 0), or next to each other (dim 1).
    """
    along, across = (("rows", "K"), ("columns", "rows"))[dim]
    first = matrices[0]
    for i, x in enumerate(matrices):
        if x.dim() != 2 or x.shape[1 - dim] != first.shape[1 - dim]:
            return f"{name}[{i}] must be a matrix with the {across} of {name}[0], not {tuple(x.shape)}"
        if i + 1 < len(matrices) and x.shape[dim] % BLOCK[dim]:
            return f"{name}[{i}] must have a multiple of {BLOCK[dim]} {along}, since others follow, not {x.shape[dim]}"
    return None


def _check_joined(name: str, matrices: Sequence[Tensor], dim: int, fmt: str) -> None:
    if not matrices:
        raise ValueError(f"{name} must have at least one matrix")
    _check_alike(name, matrices, fmt)
    if (reason := why_not_join(name, matrices, dim)) is not None:
        raise ValueError(reason)


def _check_alike(name: str, matrices: Sequence[Tensor], fmt: str) -> None:
    first = matrices[0]
    for i, x in enumerate(matrices):
        _check(x, fmt)
        if x.dtype != first.dtype:
            raise TypeError(f"{name}[{i}] must be {first.dtype} as {name}[0], not {x.dtype}")
        check_device(f"{name}[0]", first, f"{name}[{i}]", x)


def _check_matrices(weights: Sequence[Tensor], sizes: Sequence[int], fmt: str) -> None:
    if not weights or sum(sizes) != len(weights) or min(sizes) < 1:
        raise ValueError(
            f"sizes must be positive numbers whose sum is the number of weights, {len(weights)}, not {list(sizes)}"
        )
    _check_alike("weights", weights, fmt)
    for group in _groups(weights, sizes):
        if len(group) > 1 and (reason := why_not_join("weights", group, 0)) is not None:
            raise ValueError(reason)


def _check_requantize(data: Tensor, scale: Tensor, fmt: str | None, rows: Tensor | None, tiles: Tensor | None) -> None:
    if data.dtype not in STORAGE_DTYPES.values():
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2, int8 or uint8 (E5M6), not {data.dtype}")
    if data.dim() < 2:
        raise ValueError(f"data must be a matrix [..., M, K], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)
    if (fmt or _format(data)) not in GEMM_FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8' for a transposed result, not {fmt!r}")
    check_tiles("data", data, tiles)
    if rows is None:
        return
    if rows.dtype != torch.int32:
        raise TypeError(f"rows must be int32, not {rows.dtype}")
    if rows.dim() != 1 or data.dim() != 2:
        raise ValueError(f"rows must be [R] for a matrix [M, K], not {tuple(rows.shape)} for {tuple(data.shape)}")
    check_device("data", data, "rows", rows)


def _format(data: Tensor) -> str:
    """The name of data's format."""
    return next(fmt for fmt, dtype in STORAGE_DTYPES.items() if dtype == data.dtype)
