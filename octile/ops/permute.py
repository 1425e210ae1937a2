"""The rows of tokens to their experts and back, each byte read once and written where it belongs.

    permute      a token's row, in 8 bits with its scales, to its K places among the rows sorted by expert
    unpermute    the K rows of a token, summed, to the token

Places are on the device, and every row is written by one program, so nothing waits for the host and nothing is added
in an order that could change. Each is the other's mirror image: a gradient goes to the experts by `permute`, and what
they give back is summed by `unpermute`. By which weights the results of a token are summed is not seen here: they
multiply what the experts' last product reads (`octile.ops.swiglu`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3: dispatch in FP8, combine in BF16.
Shapes: T tokens, D model, K chosen experts, R = T·K rows.
"""

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels.memory_layout import new_scale
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, check_scale
from octile.ops.transpose import FORMATS


@operator()
def permute(data: Tensor, scale: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Copies row t of a matrix in 1×128 tiles to the rows place[t] of another.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [T, D].
        scale: float32 [T, ⌈D/128⌉].
        place: int32 [T, K], each number from 0 to T·K − 1 once.

    Returns:
        data [T·K, D] and scale [T·K, ⌈D/128⌉], stored as those of a cast.

    Raises:
        TypeError: data, scale or place is of another dtype.
        ValueError: they are no matrices, or do not fit together.
    """
    _check_permute(data, scale, place)
    rows = place.flatten().argsort() // place.shape[1]  # which token's row lies there
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
    """The sum of add and the rows place[t] of y; in FP32, in this order and that of k.

    Args:
        y: [T·K, D], float32, bfloat16 or float16.
        place: int32 [T, K], as in `permute`.
        add: [T, D] in y's dtype; None: zeros.

    Returns:
        [T, D] in y's dtype.

    Raises:
        TypeError: y, place or add is of another dtype.
        ValueError: they do not fit together.
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
    if data.dtype not in map(DATA_DTYPES.get, FORMATS):
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2 or int8, not {data.dtype}")
    if data.dim() != 2:
        raise ValueError(f"data must be a matrix [T, D], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)
    _check_place(place, "data", data)
    if place.shape[0] != data.shape[0]:
        raise ValueError(f"place must have a row for each of the {data.shape[0]} rows of data, not {place.shape[0]}")


def _check_unpermute(y: Tensor, place: Tensor, add: Tensor | None) -> None:
    if y.dtype not in INPUT_DTYPES:
        raise TypeError(f"y must be float32, bfloat16 or float16, not {y.dtype}")
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
    if add.device != y.device:
        raise ValueError(f"y lies on {y.device} but add on {add.device}")


def _check_place(place: Tensor, name: str, t: Tensor) -> None:
    if place.dtype != torch.int32:
        raise TypeError(f"place must be int32, not {place.dtype}")
    if place.dim() != 2:
        raise ValueError(f"place must be [T, K], not {tuple(place.shape)}")
    if place.device != t.device:
        raise ValueError(f"{name} lies on {t.device} but place on {place.device}")
