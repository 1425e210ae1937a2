"""SwiGLU between two quantised products: h = silu(gate) · up, cast as it is made, and so are its gradients.

What lies between two products of a feed-forward layer is elementwise, so it costs what its bytes cost. Done one step
after the other, h and the gradients of gate and up would each be written in BF16 and read again to be cast, once along
the rows and once along the columns.

The functions are torch's own in FP32, rounded once, to the quantised number. The exponential of a GPU is not the
CPU's, nor is the division after it: silu(gate) there is within (8 + |gate|) · 2⁻²³ of the value here, relatively, so a
scale may differ by that, and a number that lies at the middle between two codes may round to the other one. The cast
itself is bit for bit.

The weight by which a mixture of experts sums its experts' results does not appear here: it multiplies after the
down-projection (`octile.nn.dispatch`).

Source: Shazeer (arXiv 2002.05202); DeepSeek-V3 (arXiv 2412.19437) §3.3.3, which casts its inputs and recomputes it.
Shapes: gate and up [M, H], any strides: the two halves of one product's result as well as two tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels.storage import new_scale, new_transposed
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, quantize
from octile.ops.transpose import FORMATS, TILE, quantize_rows_and_columns


@operator()
def swiglu_quantize(gate: Tensor, up: Tensor, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """h = silu(gate) · up in 1×128 tiles.

    Args:
        gate, up: [M, H], float32, bfloat16 or float16, both the same.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: round each scale up to a power of two.

    Returns:
        data [M, H] and scale [M, ⌈H/128⌉], as `quantize(h, 1, 128, …)`.

    Raises:
        TypeError: gate or up is of another dtype, or they differ in it.
        ValueError: they are no matrices of one shape on one device, or fmt none of these.
    """
    _check(fmt, gate=gate, up=up)
    return quantize(F.silu(gate.float()) * up.float(), *TILE, fmt, power_of_2)


@swiglu_quantize.register_fake
def _(gate, up, fmt, power_of_2):
    return gate.new_empty(gate.shape, dtype=DATA_DTYPES[fmt]), new_scale(gate, *TILE)


@swiglu_quantize.register_kernel("cuda")
def _(gate, up, fmt, power_of_2):
    from octile.kernels.triton import swiglu  # late: a machine without a GPU has no Triton

    _check(fmt, gate=gate, up=up)
    return swiglu.launch(gate, up, DATA_DTYPES[fmt], power_of_2)


@operator()
def swiglu_backward_quantize(
    dh: Tensor, gate: Tensor, up: Tensor, fmt: str, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of gate and up from that of h, side by side, in 1×128 tiles for dgrad and turned for wgrad.

    Args:
        dh, gate, up: [M, H], float32, bfloat16 or float16, all the same; H a multiple of 128, so that no tile holds
            values of both gradients and each half is the cast of one of them.
        fmt, power_of_2: as in `swiglu_quantize`.

    Returns:
        data [M, 2H] and scale [M, 2H/128], data_t [2H, M] and scale_t [2H, ⌈M/128⌉], as
        `quantize_rows_and_columns` of [d(gate) | d(up)].

    Raises:
        TypeError, ValueError: as `swiglu_quantize`; H is no multiple of 128.
    """
    _check_backward(dh, gate, up, fmt)
    dh, gate, up = dh.float(), gate.float(), up.float()
    both = torch.cat([torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)], dim=1)
    return quantize_rows_and_columns(both, fmt, power_of_2)


@swiglu_backward_quantize.register_fake
def _(dh, gate, up, fmt, power_of_2):
    both, dtype = gate.new_empty(len(gate), 2 * gate.shape[1]), DATA_DTYPES[fmt]
    data, data_t = both.new_empty(both.shape, dtype=dtype), new_transposed(both, dtype)
    return data, new_scale(both, *TILE), data_t, new_scale(both, *TILE[::-1]).mT


@swiglu_backward_quantize.register_kernel("cuda")
def _(dh, gate, up, fmt, power_of_2):
    from octile.kernels.triton import swiglu

    _check_backward(dh, gate, up, fmt)
    return swiglu.launch_backward(dh, gate, up, DATA_DTYPES[fmt], power_of_2)


def _check_backward(dh: Tensor, gate: Tensor, up: Tensor, fmt: str) -> None:
    _check(fmt, gate=gate, up=up, dh=dh)
    if gate.shape[1] % TILE[1]:
        raise ValueError(f"gate must have a multiple of {TILE[1]} columns, not {gate.shape[1]}: tiles would hold both")


def _check(fmt: str, gate: Tensor, **others: Tensor) -> None:
    if gate.dtype not in INPUT_DTYPES:
        raise TypeError(f"gate must be float32, bfloat16 or float16, not {gate.dtype}")
    if gate.dim() != 2:
        raise ValueError(f"gate must be a matrix [M, H], not {tuple(gate.shape)}")
    for name, t in others.items():
        if t.dtype != gate.dtype:
            raise TypeError(f"{name} must be {gate.dtype} as gate, not {t.dtype}")
        if t.shape != gate.shape:
            raise ValueError(f"{name} must be {tuple(gate.shape)} as gate, not {tuple(t.shape)}")
        if t.device != gate.device:
            raise ValueError(f"gate lies on {gate.device} but {name} on {t.device}")
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8', not {fmt!r}")
