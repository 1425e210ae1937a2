# mypy: allow-untyped-defs
"""RMSNorm, quantized or in high precision, and its gradients; `octile.ops.norm` specifies what is bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton import launch_config, partial_sums
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.fp8_bits import as_encoded, quantize_constants
from octile.kernels.triton.launch_config import EXACT
from octile.kernels.triton.quantize_kernels import load
from octile.kernels.triton.scaling import divide, magnitude, round_to_format, scale_from_amax


def launch(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, power_of_2: bool, values: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize and quantize x [M, K], any strides → data [M, K], scale for 1×128, rstd [M], y [M, K] or [0, K]."""
    m, k = x.shape
    data, scale = torch.empty(x.shape, dtype=dtype, device=x.device), new_scale(x, 1, 128)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    y = x.new_empty(m if values else 0, k)
    if m:
        shape = _rows_of_program(k, launch_config.NORM)
        with torch.cuda.device_of(x):
            rms_norm[(triton.cdiv(m, shape["ROWS"]),)](
                x, weight, eps, m, k, *x.stride(), weight.stride(0), as_encoded(data), scale, rstd, y,
                VALUES=values, POWER_OF_2=power_of_2, **shape, **quantize_constants(dtype), **EXACT,
            )  # fmt: skip
    return data, scale, rstd, y


def launch_high_precision(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize x [M, K], any strides → y [M, K] in x's dtype, rstd [M]."""
    m, k = x.shape
    y, rstd = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(m, dtype=torch.float32)
    if m:
        shape = _rows_of_program(k, launch_config.NORM)
        with torch.cuda.device_of(x):
            rms_norm_high_precision[(triton.cdiv(m, shape["ROWS"]),)](
                x, weight, eps, m, k, *x.stride(), weight.stride(0), y, rstd, **shape, **EXACT
            )
    return y, rstd


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    add: Tensor | None = None,
    dy2: Tensor | None = None,
    dy3: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dy, dy2, dy3, x, add [M, K], any strides, and rstd [M] → dx + add [M, K] in x's dtype, dweight [K] float32."""
    m, k = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = _rows_of_program(k, launch_config.NORM_BACKWARD_OF_SEVERAL_ROWS)
    if shape["ROWS"] == 1:
        shape = _rows_of_program(k, launch_config.NORM_BACKWARD)
    # as many programs as saturate the memory; each sums the weight's gradient over its rows, in order
    programs_per_sm = 2 if shape["ROWS"] > 1 else launch_config.NORM_BACKWARD_PROGRAMS
    programs = min(triton.cdiv(m, shape["ROWS"]), programs_per_sm * device_properties(x.device).num_sms)
    partials = torch.empty(programs, k, dtype=torch.float32, device=x.device)
    # those that are missing are not read
    others = [x if t is None else t for t in (add, dy2, dy3)]
    given = {"ADD": add is not None, "DY2": dy2 is not None, "DY3": dy3 is not None}
    if m and k:
        with torch.cuda.device_of(x):
            rms_norm_backward[(programs,)](
                dy, x, weight, rstd, *others, m, k, *dy.stride(), *x.stride(), weight.stride(0), rstd.stride(0),
                *(step for t in others for step in t.stride()), dx, partials, **given, **shape, **EXACT,
            )  # fmt: skip
    return dx, partial_sums.launch(partials)


def _rows_of_program(k: int, sizes: launch_config.RowSizes) -> dict[str, int]:
    """The rows that a program takes at a time, the tiles of a row, and the warps of a program."""
    tiles = triton.next_power_of_2(triton.cdiv(max(k, 1), 128))
    rows = max(sizes.elements // (128 * tiles), 1)
    warps = min(max(rows * tiles * 128 // sizes.elements_per_warp, 4), sizes.max_warps)
    return {"ROWS": rows, "TILES": tiles, "num_warps": warps}


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x, weight, ragged = cases.empty(cases.T, cases.K), cases.empty(cases.K), cases.ragged()
    rstd, master = cases.empty(cases.T, dtype=cases.FP32), cases.empty(cases.K, dtype=cases.FP32)
    return {
        "RMSNorm": lambda: launch(x, weight, 1e-6, cases.E4M3, False, True),
        "RMSNorm in high precision": lambda: launch_high_precision(x, master, 1e-6),
        "RMSNorm backward": lambda: launch_backward(x, x, weight, rstd),
        "RMSNorm backward of three gradients": lambda: launch_backward(x, x, weight, rstd, x, x, x),
        "ragged: RMSNorm": lambda: launch(ragged, cases.empty(ragged.shape[1]), 1e-6, cases.E4M3, False),
    }


@triton.jit(do_not_specialize=["M"])
def rms_norm(
    x, weight, eps, M, K, x_row, x_col, weight_step, data, scale, rstd, y,
    ROWS: tl.constexpr, TILES: tl.constexpr, VALUES: tl.constexpr, POWER_OF_2: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS whole rows of TILES tiles."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, TILES * 128)
    value = _normalize(x, weight, eps, m, k, M, K, x_row, x_col, weight_step, rstd)
    at = m.to(tl.int64)[:, None] * K + k[None, :]
    inside = (m < M)[:, None] & (k < K)[None, :]
    if VALUES:
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)

    tiles = tl.reshape(value, [ROWS, TILES, 128])
    tile_scale = scale_from_amax(tl.max(magnitude(tiles), axis=2), INVERSE, REST, POWER_OF_2)
    scaled = divide(tiles, tile_scale[:, :, None], POWER_OF_2)
    encoded = round_to_format(scaled, data.dtype.element_ty, MANTISSA, BIAS)
    tl.store(data + at, tl.reshape(encoded, [ROWS, TILES * 128]), mask=inside)
    tile = tl.arange(0, TILES)
    at = tile[None, :] * (tl.cdiv(M, 4) * 4) + m[:, None]
    tl.store(scale + at, tile_scale, mask=(m < M)[:, None] & (tile < tl.cdiv(K, 128))[None, :])


@triton.jit(do_not_specialize=["M"])
def rms_norm_high_precision(
    x, weight, eps, M, K, x_row, x_col, weight_step, y, rstd, ROWS: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """A program takes ROWS whole rows of TILES tiles."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, TILES * 128)
    value = _normalize(x, weight, eps, m, k, M, K, x_row, x_col, weight_step, rstd)
    at = y + m.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, value.to(y.dtype.element_ty), mask=(m < M)[:, None] & (k < K)[None, :])


@triton.jit
def _normalize(x, weight, eps, m, k, M, K, x_row, x_col, weight_step, rstd):
    """Load rows m, normalize them in FP32, and store their rstd."""
    value = load(x, 0, m, k, M, K, 0, x_row, x_col)
    rstd_rows = tl.rsqrt(tl.sum(value * value, axis=1) / K + eps)
    tl.store(rstd + m, rstd_rows, mask=m < M)
    w = tl.load(weight + k * weight_step, mask=k < K, other=0.0).to(tl.float32)
    return value * rstd_rows[:, None] * w[None, :]


@triton.jit(do_not_specialize=["M"])
def rms_norm_backward(
    dy, x, weight, rstd, add, dy2, dy3, M, K, dy_row, dy_col, x_row, x_col, weight_step, rstd_step,
    add_row, add_col, dy2_row, dy2_col, dy3_row, dy3_col, dx, partials,
    ADD: tl.constexpr, DY2: tl.constexpr, DY3: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows at a time, in steps of the grid, and sums its partial of the weight's gradient."""
    k = tl.arange(0, TILES * 128)
    w = tl.load(weight + k * weight_step, mask=k < K, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, TILES * 128], tl.float32)  # summed over the rows once, after the loop
    start = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    next_dy = _load_rows(dy, start, k, M, K, dy_row, dy_col, ROWS)
    next_x = _load_rows(x, start, k, M, K, x_row, x_col, ROWS)
    next_rstd = _load_rstd(rstd, start, M, rstd_step, ROWS)
    if DY2:
        next_dy2 = _load_rows(dy2, start, k, M, K, dy2_row, dy2_col, ROWS)
    if DY3:
        next_dy3 = _load_rows(dy3, start, k, M, K, dy3_row, dy3_col, ROWS)
    for first in range(start, M, step):
        if ADD:
            other = _load_rows(add, first, k, M, K, add_row, add_col, ROWS)
        gradient = next_dy.to(tl.float32)
        if DY2:
            gradient += next_dy2.to(tl.float32)
        if DY3:
            gradient += next_dy3.to(tl.float32)
        rstd_rows = next_rstd[:, None]
        normalized = next_x.to(tl.float32) * rstd_rows
        # the loads of the next rows are in flight while these are summed
        next_dy = _load_rows(dy, first + step, k, M, K, dy_row, dy_col, ROWS)
        next_x = _load_rows(x, first + step, k, M, K, x_row, x_col, ROWS)
        next_rstd = _load_rstd(rstd, first + step, M, rstd_step, ROWS)
        if DY2:
            next_dy2 = _load_rows(dy2, first + step, k, M, K, dy2_row, dy2_col, ROWS)
        if DY3:
            next_dy3 = _load_rows(dy3, first + step, k, M, K, dy3_row, dy3_col, ROWS)
        dweight += gradient * normalized
        dnormalized = gradient * w[None, :]
        value = (dnormalized - normalized * (tl.sum(dnormalized * normalized, axis=1) / K)[:, None]) * rstd_rows
        if ADD:
            value += other.to(tl.float32)
        m = first + tl.arange(0, ROWS)
        at = m.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(dx + at, value.to(dx.dtype.element_ty), mask=(m < M)[:, None] & (k < K)[None, :])
    tl.store(partials + tl.program_id(0) * K + k, tl.sum(dweight, axis=0), mask=k < K)


@triton.jit
def _load_rows(t, first, k, M, K, row_step, column_step, ROWS: tl.constexpr):
    """Load rows of t in its dtype, zeros past the last row."""
    m = first + tl.arange(0, ROWS)
    at = m.to(tl.int64)[:, None] * row_step + k.to(tl.int64)[None, :] * column_step
    return tl.load(t + at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _load_rstd(rstd, first, M, step, ROWS: tl.constexpr):
    m = first + tl.arange(0, ROWS)
    return tl.load(rstd + m * step, mask=m < M, other=0.0)
