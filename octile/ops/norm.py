"""RMSNorm whose result is cast as it is made: y = x · rstd · weight, rstd = 1 / √(mean(x²) + eps).

The products that follow a norm read its result in 8 bits, so it is not written in 16 first. The backward pass of the
norm needs x and rstd, and no y.

The functions are torch's in FP32, rounded once, to the quantised number. In which order the squares are added is not
part of the specification, so rstd is within 2⁻²⁰ of the value here, relatively; everything after it is bit for bit
what the reference makes of that rstd.

Source: Zhang and Sennrich (arXiv 1910.07467).  Shapes: x [M, K], weight [K], rstd [M].
"""

import torch
from torch import Tensor

from octile.kernels.storage import new_scale
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, quantize
from octile.ops.transpose import FORMATS, TILE

LONGEST_ROW = 32768  # what one program of a GPU holds


@operator()
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, fmt: str, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of each row in 1×128 tiles, and its rstd for the backward pass.

    Args:
        x: [M, K], float32, bfloat16 or float16, K at most 32768.
        weight: [K], float32, bfloat16 or float16.
        eps: added to the mean of the squares.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: round each scale up to a power of two.

    Returns:
        data [M, K] and scale [M, ⌈K/128⌉], as `quantize(y, 1, 128, …)`; rstd [M] float32.

    Raises:
        TypeError: x or weight is of another dtype.
        ValueError: x is no such matrix, weight does not fit it, or fmt is none of these.
    """
    _check(x, weight, fmt)
    rstd = (x.float().square().mean(-1) + eps).rsqrt()
    return *quantize(normalised(x, rstd, weight), *TILE, fmt, power_of_2), rstd


def normalised(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """y [M, K], float32, from the rstd [M] of the rows."""
    return x.float() * rstd[:, None] * weight.float()


@rms_norm_quantize.register_fake
def _(x, weight, eps, fmt, power_of_2):
    rstd = x.new_empty(len(x), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=DATA_DTYPES[fmt]), new_scale(x, *TILE), rstd


@rms_norm_quantize.register_kernel("cuda")
def _(x, weight, eps, fmt, power_of_2):
    from octile.kernels.triton import norm  # late: a machine without a GPU has no Triton

    _check(x, weight, fmt)
    return norm.launch(x, weight, eps, DATA_DTYPES[fmt], power_of_2)


def _check(x: Tensor, weight: Tensor, fmt: str) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")
    if x.dim() != 2 or x.shape[1] > LONGEST_ROW:
        raise ValueError(f"x must be a matrix [M, K] with K at most {LONGEST_ROW}, not {tuple(x.shape)}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight must be {tuple(x.shape[1:])}, not {tuple(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"x lies on {x.device} but weight on {weight.device}")
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8', not {fmt!r}")
