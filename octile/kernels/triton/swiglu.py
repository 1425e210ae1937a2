# mypy: allow-untyped-defs
"""SwiGLU and its gradients, quantized or in high precision; `octile.ops.swiglu` specifies what is bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import TILE
from octile.kernels.memory_layout import new_quantized_transposed, new_scale
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.blocks import rows_of_tile, store_tiles, store_tiles_transposed
from octile.kernels.triton.fp8_bits import as_encoded, quantize_constants
from octile.kernels.triton.launch_config import BLOCK_WARPS, ELEMENTWISE, EXACT, SWIGLU
from octile.kernels.triton.quantize_kernels import load, program_tile
from octile.kernels.triton.scaling import load_dequantized


def launch(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    weight: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute and quantize h from gate, up [M, H], any strides, and weight [M] → data [M, H], scale for 1×128.

    Rows from the last of `ends` on, int32 [G], contiguous, may be left out.
    """
    return _launch(gate, up, dtype, power_of_2, None, False, weight, ends)[:2]


def launch_and_save(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    saved_dtype: torch.dtype,
    saved_power_of_2: bool,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `launch`, and quantize gate and up → data [M, H], scale, saved [2, M, H], saved_scale, all for 1×128."""
    return _launch(gate, up, dtype, power_of_2, saved_dtype, saved_power_of_2, weight)


def _launch(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    saved_dtype: torch.dtype | None,
    saved_power_of_2: bool,
    weight: Tensor | None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, h), rows = gate.shape, SWIGLU["ROWS"]
    data, scale = torch.empty(gate.shape, dtype=dtype, device=gate.device), new_scale(gate, 1, 128)
    saved, saved_scale = data, scale  # not written
    if saved_dtype is not None:
        saved = torch.empty(2, m, h, dtype=saved_dtype, device=gate.device)
        saved_scale = new_scale(saved, 1, 128)
    if gate.numel():
        grid = (triton.cdiv(m, rows) * triton.cdiv(h, 128),)
        constants = (
            quantize_constants(dtype) | _prefixed("SAVED", quantize_constants(saved_dtype or dtype)) | SWIGLU | EXACT
        )
        with torch.cuda.device_of(gate):
            swiglu[grid](
                gate, up, scale if weight is None else weight, None if ends is None else ends[-1:], m, h,
                *gate.stride(), *up.stride(), 0 if weight is None else weight.stride(0), as_encoded(data), scale,
                as_encoded(saved), saved_scale, SAVE_INPUTS=saved_dtype is not None, WEIGHTED=weight is not None,
                POWER_OF_2=power_of_2, SAVED_POWER_OF_2=saved_power_of_2, **constants,
            )  # fmt: skip
    return data, scale, saved, saved_scale


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
    tiles: Tensor | None = None,
    h_in_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as `octile.ops.swiglu.swiglu_backward_quantize`, with dtypes in place of formats."""
    m, h = gate.shape
    data = gate.new_empty((m, 2 * h), dtype=dtype)
    scale, (data_t, scale_t) = new_scale(data, 1, 128), new_quantized_transposed(data, dtype, tiles)
    h_t, h_scale_t = new_quantized_transposed(gate, h_dtype, tiles, h_in_blocks)
    partials = torch.empty(0 if weight is None else m, h // 128, dtype=torch.float32, device=gate.device)
    if gate.numel():
        is_saved = gate_scale is not None
        mantissa = quantize_constants(gate.dtype)["MANTISSA"] if is_saved else 0
        gate, up = (as_encoded(t) if is_saved else t for t in (gate, up))
        gate_scale, up_scale, weights = (t if t is not None else scale for t in (gate_scale, up_scale, weight))
        inputs = (dh, gate, up, gate_scale, up_scale, weights, m, h, *dh.stride(), *gate.stride(), *up.stride())
        p = h_t.shape[1]
        inputs += (*gate_scale.stride(), *up_scale.stride(), weights.stride(0), scale if tiles is None else tiles, p)
        constants = {
            "SAVED": is_saved, "SAVED_MANTISSA": mantissa, "WEIGHTED": weight is not None, "GROUPED": tiles is not None,
        }  # fmt: skip
        blocks = triton.cdiv(p, 128) * triton.cdiv(h, 128)
        with torch.cuda.device_of(gate):
            swiglu_backward[(2 * blocks,)](
                *inputs, as_encoded(data), scale, as_encoded(data_t), scale_t,
                POWER_OF_2=power_of_2, **constants, **quantize_constants(dtype),
                **BLOCK_WARPS["swiglu_backward"], **EXACT,
            )  # fmt: skip
            swiglu_transposed[(blocks,)](
                *inputs, as_encoded(h_t), h_scale_t, partials,
                IN_BLOCKS=h_in_blocks, POWER_OF_2=h_power_of_2, **constants, **quantize_constants(h_dtype),
                **BLOCK_WARPS["swiglu_transposed"], **EXACT,
            )  # fmt: skip
    return data, scale, data_t, scale_t, h_t, h_scale_t, partials.sum(1)


def launch_high_precision(gate: Tensor, up: Tensor) -> Tensor:
    """Compute h [M, H] from gate, up [M, H], any strides, in their dtype."""
    (m, n), h = gate.shape, torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if h.numel():
        with torch.cuda.device_of(gate):
            swiglu_high_precision[(_elementwise_programs(m, n),)](
                gate, up, m, n, *gate.stride(), *up.stride(), h, **ELEMENTWISE, **EXACT
            )
    return h


def launch_high_precision_backward(dh: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute d(gate) and d(up), side by side [M, 2H], from dh, gate, up [M, H], any strides, in gate's dtype."""
    m, n = gate.shape
    d = torch.empty(m, 2 * n, dtype=gate.dtype, device=gate.device)
    if d.numel():
        with torch.cuda.device_of(gate):
            swiglu_high_precision_backward[(_elementwise_programs(m, n),)](
                dh, gate, up, m, n, *dh.stride(), *gate.stride(), *up.stride(), d, **ELEMENTWISE, **EXACT
            )
    return d


def _elementwise_programs(m: int, n: int) -> int:
    return triton.cdiv(m, ELEMENTWISE["ROWS"]) * triton.cdiv(n, ELEMENTWISE["COLS"])


def _prefixed(prefix: str, constants: dict[str, float]) -> dict[str, float]:
    """Constants of a second format in the same kernel."""
    return {f"{prefix}_{name}": value for name, value in constants.items()}


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    gate, up = cases.empty(cases.T, 2 * cases.N).chunk(2, dim=1)
    (saved_gate, saved_up), (gate_scale, up_scale), _ = cases.quantized(cases.T, cases.N, TILE, groups=2)
    weight, dh, tiles = cases.empty(cases.T, dtype=cases.FP32), cases.empty(cases.T, cases.N), cases.group_tiles()
    inputs, saved = (gate, up, None, None, None), (saved_gate, saved_up, gate_scale, up_scale, weight)
    formats = cases.E4M3, False, cases.E4M3, True
    return {
        "SwiGLU": lambda: launch(gate, up, cases.E4M3, False),
        "SwiGLU, inputs saved": lambda: launch_and_save(gate, up, cases.E4M3, True, cases.E4M3, False, weight),
        "SwiGLU backward": lambda: launch_backward(dh, *inputs, *formats),
        "SwiGLU backward, inputs saved": lambda: launch_backward(dh, *saved, *formats),
        "SwiGLU backward, h in blocks": lambda: launch_backward(dh, *inputs, *formats, None, True),
        "SwiGLU backward of groups, inputs saved": lambda: launch_backward(dh, *saved, *formats, tiles),
        "SwiGLU in high precision": lambda: launch_high_precision(gate, up),
        "SwiGLU backward in high precision": lambda: launch_high_precision_backward(dh, gate, up),
    }


@triton.jit(do_not_specialize=["M"])
def swiglu_high_precision(
    gate, up, M, H, gate_row, gate_col, up_row, up_col, h, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """A program takes ROWS×COLS."""
    _, m_tile, k_tile = program_tile(tl.program_id(0), M, H, ROWS, COLS)
    m = m_tile * ROWS + tl.arange(0, ROWS)
    k = k_tile * COLS + tl.arange(0, COLS)
    g = load(gate, 0, m, k, M, H, 0, gate_row, gate_col)
    value = g * (1.0 / (1.0 + tl.exp(-g))) * load(up, 0, m, k, M, H, 0, up_row, up_col)
    at = h + m.to(tl.int64)[:, None] * H + k[None, :]
    tl.store(at, value.to(h.dtype.element_ty), mask=(m < M)[:, None] & (k < H)[None, :])


@triton.jit(do_not_specialize=["M"])
def swiglu_high_precision_backward(
    dh, gate, up, M, H, dh_row, dh_col, gate_row, gate_col, up_row, up_col, d, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """A program computes ROWS×COLS of d(gate) and of d(up)."""
    _, m_tile, k_tile = program_tile(tl.program_id(0), M, H, ROWS, COLS)
    m = m_tile * ROWS + tl.arange(0, ROWS)
    k = k_tile * COLS + tl.arange(0, COLS)
    value = load(dh, 0, m, k, M, H, 0, dh_row, dh_col)
    g = load(gate, 0, m, k, M, H, 0, gate_row, gate_col)
    u = load(up, 0, m, k, M, H, 0, up_row, up_col)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    at = d + m.to(tl.int64)[:, None] * (2 * H) + k[None, :]
    inside = (m < M)[:, None] & (k < H)[None, :]
    d_gate = value * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(at, d_gate.to(d.dtype.element_ty), mask=inside)
    tl.store(at + H, (value * (g * sigmoid)).to(d.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def swiglu(
    gate, up, weight, end, M, H, gate_row, gate_col, up_row, up_col, weight_step, data, scale, saved, saved_scale,
    ROWS: tl.constexpr, SAVE_INPUTS: tl.constexpr, WEIGHTED: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    SAVED_POWER_OF_2: tl.constexpr, SAVED_INVERSE: tl.constexpr, SAVED_REST: tl.constexpr, SAVED_MANTISSA: tl.constexpr,
    SAVED_BIAS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS×128, or nothing where they all lie behind the end."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), M, H, ROWS, 128)
    last = M
    if end is not None:
        last = tl.load(end)
    if m_tile * ROWS >= last:
        return
    m = m_tile * ROWS + tl.arange(0, ROWS)
    k = k_tile * 128 + tl.arange(0, 128)
    g = load(gate, batch, m, k, M, H, 0, gate_row, gate_col)
    u = load(up, batch, m, k, M, H, 0, up_row, up_col)
    if SAVE_INPUTS:
        store_tiles(
            g, saved, saved_scale, batch, m_tile * ROWS, M, k_tile, M, H,
            SAVED_POWER_OF_2, SAVED_INVERSE, SAVED_REST, SAVED_MANTISSA, SAVED_BIAS,
        )  # fmt: skip
        store_tiles(
            u, saved, saved_scale, batch + 1, m_tile * ROWS, M, k_tile, M, H,
            SAVED_POWER_OF_2, SAVED_INVERSE, SAVED_REST, SAVED_MANTISSA, SAVED_BIAS,
        )  # fmt: skip
    value = g * (1.0 / (1.0 + tl.exp(-g))) * u
    if WEIGHTED:
        value = value * tl.load(weight + m * weight_step, mask=m < M, other=0.0)[:, None]
    store_tiles(value, data, scale, batch, m_tile * ROWS, M, k_tile, M, H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M", "P"])
def swiglu_backward(
    dh, gate, up, gate_scale, up_scale, weight, M, H, dh_row, dh_col, gate_row, gate_col, up_row, up_col,
    gate_scale_row, gate_scale_col, up_scale_row, up_scale_col, weight_step, tiles, P,
    data, scale, data_t, scale_t,
    SAVED: tl.constexpr, SAVED_MANTISSA: tl.constexpr, WEIGHTED: tl.constexpr, GROUPED: tl.constexpr,
    POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program computes a 128×128 block of d(gate) or of d(up).

    Two consecutive programs read the same inputs, the second from the L2 cache: both blocks would not fit into the
    registers of one program.
    """
    is_up = tl.program_id(0) % 2
    batch, m_tile, k_tile = program_tile(tl.program_id(0) // 2, P, H, 128, 128)
    m_first, m_end = rows_of_tile(tiles, m_tile, M, GROUPED)
    m = m_first + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    value = load(dh, batch, m, k, m_end, H, 0, dh_row, dh_col)
    g = _load_input(
        gate, gate_scale, m, m_end, k, k_tile, H, gate_row, gate_col, gate_scale_row, gate_scale_col,
        SAVED, SAVED_MANTISSA,
    )  # fmt: skip
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    if is_up:
        if WEIGHTED:
            value = value * tl.load(weight + m * weight_step, mask=m < m_end, other=0.0)[:, None]
        value = value * (g * sigmoid)
    else:
        u = _load_input(
            up, up_scale, m, m_end, k, k_tile, H, up_row, up_col, up_scale_row, up_scale_col, SAVED, SAVED_MANTISSA
        )
        if WEIGHTED:
            value = value * tl.load(weight + m * weight_step, mask=m < m_end, other=0.0)[:, None]
        value = value * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    k_tile += is_up * (H // 128)
    store_tiles_transposed(
        value, data_t, scale_t, batch, m_tile, k_tile, P, 2 * H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS
    )
    store_tiles(value, data, scale, batch, m_first, m_end, k_tile, M, 2 * H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["M", "P"])
def swiglu_transposed(
    dh, gate, up, gate_scale, up_scale, weight, M, H, dh_row, dh_col, gate_row, gate_col, up_row, up_col,
    gate_scale_row, gate_scale_col, up_scale_row, up_scale_col, weight_step, tiles, P,
    data_t, scale_t, partials,
    SAVED: tl.constexpr, SAVED_MANTISSA: tl.constexpr, WEIGHTED: tl.constexpr, GROUPED: tl.constexpr,
    IN_BLOCKS: tl.constexpr, POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program recomputes a 128×128 block of h, stores it transposed, and computes partials of d(weight)."""
    batch, m_tile, k_tile = program_tile(tl.program_id(0), P, H, 128, 128)
    m_first, m_end = rows_of_tile(tiles, m_tile, M, GROUPED)
    m = m_first + tl.arange(0, 128)
    k = k_tile * 128 + tl.arange(0, 128)
    g = _load_input(
        gate, gate_scale, m, m_end, k, k_tile, H, gate_row, gate_col, gate_scale_row, gate_scale_col,
        SAVED, SAVED_MANTISSA,
    )  # fmt: skip
    u = _load_input(
        up, up_scale, m, m_end, k, k_tile, H, up_row, up_col, up_scale_row, up_scale_col, SAVED, SAVED_MANTISSA
    )
    value = g * (1.0 / (1.0 + tl.exp(-g))) * u
    if WEIGHTED:
        dweight = tl.sum(load(dh, batch, m, k, m_end, H, 0, dh_row, dh_col) * value, axis=1)
        tl.store(partials + m.to(tl.int64) * (H // 128) + k_tile, dweight, mask=m < m_end)
        value = value * tl.load(weight + m * weight_step, mask=m < m_end, other=0.0)[:, None]
    store_tiles_transposed(
        value, data_t, scale_t, batch, m_tile, k_tile, P, H, POWER_OF_2, INVERSE, REST, MANTISSA, BIAS, IN_BLOCKS
    )


@triton.jit
def _load_input(
    matrix, scale, m, m_end, k, k_tile, H, row, col, scale_row, scale_col,
    SAVED: tl.constexpr, SAVED_MANTISSA: tl.constexpr,
):  # fmt: skip
    """Load 128 columns of gate or up, rows m up to m_end, as float32; with SAVED, dequantize what was saved."""
    is_row = m < m_end
    if SAVED:
        return load_dequantized(matrix, scale, m, is_row, k, k_tile, H, row, col, scale_row, scale_col, SAVED_MANTISSA)
    else:
        return load(matrix, 0, m, k, m_end, H, 0, row, col)
