# mypy: allow-untyped-defs
"""SwiGLU and its gradients, cast as they are made; `octile.ops.swiglu` specifies it and says what is bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import new_quantized_transposed, new_scale
from octile.kernels.triton.blocks import store_tiles, store_turned_tiles
from octile.kernels.triton.fp8_bits import as_codes, cast_constants
from octile.kernels.triton.launch_config import EXACT, SQUARES, SWIGLU
from octile.kernels.triton.quantize_kernels import load, place
from octile.kernels.triton.scaling import load_tiles


def launch(
    gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """gate, up [M, H], any strides, weight [M] → data [M, H], scale in 1×128."""
    return _launch(gate, up, dtype, power_of_2, None, False, weight)[:2]


def launch_and_save(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    saved_dtype: torch.dtype,
    saved_power_of_2: bool,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate, up [M, H], any strides, weight [M] → data [M, H], scale in 1×128; kept [2, M, H], kept_scale in 1×128."""
    return _launch(gate, up, dtype, power_of_2, saved_dtype, saved_power_of_2, weight)


def _launch(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    saved_dtype: torch.dtype | None,
    saved_power_of_2: bool,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, h), rows = gate.shape, SWIGLU["ROWS"]
    data, scale = torch.empty(gate.shape, dtype=dtype, device=gate.device), new_scale(gate, 1, 128)
    kept, kept_scale = data, scale  # not written
    if saved_dtype is not None:
        kept = torch.empty(2, m, h, dtype=saved_dtype, device=gate.device)
        kept_scale = new_scale(kept, 1, 128)
    if gate.numel():
        grid = (triton.cdiv(m, rows) * triton.cdiv(h, 128),)
        constants = cast_constants(dtype) | _named("KEPT", cast_constants(saved_dtype or dtype)) | SWIGLU | EXACT
        with torch.cuda.device_of(gate):
            swiglu[grid](
                gate, up, scale if weight is None else weight, m, h, *gate.stride(), *up.stride(),
                0 if weight is None else weight.stride(0), as_codes(data), scale, as_codes(kept), kept_scale,
                KEEP=saved_dtype is not None, WEIGHTED=weight is not None, POWER_OF_2=power_of_2,
                KEPT_POWER_OF_2=saved_power_of_2, **constants,
            )  # fmt: skip
    return data, scale, kept, kept_scale


def launch_backward(
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
    """dh, gate, up [M, H], H a multiple of 128, any strides → what `octile.ops.swiglu` returns."""
    m, h = gate.shape
    data = gate.new_empty((m, 2 * h), dtype=dtype)
    scale, (data_t, scale_t) = new_scale(data, 1, 128), new_quantized_transposed(data, dtype)
    h_t, h_scale_t = new_quantized_transposed(gate, h_dtype)
    parts = torch.empty(0 if weight is None else m, h // 128, dtype=torch.float32, device=gate.device)
    if gate.numel():
        kept = gate_scale is not None
        mantissa = cast_constants(gate.dtype)["MANTISSA"] if kept else 0
        gate, up = (as_codes(t) if kept else t for t in (gate, up))
        gate_scale, up_scale, weights = (t if t is not None else scale for t in (gate_scale, up_scale, weight))
        inputs = (dh, gate, up, gate_scale, up_scale, weights, m, h, *dh.stride(), *gate.stride(), *up.stride())
        inputs += (*gate_scale.stride(), *up_scale.stride(), weights.stride(0))
        constants = {"KEPT": kept, "KEPT_MANTISSA": mantissa, "WEIGHTED": weight is not None}
        squares = triton.cdiv(m, 128) * triton.cdiv(h, 128)
        with torch.cuda.device_of(gate):
            swiglu_backward[(2 * squares,)](
                *inputs, as_codes(data), scale, as_codes(data_t), scale_t,
                POWER_OF_2=power_of_2, **constants, **cast_constants(dtype), **SQUARES["swiglu_backward"], **EXACT,
            )  # fmt: skip
            swiglu_turned[(squares,)](
                *inputs, as_codes(h_t), h_scale_t, parts,
                POWER_OF_2=h_power_of_2, **constants, **cast_constants(h_dtype), **SQUARES["swiglu_turned"], **EXACT,
            )  # fmt: skip
    return data, scale, data_t, scale_t, h_t, h_scale_t, parts.sum(1)


def _named(prefix: str, constants: dict[str, float]) -> dict[str, float]:
    """The constants of another cast in the same kernel."""
    return {f"{prefix}_{name}": value for name, value in constants.items()}


@triton.jit(do_not_specialize=["M"])
def swiglu(
    gate, up, weight, M, H, gate_row, gate_col, up_row, up_col, weight_step, data, scale, kept, kept_scale,
    ROWS: tl.constexpr, KEEP: tl.constexpr, WEIGHTED: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    KEPT_POWER_OF_2: tl.constexpr, KEPT_INVERSE: tl.constexpr, KEPT_REST: tl.constexpr, KEPT_MANTISSA: tl.constexpr,
    KEPT_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS×128."""
    batch, m_tile, k_tile = place(tl.program_id(0), M, H, ROWS, 128)
    m = m_tile * ROWS + tl.arange(0, ROWS)
    k = k_tile * 128 + tl.arange(0, 128)
    g = load(gate, batch, m, k, M, H, 0, gate_row, gate_col)
    u = load(up, batch, m, k, M, H, 0, up_row, up_col)
    if KEEP:
        store_tiles(
            g, kept, kept_scale, batch, m_tile, k_tile, M, H,
            KEPT_POWER_OF_2, KEPT_INVERSE, KEPT_REST, KEPT_MANTISSA, KEPT_BIAS,
        )  # fmt: skip
        store_tiles(
            u, kept, kept_scale, batch + 1, m_tile, k_tile, M, H,
            KEPT_POWER_OF_2, KEPT_INVERSE, KEPT_REST, KEPT_MANTISSA, KEPT_BIAS,
        )  # fmt: skip
    value = g * (1.0 / (1.0 + tl.exp(-g))) * u
    if WEIGHTED:
        value = value * tl.load(weight + m * weight_step, mask=m < M, other=0.0)[:, None]
    store_tiles(value, data, scale, batch, m_tile, k_tile, M, H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def swiglu_backward(
    dh, gate, up, gate_scale, up_scale, weight, M, H, dh_row, dh_col, gate_row, gate_col, up_row, up_col,
    gate_scale_row, gate_scale_col, up_scale_row, up_scale_col, weight_step, data, scale, data_t, scale_t,
    KEPT: tl.constexpr, KEPT_MANTISSA: tl.constexpr, WEIGHTED: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: a square of d(gate) or of d(up). Two neighbours read the same inputs, the second from the L2 cache:
    one program would need more registers for both than there are.
    """
    of_up = tl.program_id(0) % 2
    batch, m_tile, k_tile = place(tl.program_id(0) // 2, M, H, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    value = load(dh, batch, m, k, M, H, 0, dh_row, dh_col)
    g = _load_half(
        gate, gate_scale, m, k, k_tile, M, H, gate_row, gate_col, gate_scale_row, gate_scale_col, KEPT, KEPT_MANTISSA
    )
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    if of_up:
        if WEIGHTED:
            value = value * tl.load(weight + m * weight_step, mask=m < M, other=0.0)[:, None]
        value = value * (g * sigmoid)
    else:
        u = _load_half(
            up, up_scale, m, k, k_tile, M, H, up_row, up_col, up_scale_row, up_scale_col, KEPT, KEPT_MANTISSA
        )
        if WEIGHTED:
            value = value * tl.load(weight + m * weight_step, mask=m < M, other=0.0)[:, None]
        value = value * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    k_tile += of_up * (H // 128)
    store_turned_tiles(
        value, data_t, scale_t, batch, m_tile, k_tile, M, 2 * H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS
    )
    store_tiles(value, data, scale, batch, m_tile, k_tile, M, 2 * H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def swiglu_turned(
    dh, gate, up, gate_scale, up_scale, weight, M, H, dh_row, dh_col, gate_row, gate_col, up_row, up_col,
    gate_scale_row, gate_scale_col, up_scale_row, up_scale_col, weight_step, data_t, scale_t, parts,
    KEPT: tl.constexpr, KEPT_MANTISSA: tl.constexpr, WEIGHTED: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: a square of h, turned, and its rows' parts of the gradients of their weights."""
    batch, m_tile, k_tile = place(tl.program_id(0), M, H, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    g = _load_half(
        gate, gate_scale, m, k, k_tile, M, H, gate_row, gate_col, gate_scale_row, gate_scale_col, KEPT, KEPT_MANTISSA
    )
    u = _load_half(up, up_scale, m, k, k_tile, M, H, up_row, up_col, up_scale_row, up_scale_col, KEPT, KEPT_MANTISSA)
    value = g * (1.0 / (1.0 + tl.exp(-g))) * u
    if WEIGHTED:
        of_weight = tl.sum(load(dh, batch, m, k, M, H, 0, dh_row, dh_col) * value, axis=1)
        tl.store(parts + m.to(tl.int64) * (H // 128) + k_tile, of_weight, mask=m < M)
        value = value * tl.load(weight + m * weight_step, mask=m < M, other=0.0)[:, None]
    store_turned_tiles(value, data_t, scale_t, batch, m_tile, k_tile, M, H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit
def _load_half(
    half, scale, m, k, k_tile, M, H, row, col, scale_row, scale_col, KEPT: tl.constexpr, KEPT_MANTISSA: tl.constexpr
):  # fmt: skip
    """A square of gate or of up, float32: values, or what was kept of them."""
    if KEPT:
        return load_tiles(half, scale, m, m < M, k, k_tile, H, row, col, scale_row, scale_col, KEPT_MANTISSA)
    else:
        return load(half, 0, m, k, M, H, 0, row, col)
