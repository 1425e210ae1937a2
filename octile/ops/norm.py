"""RMSNorm whose result is cast as it is made, y = x · rstd · weight, rstd = 1 / √(mean(x²) + eps), and its gradients.

The products that follow a norm read its result in 8 bits, and one that does not, a gate's, reads it as it is; both are
written in one read of x. The backward pass of the norm needs x and rstd, and no y; where a layer needs its 8-bit input
again, it is made again from x.

The functions are torch's in FP32, rounded once, to the quantised number. In which order the squares are added is not
part of the specification, so rstd is within 2⁻²⁰ of the value here, relatively; everything after it is bit for bit
what the reference makes of that rstd. Nor is the order of the gradients' sums, one along a row and one along a column.

Source: Zhang and Sennrich (arXiv 1910.07467).  Shapes: x [M, K], weight [K], rstd [M].
"""

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels import backends
from octile.kernels.memory_layout import new_scale
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, quantize
from octile.ops.transpose import FORMATS

LONGEST_ROW = 32768  # what one program of a GPU holds


@operator()
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, fmt: str, power_of_2: bool, values: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm of each row in 1×128 tiles, its rstd for the backward pass and, if asked for, the norm itself.

    Args:
        x: [M, K], float32, bfloat16 or float16, K at most 32768.
        weight: [K], float32, bfloat16 or float16.
        eps: added to the mean of the squares.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: round each scale up to a power of two.
        values: whether y is wanted.

    Returns:
        data [M, K] and scale [M, ⌈K/128⌉], as `quantize(y, 1, 128, …)` of y in FP32; rstd [M] float32; y [M, K] in
        x's dtype, or [0, K] if it is not wanted.

    Raises:
        TypeError: x or weight is of another dtype.
        ValueError: x is no such matrix, weight does not fit it, or fmt is none of these.
    """
    _check(x, weight, fmt)
    rstd = (x.float().square().mean(-1) + eps).rsqrt()
    y = normalized(x, rstd, weight)
    wanted = y.to(x.dtype).contiguous() if values else x.new_empty(0, x.shape[1])
    return *quantize(y, *TILE, fmt, power_of_2), rstd, wanted


def normalized(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """y [M, K], float32, from the rstd [M] of the rows."""
    return x.float() * rstd[:, None] * weight.float()


@rms_norm_quantize.register_fake
def _(x, weight, eps, fmt, power_of_2, values=False):
    rstd = x.new_empty(len(x), dtype=torch.float32)
    y = x.new_empty(len(x) if values else 0, x.shape[1])
    return x.new_empty(x.shape, dtype=DATA_DTYPES[fmt]), new_scale(x, *TILE), rstd, y


@rms_norm_quantize.register_kernel("cuda")
def _(x, weight, eps, fmt, power_of_2, values=False):
    _check(x, weight, fmt)
    return backends.run("rms_norm_quantize", x, weight, eps, DATA_DTYPES[fmt], power_of_2, values)


@operator()
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of weight, each with one rounding.

    Args:
        dy: [M, K], of y, float32, bfloat16 or float16.
        x, weight: as they were in the forward pass.
        rstd: [M] float32.
        add: [M, K] in x's dtype, a gradient of x from elsewhere, which dx is added to; None: zeros.

    Returns:
        dx [M, K] in x's dtype, dweight [K] float32.

    Raises:
        TypeError: a tensor is of another dtype.
        ValueError: their shapes or devices do not fit together.
    """
    _check_backward(dy, x, weight, rstd, add)
    unit, dy = x.float() * rstd[:, None], dy.float()
    of_unit = dy * weight.float()
    dx = (of_unit - unit * (of_unit * unit).mean(-1, keepdim=True)) * rstd[:, None]
    dx = dx if add is None else dx + add.float()
    return dx.to(x.dtype).contiguous(), (dy * unit).sum(0)


@rms_norm_backward.register_fake
def _(dy, x, weight, rstd, add=None):
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


@rms_norm_backward.register_kernel("cuda")
def _(dy, x, weight, rstd, add=None):
    from octile.kernels.triton import norm  # late: a machine without a GPU has no Triton

    _check_backward(dy, x, weight, rstd, add)
    return norm.launch_backward(dy, x, weight, rstd, add)


def _check(x: Tensor, weight: Tensor, fmt: str) -> None:
    _check_operands(x, weight)
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8', not {fmt!r}")


def _check_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None) -> None:
    _check_operands(x, weight)
    if dy.dtype not in INPUT_DTYPES:
        raise TypeError(f"dy must be float32, bfloat16 or float16, not {dy.dtype}")
    if rstd.dtype != torch.float32:
        raise TypeError(f"rstd must be float32, not {rstd.dtype}")
    if dy.shape != x.shape:
        raise ValueError(f"dy must be {tuple(x.shape)} as x, not {tuple(dy.shape)}")
    if rstd.shape != x.shape[:1]:
        raise ValueError(f"rstd must be ({len(x)},), one for each row of x, not {tuple(rstd.shape)}")
    if add is not None and add.dtype != x.dtype:
        raise TypeError(f"add must be {x.dtype} as x, not {add.dtype}")
    if add is not None and add.shape != x.shape:
        raise ValueError(f"add must be {tuple(x.shape)} as x, not {tuple(add.shape)}")
    for name, t in (("dy", dy), ("rstd", rstd), ("add", add)):
        if t is not None and t.device != x.device:
            raise ValueError(f"x lies on {x.device} but {name} on {t.device}")


def _check_operands(x: Tensor, weight: Tensor) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")
    if x.dim() != 2 or x.shape[1] > LONGEST_ROW:
        raise ValueError(f"x must be a matrix [M, K] with K at most {LONGEST_ROW}, not {tuple(x.shape)}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight must be {tuple(x.shape[1:])}, not {tuple(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"x lies on {x.device} but weight on {weight.device}")
