"""SwiGLU, h = silu(gate) · up · weight, and its gradients, quantized as they are computed or in high precision.

The operations between the two GEMMs of a feed-forward layer are elementwise and cost as much as their memory traffic.
Unfused, h and the gradients of gate and up would be written in BF16 and read again to be quantized, once along the rows
and once along the columns. `swiglu` and `swiglu_backward` are the same without quantization and without a weight, for
recipes in high precision: in torch's own functions each of the products would be rounded to BF16.

    forward     gate, up → h in 1×128 tiles for the down-projection; gate and up in 1×128 tiles, saved for backward
    backward    dh, gate, up → d(gate) and d(up) in 1×128 tiles for dgrad and transposed for wgrad; h, recomputed and
                transposed, for the wgrad of the down-projection

`weight` is the gate's weight of a row's expert in a mixture of experts. It is applied here, in FP32 before
quantization: (weight · h) · wᵀ is weight · (h · wᵀ), so combining the results of a token only sums them. The gradient
of the weight is dh · h, with the unweighted h, summed over the row; backward recomputes h in any case.

The reference uses torch's functions in FP32 and rounds once, to the result. A GPU's exponential and division
differ from the CPU's: its silu(gate) has a relative error of at most (8 + |gate|) · 2⁻²³ against the reference. A scale
may differ by as much, and a value halfway between two encoded values may round to the other one. Quantization itself
is bit for bit.

Source: Shazeer (arXiv 2002.05202); DeepSeek-V3 (arXiv 2412.19437) §3.3.3, which saves the inputs in FP8 and recomputes.
Shapes: gate and up [M, H], any strides: two tensors, or the halves of one GEMM's output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import GEMM_FORMATS, STORAGE_DTYPES, TILE
from octile.kernels import backends, cpu
from octile.kernels.memory_layout import new_quantized_transposed, new_scale
from octile.ops.groups import check_tiles
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, check_scale, dequantize, quantize
from octile.ops.transpose import quantize_columns, quantize_rows_and_columns


@operator()
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute h = silu(gate) · up in FP32, rounded once.

    Args:
        gate, up: [M, H], float32, bfloat16 or float16, both of one dtype.

    Returns:
        h [M, H] in gate's dtype.

    Raises:
        TypeError: gate or up has another dtype, or they differ in dtype.
        ValueError: gate and up are not matrices of one shape on one device.
    """
    _check(gate, up)
    return _h(gate, up, None).to(gate.dtype).contiguous()


@swiglu.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


@swiglu.register_kernel("cuda")
def _(gate, up):
    from octile.kernels.triton import swiglu as kernel  # late: a machine without a GPU has no Triton

    _check(gate, up)
    return kernel.launch_high_precision(gate, up)


@operator()
def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute the gradients of gate and up in FP32, each rounded once.

    Args:
        dh: [M, H], float32, bfloat16 or float16: the gradient of h.
        gate, up: as in `swiglu`.

    Returns:
        [M, 2H] in gate's dtype: the gradient of gate, then that of up.

    Raises:
        TypeError: a tensor has another dtype, or gate and up differ in dtype.
        ValueError: they are not matrices of one shape on one device.
    """
    _check_gradient(dh, gate, up)
    return _gate_up_gradient(dh.float(), gate.float(), up.float()).to(gate.dtype)


@swiglu_backward.register_fake
def _(dh, gate, up):
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1])


@swiglu_backward.register_kernel("cuda")
def _(dh, gate, up):
    from octile.kernels.triton import swiglu as kernel

    _check_gradient(dh, gate, up)
    return kernel.launch_high_precision_backward(dh, gate, up)


@operator()
def swiglu_quantize(
    gate: Tensor, up: Tensor, fmt: str, power_of_2: bool, weight: Tensor | None = None, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute h = silu(gate) · up · weight and quantize it in 1×128 tiles.

    Args:
        gate, up: [M, H], float32, bfloat16 or float16, both of one dtype.
        fmt: "e4m3", "e5m2" or "int8".
        power_of_2: whether to round each scale up to a power of two.
        weight: float32 [M], one factor per row; None: 1.
        ends: int32 [G], contiguous, nondecreasing, where groups of rows end, as in `grouped_matmul_nt`: on a GPU the
            rows after the last group are undefined; None: all rows are computed.

    Returns:
        data [M, H] and scale [M, ⌈H/128⌉], as `quantize(h, 1, 128, …)`.

    Raises:
        TypeError: gate, up, weight or ends has another dtype, or gate and up differ in dtype.
        ValueError: gate and up are not matrices of one shape on one device, weight or ends does not fit them, or fmt
            is another one.
    """
    _check(gate, up, fmt)
    _check_weight(weight, gate)
    _check_ends(ends, gate)
    return quantize(_h(gate, up, weight), *TILE, fmt, power_of_2)


@swiglu_quantize.register_fake
def _(gate, up, fmt, power_of_2, weight=None, ends=None):
    return gate.new_empty(gate.shape, dtype=STORAGE_DTYPES[fmt]), new_scale(gate, *TILE)


@swiglu_quantize.register_kernel("cuda")
def _(gate, up, fmt, power_of_2, weight=None, ends=None):
    _check(gate, up, fmt)
    _check_weight(weight, gate)
    _check_ends(ends, gate)
    return backends.run("swiglu_quantize", gate, up, STORAGE_DTYPES[fmt], power_of_2, weight, ends)


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
    """Compute `swiglu_quantize`, and quantize gate and up in 1×128 tiles to be saved for backward, in one pass.

    Args:
        gate, up, fmt, power_of_2, weight: as in `swiglu_quantize`.
        saved_fmt, saved_power_of_2: format and scale rule of gate and up, as fmt and power_of_2 for h.

    Returns:
        data [M, H] and scale [M, ⌈H/128⌉] of h; saved [2, M, H] and saved_scale [2, M, ⌈H/128⌉] of gate and up, as
        `quantize(torch.stack((gate, up)), 1, 128, …)`.

    Raises:
        TypeError, ValueError: as `swiglu_quantize`.
    """
    _check(gate, up, fmt, saved_fmt)
    _check_weight(weight, gate)
    h = quantize(_h(gate, up, weight), *TILE, fmt, power_of_2)
    return *h, *quantize(torch.stack((gate, up)), *TILE, saved_fmt, saved_power_of_2)


@swiglu_quantize_and_save.register_fake
def _(gate, up, fmt, power_of_2, saved_fmt, saved_power_of_2, weight=None):
    data = gate.new_empty(gate.shape, dtype=STORAGE_DTYPES[fmt])
    saved = gate.new_empty(2, *gate.shape, dtype=STORAGE_DTYPES[saved_fmt])
    return data, new_scale(data, *TILE), saved, new_scale(saved, *TILE)


@swiglu_quantize_and_save.register_kernel("cuda")
def _(gate, up, fmt, power_of_2, saved_fmt, saved_power_of_2, weight=None):
    _check(gate, up, fmt, saved_fmt)
    _check_weight(weight, gate)
    settings = (STORAGE_DTYPES[fmt], power_of_2, STORAGE_DTYPES[saved_fmt], saved_power_of_2)
    return backends.run("swiglu_quantize_and_save", gate, up, *settings, weight)


def silu(x: Tensor) -> Tensor:
    """Return x · sigmoid(x); an element's bits depend on the element alone, which those of torch's do not on a CPU.

    See `octile.ops.gate.sigmoid`.
    """
    return x / (1 + (-x).exp())


def _h(gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
    h = silu(gate.float()) * up.float()
    return h if weight is None else h * weight[:, None]


def _gate_up_gradient(dh: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)], dim=1)


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
    tiles: Tensor | None = None,
    h_in_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of gate, up and weight and recompute h; quantize d(gate), d(up) and h.

    Args:
        dh: [M, H], float32, bfloat16 or float16: the gradient of h.
        gate, up: [M, H], both float32, bfloat16 or float16; or saved in 1×128 tiles, both float8_e4m3fn, float8_e5m2
            or int8. H must be a multiple of 128, so that no tile holds values of both gradients.
        gate_scale, up_scale: float32 [M, H/128] if gate and up are saved in 8 bits, else None.
        weight: float32 [M], one factor per row; None: 1.
        fmt, power_of_2: format and scale rule of the gradients: "e4m3", "e5m2" or "int8"; whether to round each scale
            up to a power of two.
        h_fmt, h_power_of_2: format and scale rule of h.
        tiles: int32 [P/128, 2], of groups of rows, for the transposed results, as in `quantize_rows_and_columns`.
        h_in_blocks: whether h_t is in 128×128 blocks instead, with an h_scale_t [H/128, ⌈M/128⌉].

    Returns:
        data [M, 2H] and scale [M, 2H/128], data_t [2H, M] and scale_t [2H, ⌈M/128⌉], as
        `quantize_rows_and_columns` of [d(gate) | d(up)]. Then h_t [H, M] and h_scale_t [H, ⌈M/128⌉], the transposes of
        `quantize(h, 128, 1, …)`, and the gradient of weight, float32 [M], or [0] without weight. With tiles, P takes
        M's place in the transposed results.

    Raises:
        TypeError: a tensor has another dtype, or gate and up differ in dtype.
        ValueError: H is no multiple of 128, a shape or device does not fit, scales are missing or superfluous, or a
            format is another one.
    """
    _check_backward(dh, gate, up, gate_scale, up_scale, weight, fmt, h_fmt, tiles)
    both, h, dweight = _gradients(dh, gate, up, gate_scale, up_scale, weight)
    h_columns = quantize_columns(h, h_fmt, h_power_of_2, tiles, h_in_blocks)
    return *quantize_rows_and_columns(both, fmt, power_of_2, tiles), *h_columns, dweight


def _gradients(
    dh: Tensor, gate: Tensor, up: Tensor, gate_scale: Tensor | None, up_scale: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [d(gate) | d(up)], h and the gradient of weight, float32."""
    if gate_scale is not None and up_scale is not None:
        gate, up = (dequantize(*saved, *TILE, torch.float32) for saved in ((gate, gate_scale), (up, up_scale)))
    dh, gate, up = dh.float(), gate.float(), up.float()
    h = silu(gate) * up
    dweight = (dh * h).sum(1) if weight is not None else dh.new_empty(0)
    if weight is not None:
        dh, h = dh * weight[:, None], h * weight[:, None]
    return _gate_up_gradient(dh, gate, up), h, dweight


@swiglu_backward_quantize.register_fake
def _(dh, gate, up, gate_scale, up_scale, weight, fmt, power_of_2, h_fmt, h_power_of_2, tiles=None, h_in_blocks=False):
    both, dtype = gate.new_empty(gate.shape[0], 2 * gate.shape[1]), STORAGE_DTYPES[fmt]
    data, transposed = both.new_empty(both.shape, dtype=dtype), new_quantized_transposed(both, dtype, tiles)
    h_transposed = new_quantized_transposed(gate, STORAGE_DTYPES[h_fmt], tiles, h_in_blocks)
    dweight = gate.new_empty(0 if weight is None else gate.shape[0], dtype=torch.float32)
    return data, new_scale(both, *TILE), *transposed, *h_transposed, dweight


@swiglu_backward_quantize.register_kernel("cpu")
def _(dh, gate, up, gate_scale, up_scale, weight, fmt, power_of_2, h_fmt, h_power_of_2, tiles=None, h_in_blocks=False):
    if h_in_blocks or not cpu.can_quantize(h_fmt):
        settings = fmt, power_of_2, h_fmt, h_power_of_2, tiles, h_in_blocks
        return swiglu_backward_quantize.reference(dh, gate, up, gate_scale, up_scale, weight, *settings)
    _check_backward(dh, gate, up, gate_scale, up_scale, weight, fmt, h_fmt, tiles)
    both, h, dweight = _gradients(dh, gate, up, gate_scale, up_scale, weight)
    h_columns = cpu.quantize_columns(h, h_power_of_2, tiles)
    return *quantize_rows_and_columns(both, fmt, power_of_2, tiles), *h_columns, dweight


@swiglu_backward_quantize.register_kernel("cuda")
def _(dh, gate, up, gate_scale, up_scale, weight, fmt, power_of_2, h_fmt, h_power_of_2, tiles=None, h_in_blocks=False):
    _check_backward(dh, gate, up, gate_scale, up_scale, weight, fmt, h_fmt, tiles)
    settings = (STORAGE_DTYPES[fmt], power_of_2, STORAGE_DTYPES[h_fmt], h_power_of_2, tiles, h_in_blocks)
    return backends.run("swiglu_backward_quantize", dh, gate, up, gate_scale, up_scale, weight, *settings)


def _check_gradient(dh: Tensor, gate: Tensor, up: Tensor) -> None:
    _check(gate, up)
    check_input_dtype("dh", dh)
    _check_like("dh", dh, gate.shape, gate)


def _check_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    weight: Tensor | None,
    fmt: str,
    h_fmt: str,
    tiles: Tensor | None,
) -> None:
    is_quantized = gate.dtype in map(STORAGE_DTYPES.get, GEMM_FORMATS)
    _check(gate, up, fmt, h_fmt, is_quantized=is_quantized)
    check_input_dtype("dh", dh)
    if gate.shape[1] % TILE[1]:
        raise ValueError(f"gate must have a multiple of {TILE[1]} columns, not {gate.shape[1]}")
    _check_like("dh", dh, gate.shape, gate)
    for name, data, scale in (("gate", gate, gate_scale), ("up", up, up_scale)):
        if (scale is not None) != is_quantized:
            raise ValueError(f"{name}_scale must be given if gate and up are quantized, and only then")
        if scale is not None:
            check_scale(name, data, scale, *TILE)
    _check_weight(weight, gate)
    check_tiles("gate", gate, tiles)


def _check_weight(weight: Tensor | None, gate: Tensor) -> None:
    if weight is None:
        return
    if weight.dtype != torch.float32:
        raise TypeError(f"weight must be float32, not {weight.dtype}")
    _check_like("weight", weight, gate.shape[:1], gate)


def _check_ends(ends: Tensor | None, gate: Tensor) -> None:
    if ends is None:
        return
    if ends.dtype != torch.int32:
        raise TypeError(f"ends must be int32, not {ends.dtype}")
    if ends.dim() != 1 or not len(ends) or not ends.is_contiguous():
        raise ValueError(f"ends must be [G], contiguous, with G at least 1, not {tuple(ends.shape)}")
    check_device("gate", gate, "ends", ends)


def _check(gate: Tensor, up: Tensor, *formats: str, is_quantized: bool = False) -> None:
    if not is_quantized:
        check_input_dtype("gate", gate)
    if gate.dim() != 2:
        raise ValueError(f"gate must be a matrix [M, H], not {tuple(gate.shape)}")
    if up.dtype != gate.dtype:
        raise TypeError(f"up must be {gate.dtype} as gate, not {up.dtype}")
    _check_like("up", up, gate.shape, gate)
    for fmt in formats:
        if fmt not in GEMM_FORMATS:
            raise ValueError(f"fmt must be 'e4m3', 'e5m2' or 'int8', not {fmt!r}")


def _check_like(name: str, t: Tensor, shape: torch.Size, gate: Tensor) -> None:
    if t.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)} as gate, not {tuple(t.shape)}")
    check_device("gate", gate, name, t)
