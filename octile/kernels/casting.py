"""Which kernels cast on a GPU: Hopper's own where they take the matrices as they lie, Triton's elsewhere.

`octile doctor` shows the choice; `octile.kernels.cuda.quantize.launcher.serves` says the reason. Arguments are checked
already, and
are those of the operators of the same names, with dtypes in the place of formats.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.quantize import launcher

TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)


def quantize(
    x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor]:
    known = (TILE,) if dtype == torch.uint8 else (TILE, COLUMN_TILE, BLOCK)
    if (block_rows, block_cols) in known and not launcher.serves(x, out=dtype):
        return launcher.quantize(x, block_rows, block_cols, dtype, power_of_2)
    from octile.kernels.triton import quantize  # late, here and below: a machine without a GPU has no Triton

    return quantize.launch(x, block_rows, block_cols, dtype, power_of_2)


def quantize_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not launcher.serves(x):
        return launcher.quantize_with_scale(x, scale, dtype)
    from octile.kernels.triton import quantize

    return quantize.launch_with_scale(x, scale, dtype)


def dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    k = launcher.columns(data)
    known = (block_rows, block_cols) in (TILE, COLUMN_TILE, BLOCK) or (block_rows >= data.shape[-2] and block_cols >= k)
    if known and data.is_contiguous() and launcher.reads_scale(scale, block_cols) and not launcher.serves(data):
        return launcher.dequantize(data, scale, block_rows, block_cols, out_dtype)
    from octile.kernels.triton import quantize

    return quantize.launch_dequantize(data, scale, block_rows, block_cols, out_dtype)


def quantize_rows_and_columns(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launcher.serves(x):
        return launcher.rows_and_columns(x, dtype, power_of_2)
    from octile.kernels.triton import transpose

    return transpose.launch_rows_and_columns(x, dtype, power_of_2)


def requantize_transposed(
    data: Tensor, scale: Tensor, dtype: torch.dtype, power_of_2: bool, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    if launcher.reads_tile_scales(scale) and (rows is None or rows.is_contiguous()) and not launcher.serves(data):
        return launcher.requantize(data, scale, dtype, power_of_2, rows)
    from octile.kernels.triton import transpose

    return transpose.launch_requantize(data, scale, dtype, power_of_2, rows)


def quantize_and_transpose(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not launcher.serves(x):
        return launcher.quantize_and_transpose(x, dtype, power_of_2)
    from octile.kernels.triton import transpose

    return transpose.launch_block(x, dtype, power_of_2)


def swiglu_quantize(
    gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not launcher.serves(gate, up):
        return launcher.swiglu(gate, up, dtype, power_of_2, weight)[:2]
    from octile.kernels.triton import swiglu

    return swiglu.launch(gate, up, dtype, power_of_2, weight)


def swiglu_quantize_and_keep(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    kept_dtype: torch.dtype,
    kept_power_of_2: bool,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launcher.serves(gate, up):
        return launcher.swiglu(gate, up, dtype, power_of_2, weight, kept_dtype, kept_power_of_2)
    from octile.kernels.triton import swiglu

    return swiglu.launch_and_keep(gate, up, dtype, power_of_2, kept_dtype, kept_power_of_2, weight)


def swiglu_backward_quantize(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (dh, gate, up, gate_scale, up_scale, weight, dtype, power_of_2, h_dtype, h_power_of_2)
    if not launcher.serves(dh, gate, up):
        return launcher.swiglu_backward(*arguments)
    from octile.kernels.triton import swiglu

    return swiglu.launch_backward(*arguments)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, power_of_2: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.shape[1] <= launcher.MOST_COLUMNS and launcher.is_vector(weight) and not launcher.serves(x):
        return launcher.rms_norm(x, weight, eps, dtype, power_of_2, values)
    from octile.kernels.triton import norm

    return norm.launch(x, weight, eps, dtype, power_of_2, values)
