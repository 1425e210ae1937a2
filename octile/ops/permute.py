"""Permutation of the rows of tokens to the order of their experts, and its inverse.

    permute      copies the quantized row of a token to its K rows among those sorted by expert
    unpermute    sums the K rows of a token

The row indices are on the device, so nothing waits for the host. Each row is written by one program, so the order of
sums is fixed. Each operator is the gradient of the other: `permute` takes gradients to the experts, and `unpermute`
sums what they return. The gate's weights are not applied here but to the input of the experts' last GEMM
(`octile.ops.swiglu`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3: dispatch in FP8, combine in BF16.
Shapes: T tokens, D model width, K experts per token, R = T·K rows.
"""

import torch
from torch import Tensor

from octile.formats import GEMM_FORMATS, STORAGE_DTYPES, TILE
from octile.kernels.memory_layout import new_scale
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, check_scale


@operator()
def permute(data: Tensor, scale: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Copy row t of a matrix in 1×128 tiles to the rows place[t] of the result.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [T, D].
        scale: float32 [T, ⌈D/128⌉].
        place: int32 [T, K], row indices, a permutation of 0 … T·K − 1.

    Returns:
        data [T·K, D] and scale [T·K, ⌈D/128⌉], laid out as `quantize` returns them.

    Raises:
        TypeError: data, scale or place has another dtype.
        ValueError: data or place is not a matrix, or shapes or devices do not fit together.
    """
    _check_permute(data, scale, place)
    rows = place.flatten().argsort() // place.shape[1]  # the token of each row of the result
    moved = data.view(torch.uint8).index_select(0, rows).view(data.dtype)
    return moved, new_scale(moved, *TILE).copy_(scale.index_select(0, rows))


@permute.register_fake
def _(data, scale, place):
    moved = data.new_empty(place.shape[0] * place.shape[1], data.shape[1])
    return moved, new_scale(moved, *TILE)


@permute.register_kernel("cuda")
def _(data, scale, place):
    from octile.kernels.triton import permute as kernel  # late: a machine without a GPU has no Triton

    _check_permute(data, scale, place)
    return kernel.launch(data, scale, place)


@operator()
def unpermute(y: Tensor, place: Tensor, add: Tensor | None = None) -> Tensor:
    """Sum the rows place[t] of y for each token t, in FP32: add first, then the rows in the order of place.

    Args:
        y: [T·K, D], float32, bfloat16 or float16.
        place: int32 [T, K], as in `permute`.
        add: [T, D] in y's dtype, to be added, such as the shared expert's output; None: zeros.

    Returns:
        sums [T, D] in y's dtype, rounded once.

    Raises:
        TypeError: y, place or add has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_unpermute(y, place, add)
    total_TD = y.new_zeros(place.shape[0], y.shape[1], dtype=torch.float32)
    if add is not None:
        total_TD.copy_(add)
    for place_T in place.unbind(1):
        total_TD += y.index_select(0, place_T).float()
    return total_TD.to(y.dtype)


@unpermute.register_fake
def _(y, place, add=None):
    return y.new_empty(place.shape[0], y.shape[1])


@unpermute.register_kernel("cuda")
def _(y, place, add=None):
    from octile.kernels.triton import permute as kernel

    _check_unpermute(y, place, add)
    return kernel.launch_back(y, place, add)


def _check_permute(data: Tensor, scale: Tensor, place: Tensor) -> None:
    if data.dtype not in map(STORAGE_DTYPES.get, GEMM_FORMATS):
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2 or int8, not {data.dtype}")
    if data.dim() != 2:
        raise ValueError(f"data must be a matrix [T, D], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)
    _check_place(place, "data", data)
    if place.shape[0] != data.shape[0]:
        raise ValueError(f"place must have a row for each of the {data.shape[0]} rows of data, not {place.shape[0]}")


def _check_unpermute(y: Tensor, place: Tensor, add: Tensor | None) -> None:
    check_input_dtype("y", y)
    if y.dim() != 2:
        raise ValueError(f"y must be a matrix [T·K, D], not {tuple(y.shape)}")
    _check_place(place, "y", y)
    if y.shape[0] != place.shape[0] * place.shape[1]:
        raise ValueError(f"y must have a row for each of the {tuple(place.shape)} places, not {y.shape[0]} rows")
    if add is None:
        return
    if add.dtype != y.dtype:
        raise TypeError(f"add must be {y.dtype} as y, not {add.dtype}")
    if add.shape != (place.shape[0], y.shape[1]):
        raise ValueError(f"add must be {(place.shape[0], y.shape[1])}, not {tuple(add.shape)}")
    check_device("y", y, "add", add)


def _check_place(place: Tensor, name: str, t: Tensor) -> None:
    if place.dtype != torch.int32:
        raise TypeError(f"place must be int32, not {place.dtype}")
    if place.dim() != 2:
        raise ValueError(f"place must be [T, K], not {tuple(place.shape)}")
    check_device(name, t, "place", place)
