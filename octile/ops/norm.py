"""RMSNorm, y = x · rstd · weight with rstd = 1 / √(mean(x²) + eps), alone or fused with quantization; its gradients.

The GEMMs after a norm read its result in 8 bits; a gate reads it in high precision. Both are written in one read of x.
The backward pass of the norm needs x and rstd, not y; a layer that needs its quantized input in backward recomputes it
from x.

The reference uses torch's functions in FP32 and rounds once, to the result. The order in which the squares
are summed is unspecified, so the rstd of a GPU has a relative error of at most 2⁻²⁰ against the reference; everything
else is bit for bit what the reference gives for that rstd. The order of the sums in the gradients, one along rows and
one along columns, is unspecified as well.

Source: Zhang and Sennrich (arXiv 1910.07467).  Shapes: x [M, K], weight [K], rstd [M].
"""

import torch
from torch import Tensor

from octile.formats import GEMM_FORMATS, STORAGE_DTYPES, TILE
from octile.kernels import backends
from octile.kernels.memory_layout import new_scale
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, quantize

MAX_COLUMNS = 32768  # a row must fit into one Triton program


@operator()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize each row.

    Args:
        x, weight, eps: as in `rms_norm_quantize`.

    Returns:
        y [M, K] in x's dtype, rounded once; rstd [M] float32, for backward.

    Raises:
        TypeError: x or weight has another dtype.
        ValueError: x is not a matrix with K at most 32768, or weight does not fit it.
    """
    check_operands(x, weight)
    rstd = _rstd(x, eps)
    return normalized(x, rstd, weight).to(x.dtype).contiguous(), rstd


@rms_norm.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


@rms_norm.register_kernel("cuda")
def _(x, weight, eps):
    check_operands(x, weight)
    return backends.run("rms_norm", x, weight, eps)


@operator()
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, fmt: str, power_of_2: bool, values: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize each row and quantize the result y in 1×128 tiles.

    Args:
        x: [M, K], float32, bfloat16 or float16, K at most 32768.
        weight: [K], float32, bfloat16 or float16.
        eps: added to the mean of the squares.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: whether to round each scale up to a power of two.
        values: whether to return y in high precision as well.

    Returns:
        data [M, K] and scale [M, ⌈K/128⌉], as `quantize(y, 1, 128, …)` of y in FP32; rstd [M] float32, for backward;
        y [M, K] in x's dtype, or [0, K] without values.

    Raises:
        TypeError: x or weight has another dtype.
        ValueError: x is not a matrix with K at most 32768, weight does not fit it, or fmt is another one.
    """
    _check(x, weight, fmt)
    rstd = _rstd(x, eps)
    y = normalized(x, rstd, weight)
    returned = y.to(x.dtype).contiguous() if values else x.new_empty(0, x.shape[1])
    return *quantize(y, *TILE, fmt, power_of_2), rstd, returned


def _rstd(x: Tensor, eps: float) -> Tensor:
    return (x.float().square().mean(-1) + eps).rsqrt()


def normalized(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """y = x · rstd · weight in float32 [M, K], from x [M, K], rstd [M] and weight [K]."""
    return x.float() * rstd[:, None] * weight.float()


@rms_norm_quantize.register_fake
def _(x, weight, eps, fmt, power_of_2, values=False):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    y = x.new_empty(x.shape[0] if values else 0, x.shape[1])
    return x.new_empty(x.shape, dtype=STORAGE_DTYPES[fmt]), new_scale(x, *TILE), rstd, y


@rms_norm_quantize.register_kernel("cuda")
def _(x, weight, eps, fmt, power_of_2, values=False):
    _check(x, weight, fmt)
    return backends.run("rms_norm_quantize", x, weight, eps, STORAGE_DTYPES[fmt], power_of_2, values)


@operator()
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    add: Tensor | None = None,
    dy2: Tensor | None = None,
    dy3: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight in FP32, each rounded once.

    Args:
        dy: [M, K], float32, bfloat16 or float16, the gradient of y.
        x, weight: as in the forward pass.
        rstd: [M] float32, from the forward pass.
        add: [M, K] in x's dtype, another gradient of x, to be added before rounding; None: zeros.
        dy2, dy3: as dy, from other layers that read y: the gradient of y is (dy + dy2) + dy3; None: zeros.

    Returns:
        dx + add [M, K] in x's dtype, dweight [K] float32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_backward(dy, x, weight, rstd, add, dy2, dy3)
    unit, dy = x.float() * rstd[:, None], dy.float()
    for other in (dy2, dy3):
        dy = dy if other is None else dy + other.float()
    dunit = dy * weight.float()
    dx = (dunit - unit * (dunit * unit).mean(-1, keepdim=True)) * rstd[:, None]
    dx = dx if add is None else dx + add.float()
    return dx.to(x.dtype).contiguous(), (dy * unit).sum(0)


@rms_norm_backward.register_fake
def _(dy, x, weight, rstd, add=None, dy2=None, dy3=None):
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


@rms_norm_backward.register_kernel("cuda")
def _(dy, x, weight, rstd, add=None, dy2=None, dy3=None):
    from octile.kernels.triton import norm

    _check_backward(dy, x, weight, rstd, add, dy2, dy3)
    return norm.launch_backward(dy, x, weight, rstd, add, dy2, dy3)


def _check(x: Tensor, weight: Tensor, fmt: str) -> None:
    check_operands(x, weight)
    if fmt not in GEMM_FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8', not {fmt!r}")


def _check_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None, dy2: Tensor | None, dy3: Tensor | None
) -> None:
    check_operands(x, weight)
    if rstd.dtype != torch.float32:
        raise TypeError(f"rstd must be float32, not {rstd.dtype}")
    for name, gradient in (("dy", dy), ("dy2", dy2), ("dy3", dy3)):
        if gradient is None:
            continue
        check_input_dtype(name, gradient)
        if gradient.shape != x.shape:
            raise ValueError(f"{name} must be {tuple(x.shape)} as x, not {tuple(gradient.shape)}")
    if rstd.shape != x.shape[:1]:
        raise ValueError(f"rstd must be ({len(x)},), one for each row of x, not {tuple(rstd.shape)}")
    if add is not None and add.dtype != x.dtype:
        raise TypeError(f"add must be {x.dtype} as x, not {add.dtype}")
    if add is not None and add.shape != x.shape:
        raise ValueError(f"add must be {tuple(x.shape)} as x, not {tuple(add.shape)}")
    for name, t in (("dy", dy), ("rstd", rstd), ("add", add), ("dy2", dy2), ("dy3", dy3)):
        if t is not None:
            check_device("x", x, name, t)


def check_operands(x: Tensor, weight: Tensor, name: str = "weight") -> None:
    """Raise TypeError or ValueError if x [M, K] and a norm's weight [K] of this name do not fit together."""
    check_input_dtype("x", x)
    check_input_dtype(name, weight)
    if x.dim() != 2 or x.shape[1] > MAX_COLUMNS:
        raise ValueError(f"x must be a matrix [M, K] with K at most {MAX_COLUMNS}, not {tuple(x.shape)}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"{name} must be {tuple(x.shape[1:])}, not {tuple(weight.shape)}")
    check_device("x", x, name, weight)
