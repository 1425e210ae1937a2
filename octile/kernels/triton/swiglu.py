# mypy: allow-untyped-defs
"""SwiGLU and its gradients, cast as they are made; `octile.ops.swiglu` specifies it and says what is bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.storage import new_scale, new_transposed
from octile.kernels.triton.codes import as_codes, cast_constants
from octile.kernels.triton.quantize_kernels import load, place
from octile.kernels.triton.squares import store_tiles, store_turned_tiles
from octile.kernels.triton.tuning import EXACT, SQUARES, SWIGLU


def launch(gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """gate, up [M, H], any strides → data [M, H], scale in 1×128."""
    (m, h), rows = gate.shape, SWIGLU["ROWS"]
    data, scale = torch.empty(gate.shape, dtype=dtype, device=gate.device), new_scale(gate, 1, 128)
    if gate.numel():
        grid = (triton.cdiv(m, rows) * triton.cdiv(h, 128),)
        constants = cast_constants(dtype) | SWIGLU | EXACT
        with torch.cuda.device_of(gate):
            swiglu[grid](
                gate, up, m, h, *gate.stride(), *up.stride(), as_codes(data), scale, POWER_OF_2=power_of_2, **constants
            )
    return data, scale


def launch_backward(
    dh: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh, gate, up [M, H], H a multiple of 128, any strides → data [M, 2H], scale; data_t [2H, M], scale_t."""
    m, h = gate.shape
    data = gate.new_empty((m, 2 * h), dtype=dtype)
    scale, data_t, scale_t = new_scale(data, 1, 128), new_transposed(data, dtype), new_scale(data, 128, 1).mT
    if gate.numel():
        grid = (2 * triton.cdiv(m, 128) * triton.cdiv(h, 128),)
        constants = cast_constants(dtype) | SQUARES["swiglu_backward"] | EXACT
        with torch.cuda.device_of(gate):
            swiglu_backward[grid](
                dh, gate, up, m, h, *dh.stride(), *gate.stride(), *up.stride(),
                as_codes(data), scale, as_codes(data_t), scale_t, POWER_OF_2=power_of_2, **constants,
            )  # fmt: skip
    return data, scale, data_t, scale_t


@triton.jit(do_not_specialize=["M"])
def swiglu(
    gate, up, M, H, gate_row, gate_col, up_row, up_col, data, scale,
    ROWS: tl.constexpr, POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS×128."""
    batch, m_tile, k_tile = place(tl.program_id(0), M, H, ROWS, 128)
    m = m_tile * ROWS + tl.arange(0, ROWS)
    k = k_tile * 128 + tl.arange(0, 128)
    g = load(gate, batch, m, k, M, H, 0, gate_row, gate_col)
    u = load(up, batch, m, k, M, H, 0, up_row, up_col)
    value = g * (1.0 / (1.0 + tl.exp(-g))) * u
    store_tiles(value, data, scale, batch, m_tile, k_tile, M, H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M"])
def swiglu_backward(
    dh, gate, up, M, H, dh_row, dh_col, gate_row, gate_col, up_row, up_col, data, scale, data_t, scale_t,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: a square of d(gate) or of d(up). Two neighbours read the same inputs, the second from the L2 cache:
    one program would need more registers for both than there are.
    """
    of_up = tl.program_id(0) % 2
    batch, m_tile, k_tile = place(tl.program_id(0) // 2, M, H, 128, 128)
    m = m_tile * 128 + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    d = load(dh, batch, m, k, M, H, 0, dh_row, dh_col)
    g = load(gate, batch, m, k, M, H, 0, gate_row, gate_col)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    if of_up:
        value = d * (g * sigmoid)
    else:
        value = d * load(up, batch, m, k, M, H, 0, up_row, up_col) * sigmoid * (1.0 + g * (1.0 - sigmoid))
    k_tile += of_up * (H // 128)
    store_turned_tiles(
        value, data_t, scale_t, batch, m_tile, k_tile, M, 2 * H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS
    )
    store_tiles(value, data, scale, batch, m_tile, k_tile, M, 2 * H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)
