"""SwiGLU between two quantised products: h = silu(gate) · up, cast as it is made, and so are its gradients.

What lies between two products of a feed-forward layer is elementwise, so it costs what its bytes cost. Done one step
after the other, h and the gradients of gate and up would each be written in BF16 and read again to be cast, once along
the rows and once along the columns.

For the backward pass gate and up are kept in 8 bits and h is made again:

    forward     gate, up → h in tiles for the down-projection, gate and up in tiles to be kept
    backward    dh, gate, up → their gradients in tiles for dgrad and turned for wgrad, h turned for the down-
                projection's wgrad

In a mixture of experts a row's result is multiplied by its weight. It is multiplied here, in FP32 before the cast:
(weight · h) · wᵀ is weight · (h · wᵀ), the results of a token are then only summed, and the backward pass, which needs
the unweighted result for the gradient of the weight, makes h again anyway: d(weight) is dh · h, summed over the row.

The functions are torch's own in FP32, rounded once, to the quantised number. The exponential of a GPU is not the
CPU's, nor is the division after it: silu(gate) there is within (8 + |gate|) · 2⁻²³ of the value here, relatively, so a
scale may differ by that, and a number that lies at the middle between two codes may round to the other one. The cast
itself is bit for bit.

Source: Shazeer (arXiv 2002.05202); DeepSeek-V3 (arXiv 2412.19437) §3.3.3, which casts its inputs and recomputes it.
Shapes: gate and up [M, H], any strides: the two halves of one product's result as well as two tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import COLUMN_TILE, TILE
from octile.kernels import backends
from octile.kernels.memory_layout import new_quantized_transposed, new_scale, new_transposed
from octile.ops.operator import operator
from octile.ops.quantize import DATA_DTYPES, INPUT_DTYPES, check_scale, dequantize, quantize
from octile.ops.transpose import FORMATS, quantize_rows_and_columns


@operator()
def swiglu_quantize(
    gate: Tensor, up: Tensor, fmt: str, power_of_2: bool, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h = silu(gate) · up · weight in 1×128 tiles.

    Args:
        gate, up: [M, H], float32, bfloat16 or float16, both the same.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: round each scale up to a power of two.
        weight: float32 [M], of each row; None: 1.

    Returns:
        data [M, H] and scale [M, ⌈H/128⌉], as `quantize(h, 1, 128, …)`.

    Raises:
        TypeError: gate, up or weight is of another dtype, or gate and up differ in it.
        ValueError: they are no matrices of one shape on one device, weight does not fit them, or fmt is none of these.
    """
    _check(gate, up, fmt)
    _check_weight(weight, gate)
    return quantize(_h(gate, up, weight), *TILE, fmt, power_of_2)


@swiglu_quantize.register_fake
def _(gate, up, fmt, power_of_2, weight=None):
    return gate.new_empty(gate.shape, dtype=DATA_DTYPES[fmt]), new_scale(gate, *TILE)


@swiglu_quantize.register_kernel("cuda")
def _(gate, up, fmt, power_of_2, weight=None):
    _check(gate, up, fmt)
    _check_weight(weight, gate)
    return backends.run("swiglu_quantize", gate, up, DATA_DTYPES[fmt], power_of_2, weight)


@operator()
def swiglu_quantize_and_save(
    gate: Tensor,
    up: Tensor,
    fmt: str,
    power_of_2: bool,
    saved_fmt: str,
    saved_power_of_2: bool,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`swiglu_quantize`, and its inputs in 1×128 tiles, from one read of them.

    Args, Raises: as `swiglu_quantize`; saved_fmt and saved_power_of_2 are the inputs' own.

    Returns:
        data [M, H] and scale [M, ⌈H/128⌉] of h; kept [2, M, H] and kept_scale [2, M, ⌈H/128⌉], as
        `quantize` of gate and up one above the other.
    """
    _check(gate, up, fmt, saved_fmt)
    _check_weight(weight, gate)
    h = quantize(_h(gate, up, weight), *TILE, fmt, power_of_2)
    return *h, *quantize(torch.stack((gate, up)), *TILE, saved_fmt, saved_power_of_2)


@swiglu_quantize_and_save.register_fake
def _(gate, up, fmt, power_of_2, saved_fmt, saved_power_of_2, weight=None):
    data, kept = (gate.new_empty(gate.shape, dtype=DATA_DTYPES[f]) for f in (fmt, saved_fmt))
    both = kept.new_empty(2, *kept.shape)
    return data, new_scale(data, *TILE), both, new_scale(both, *TILE)


@swiglu_quantize_and_save.register_kernel("cuda")
def _(gate, up, fmt, power_of_2, saved_fmt, saved_power_of_2, weight=None):
    _check(gate, up, fmt, saved_fmt)
    _check_weight(weight, gate)
    casts = (DATA_DTYPES[fmt], power_of_2, DATA_DTYPES[saved_fmt], saved_power_of_2)
    return backends.run("swiglu_quantize_and_save", gate, up, *casts, weight)


def _h(gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
    h = F.silu(gate.float()) * up.float()
    return h if weight is None else h * weight[:, None]


@operator()
def swiglu_backward_quantize(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    weight: Tensor | None,
    fmt: str,
    power_of_2: bool,
    h_fmt: str,
    h_power_of_2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of gate and up from that of h, side by side, in 1×128 tiles and turned; and h again, turned.

    Args:
        dh: [M, H], float32, bfloat16 or float16: the gradient of h.
        gate, up: [M, H], both of one such dtype; or kept in 1×128 tiles, both float8_e4m3fn, float8_e5m2 or int8. H is
            a multiple of 128, so that no tile holds values of both gradients and each half is the cast of one of them.
        gate_scale, up_scale: float32 [M, H/128] where gate and up are kept.
        weight: float32 [M], of each row; None: 1.
        fmt, power_of_2: of the gradients: "e4m3", "e5m2" or "int8"; round each scale up to a power of two.
        h_fmt, h_power_of_2: of h.

    Returns:
        data [M, 2H] and scale [M, 2H/128], data_t [2H, M] and scale_t [2H, ⌈M/128⌉], as
        `quantize_rows_and_columns` of [d(gate) | d(up)]; h_t [H, M] and h_scale_t [H, ⌈M/128⌉], the transposes of
        `quantize(h, 128, 1, …)`; the gradient of weight, float32 [M], or [0] where there is none.

    Raises:
        TypeError, ValueError: as `swiglu_quantize`; H is no multiple of 128; scales or weight do not fit.
    """
    _check_backward(dh, gate, up, gate_scale, up_scale, weight, fmt, h_fmt)
    if gate_scale is not None and up_scale is not None:
        gate, up = (dequantize(*kept, *TILE, torch.float32) for kept in ((gate, gate_scale), (up, up_scale)))
    dh, gate, up = dh.float(), gate.float(), up.float()
    h = F.silu(gate) * up
    of_weight = (dh * h).sum(1) if weight is not None else dh.new_empty(0)
    if weight is not None:
        dh, h = dh * weight[:, None], h * weight[:, None]
    both = torch.cat([torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)], dim=1)
    turned, h_scale = quantize(h, *COLUMN_TILE, h_fmt, h_power_of_2)
    h_t = new_transposed(h, turned.dtype).copy_(turned.mT)
    return *quantize_rows_and_columns(both, fmt, power_of_2), h_t, h_scale.mT, of_weight


@swiglu_backward_quantize.register_fake
def _(dh, gate, up, gate_scale, up_scale, weight, fmt, power_of_2, h_fmt, h_power_of_2):
    both, dtype = gate.new_empty(len(gate), 2 * gate.shape[1]), DATA_DTYPES[fmt]
    data, turned = both.new_empty(both.shape, dtype=dtype), new_quantized_transposed(both, dtype)
    of_weight = gate.new_empty(0 if weight is None else len(gate), dtype=torch.float32)
    return data, new_scale(both, *TILE), *turned, *new_quantized_transposed(gate, DATA_DTYPES[h_fmt]), of_weight


@swiglu_backward_quantize.register_kernel("cuda")
def _(dh, gate, up, gate_scale, up_scale, weight, fmt, power_of_2, h_fmt, h_power_of_2):
    _check_backward(dh, gate, up, gate_scale, up_scale, weight, fmt, h_fmt)
    casts = (DATA_DTYPES[fmt], power_of_2, DATA_DTYPES[h_fmt], h_power_of_2)
    return backends.run("swiglu_backward_quantize", dh, gate, up, gate_scale, up_scale, weight, *casts)


def _check_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    weight: Tensor | None,
    fmt: str,
    h_fmt: str,
) -> None:
    kept = gate.dtype in map(DATA_DTYPES.get, FORMATS)
    _check(gate, up, fmt, h_fmt, dtypes=() if kept else INPUT_DTYPES)
    if dh.dtype not in INPUT_DTYPES:
        raise TypeError(f"dh must be float32, bfloat16 or float16, not {dh.dtype}")
    if gate.shape[1] % TILE[1]:
        raise ValueError(f"gate must have a multiple of {TILE[1]} columns, not {gate.shape[1]}: tiles would hold both")
    _check_like("dh", dh, gate.shape, gate)
    for name, data, scale in (("gate", gate, gate_scale), ("up", up, up_scale)):
        if (scale is not None) != kept:
            raise ValueError(f"{name}_scale must be given where gate and up are in 8 bits, and only there")
        if scale is not None:
            check_scale(name, data, scale, *TILE)
    _check_weight(weight, gate)


def _check_weight(weight: Tensor | None, gate: Tensor) -> None:
    if weight is None:
        return
    if weight.dtype != torch.float32:
        raise TypeError(f"weight must be float32, not {weight.dtype}")
    _check_like("weight", weight, gate.shape[:1], gate)


def _check(gate: Tensor, up: Tensor, *formats: str, dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES) -> None:
    if dtypes and gate.dtype not in dtypes:
        raise TypeError(f"gate must be float32, bfloat16 or float16, not {gate.dtype}")
    if gate.dim() != 2:
        raise ValueError(f"gate must be a matrix [M, H], not {tuple(gate.shape)}")
    if up.dtype != gate.dtype:
        raise TypeError(f"up must be {gate.dtype} as gate, not {up.dtype}")
    _check_like("up", up, gate.shape, gate)
    for fmt in formats:
        if fmt not in FORMATS:
            raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8', not {fmt!r}")


def _check_like(name: str, t: Tensor, shape: torch.Size, gate: Tensor) -> None:
    if t.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)} as gate, not {tuple(t.shape)}")
    if t.device != gate.device:
        raise ValueError(f"gate lies on {gate.device} but {name} on {t.device}")
