"""Permutation of the rows of tokens to the order of their experts, and its inverse.

    permute               copies the quantized row of a token to its K rows among those sorted by expert
    unpermute             sums the K rows of a token, times their weights if they have some
    unpermute_backward    the gradients of rows and weights

The row indices are on the device, so nothing waits for the host. Each row is written by one program, so the order of
sums is fixed. Without weights each of the first two is the gradient of the other: `permute` takes gradients to the
experts, and `unpermute` sums what they return. Where rows are quantized, the gate's weights are not applied here but to
the input of the experts' last GEMM (`octile.ops.swiglu`).

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
def unpermute(y: Tensor, place: Tensor, add: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Sum the rows place[t] of y for each token t, in FP32: add first, then the rows in the order of place.

    Args:
        y: [T·K, D], float32, bfloat16 or float16.
        place: int32 [T, K], as in `permute`.
        add: [T, D] in y's dtype, to be added, such as the shared expert's output; None: zeros.
        weight: float32 [T, K], by which the rows are multiplied; None: 1.

    Returns:
        sums [T, D] in y's dtype, rounded once.

    Raises:
        TypeError: y, place, add or weight has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_unpermute(y, place, add, weight)
    total_TD = y.new_zeros(place.shape[0], y.shape[1], dtype=torch.float32)
    if add is not None:
        total_TD.copy_(add)
    for k, place_T in enumerate(place.unbind(1)):
        row_TD = y.index_select(0, place_T).float()
        total_TD += row_TD if weight is None else row_TD * weight[:, k, None]
    return total_TD.to(y.dtype)


@unpermute.register_fake
def _(y, place, add=None, weight=None):
    return y.new_empty(place.shape[0], y.shape[1])


@unpermute.register_kernel("cuda")
def _(y, place, add=None, weight=None):
    from octile.kernels.triton import permute as kernel

    _check_unpermute(y, place, add, weight)
    return kernel.launch_back(y, place, add, weight)


@operator()
def unpermute_backward(dsum: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the rows and of the weights of `unpermute`, in FP32. That of add is dsum itself.

    Args:
        dsum: [T, D], float32, bfloat16 or float16, the gradient of the sums.
        y, place, weight: as in `unpermute`.

    Returns:
        the gradient of y, [T·K, D] in y's dtype, rounded once; that of weight, float32 [T, K], each a sum over D in
        unspecified order.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_unpermute_backward(dsum, y, place, weight)
    dy, dweight, dsum = y.new_empty(y.shape), weight.new_empty(weight.shape), dsum.float()
    for k, place_T in enumerate(place.unbind(1)):
        dy.index_copy_(0, place_T.long(), (dsum * weight[:, k, None]).to(y.dtype))
        dweight[:, k] = (dsum * y.index_select(0, place_T).float()).sum(1)
    return dy, dweight


@unpermute_backward.register_fake
def _(dsum, y, place, weight):
    return y.new_empty(y.shape), weight.new_empty(weight.shape)


@unpermute_backward.register_kernel("cuda")
def _(dsum, y, place, weight):
    from octile.kernels.triton import permute as kernel

    _check_unpermute_backward(dsum, y, place, weight)
    return kernel.launch_back_backward(dsum, y, place, weight)


def _check_permute(data: Tensor, scale: Tensor, place: Tensor) -> None:
    if data.dtype not in map(STORAGE_DTYPES.get, GEMM_FORMATS):
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2 or int8, not {data.dtype}")
    if data.dim() != 2:
        raise ValueError(f"data must be a matrix [T, D], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)
    _check_place(place, "data", data)
    if place.shape[0] != data.shape[0]:
        raise ValueError(f"place must have a row for each of the {data.shape[0]} rows of data, not {place.shape[0]}")


def _check_unpermute_backward(dsum: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> None:
    _check_unpermute(y, place, None, weight)
    check_input_dtype("dsum", dsum)
    _check_sums("dsum", dsum, y, place)


def _check_unpermute(y: Tensor, place: Tensor, add: Tensor | None, weight: Tensor | None) -> None:
    check_input_dtype("y", y)
    if y.dim() != 2:
        raise ValueError(f"y must be a matrix [T·K, D], not {tuple(y.shape)}")
    _check_place(place, "y", y)
    if y.shape[0] != place.shape[0] * place.shape[1]:
        raise ValueError(f"y must have a row for each of the {tuple(place.shape)} places, not {y.shape[0]} rows")
    if weight is not None:
        if weight.dtype != torch.float32:
            raise TypeError(f"weight must be float32, not {weight.dtype}")
        if weight.shape != place.shape:
            raise ValueError(f"weight must be {tuple(place.shape)} as place, not {tuple(weight.shape)}")
        check_device("y", y, "weight", weight)
    if add is not None:
        if add.dtype != y.dtype:
            raise TypeError(f"add must be {y.dtype} as y, not {add.dtype}")
        _check_sums("add", add, y, place)


def _check_sums(name: str, sums: Tensor, y: Tensor, place: Tensor) -> None:
    if sums.shape != (place.shape[0], y.shape[1]):
        raise ValueError(f"{name} must be {(place.shape[0], y.shape[1])}, not {tuple(sums.shape)}")
    check_device("y", y, name, sums)


def _check_place(place: Tensor, name: str, t: Tensor) -> None:
    if place.dtype != torch.int32:
        raise TypeError(f"place must be int32, not {place.dtype}")
    if place.dim() != 2:
        raise ValueError(f"place must be [T, K], not {tuple(place.shape)}")
    check_device(name, t, "place", place)
