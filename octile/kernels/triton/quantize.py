"""Block quantization, x ≈ data · scale with one scale per block, bit for bit as `octile.ops.quantize` specifies.

A block that fits into a program is read once: amax, scale and data are computed in registers. A larger block, such as a
whole tensor, is read twice: first all programs update its amax with an atomic maximum, whose result does not depend on
the order; then the block is quantized.
"""

import torch
import triton
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton import launch_config
from octile.kernels.triton.fp8_bits import FORMAT_OF_DTYPE, as_encoded, format_constants, quantize_constants
from octile.kernels.triton.launch_config import ELEMENTWISE, EXACT
from octile.kernels.triton.layout import is_vectorizable
from octile.kernels.triton.quantize_kernels import (
    block_amax,
    dequantize,
    quantize_blocks,
    quantize_large_block,
    quantize_with_scale,
)

PART = 8192  # elements that a program takes of a block that is too large for one program


def launch(x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize x in blocks of block_rows × block_cols.

    Args:
        x: [..., M, K] float32, bfloat16 or float16, any strides.
        dtype: dtype of data: float8_e4m3fn, float8_e5m2, int8, or uint8 for packed E5M6.

    Returns:
        data [..., M, K] (E5M6: [..., M, 3K/2]), contiguous, and scale [..., ⌈M/R⌉, ⌈K/C⌉] float32 from `new_scale`.

    Raises:
        ValueError: a block of E5M6 that is too large for a program has an odd number of columns.
    """
    m, k = x.shape[-2:]
    blocks = (triton.cdiv(m, block_rows), triton.cdiv(k, block_cols))
    data = x.new_empty(*x.shape[:-1], k // 2 * 3 if dtype == torch.uint8 else k, dtype=dtype)
    scale = new_scale(x, block_rows, block_cols)
    if x.numel() == 0:
        return data, scale

    block_rows, block_cols = min(block_rows, m), min(block_cols, k)
    x = x.reshape(-1, m, k)
    encoded = as_encoded(data)
    scale_strides = scale.view(-1, *blocks).stride()
    options = {"POWER_OF_2": power_of_2} | quantize_constants(dtype) | EXACT
    with torch.cuda.device_of(x):
        max_elements = launch_config.MAX_TILE_ELEMENTS if is_vectorizable(x) else launch_config.MAX_RAGGED_TILE_ELEMENTS
        if tile := _tile_of_whole_blocks(m, k, block_rows, block_cols, max_elements):
            if dtype == torch.uint8 and k % 8 == 0:
                encoded = encoded.view(torch.int32)  # 8 values in three words
            grid = (x.shape[0] * triton.cdiv(m, tile["ROWS"]) * triton.cdiv(k, tile["COLS"]),)
            quantize_blocks[grid](x, encoded, scale, m, k, *x.stride(), *blocks, *scale_strides, **tile, **options)
        else:
            if dtype == torch.uint8 and block_cols % 2:
                raise ValueError(
                    f"blocks of E5M6 must extend over an even number of columns on a GPU, not {block_cols}"
                )
            amax = x.new_zeros(scale.shape, dtype=torch.int32)
            part = _part(block_rows, block_cols)
            arguments = (x, amax, m, k, *x.stride(), *blocks, block_rows, block_cols)
            grid = (scale.numel() * triton.cdiv(block_rows, part["ROWS"]) * triton.cdiv(block_cols, part["COLS"]),)
            block_amax[grid](*arguments, **part, **EXACT)
            quantize_large_block[grid](*arguments, encoded, scale, *scale_strides, **part, **options)
    return data, scale


def launch_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize x [..., M, K], any strides, with one given scale [1] → data [..., M, K]; saturates, NaN stays NaN."""
    m, k = x.shape[-2:]
    fmt = FORMAT_OF_DTYPE[dtype]
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        x = x.reshape(-1, m, k)
        grid = (len(x) * triton.cdiv(m, ELEMENTWISE["ROWS"]) * triton.cdiv(k, ELEMENTWISE["COLS"]),)
        with torch.cuda.device_of(x):
            quantize_with_scale[grid](
                x, m, k, *x.stride(), as_encoded(data), scale,
                MAX=fmt.max, **format_constants(fmt), **ELEMENTWISE, **EXACT,
            )  # fmt: skip
    return data


def launch_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    """Dequantize data [..., M, K] with scale [..., ⌈M/R⌉, ⌈K/C⌉] → [..., M, K] in out_dtype."""
    m, k = data.shape[-2:]
    if data.dtype == torch.uint8:
        k = k // 3 * 2
    out = torch.empty(*data.shape[:-1], k, dtype=out_dtype, device=data.device)
    if out.numel() == 0:
        return out
    encoded = as_encoded(data).reshape(-1, m, data.shape[-1])
    scale = scale.reshape(-1, *scale.shape[-2:])
    grid = (len(encoded) * triton.cdiv(m, ELEMENTWISE["ROWS"]) * triton.cdiv(k, ELEMENTWISE["COLS"]),)
    with torch.cuda.device_of(data):
        dequantize[grid](
            encoded, scale, out, m, k, *encoded.stride(), *scale.stride(), block_rows, block_cols,
            MANTISSA=format_constants(FORMAT_OF_DTYPE[data.dtype])["MANTISSA"], **ELEMENTWISE, **EXACT,
        )  # fmt: skip
    return out


def _tile_of_whole_blocks(m: int, k: int, block_rows: int, block_cols: int, max_elements: int) -> dict[str, int] | None:
    """Tile and block of the one-pass kernel, all powers of two; None if a block is not a power of two or too large."""
    # a block that covers a whole dimension may be rounded up to a power of two
    r = block_rows if block_rows < m else triton.next_power_of_2(m)
    c = block_cols if block_cols < k else triton.next_power_of_2(k)
    if r & (r - 1) or c & (c - 1):
        return None
    cols = max(c, 64 if r >= 64 else 128)  # at least 128 bytes per row, so that loads and stores fill sectors
    rows = max(r, launch_config.MIN_TILE_ELEMENTS // cols)
    if rows * cols > max_elements:
        return None
    return {"R": r, "C": c, "ROWS": rows, "COLS": cols, "num_warps": rows * cols // launch_config.ELEMENTS_PER_WARP}


def _part(block_rows: int, block_cols: int) -> dict[str, int]:
    cols = min(triton.next_power_of_2(block_cols), 1024)
    rows = min(triton.next_power_of_2(block_rows), PART // cols)
    return {"ROWS": rows, "COLS": cols, "num_warps": max(rows * cols // launch_config.ELEMENTS_PER_WARP, 4)}


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x = cases.empty(cases.T, cases.K)
    e5m6 = cases.empty(cases.T, cases.K * 3 // 2, dtype=torch.uint8)
    scale = cases.empty(cases.T, cases.K // 128, dtype=cases.FP32)
    return {
        "quantize 1×128": lambda: launch(x, *TILE, cases.E4M3, True),
        "quantize 128×1": lambda: launch(x, *COLUMN_TILE, cases.E4M3, False),
        "quantize 128×128": lambda: launch(cases.empty(cases.N, cases.K, dtype=cases.FP32), *BLOCK, cases.E4M3, False),
        "quantize a row": lambda: launch(x, 1, cases.K, cases.E4M3, False),
        "quantize a tensor": lambda: launch(x, cases.T, cases.K, cases.E4M3, False),
        "dequantize": lambda: launch_dequantize(*cases.quantized(cases.N, cases.K, BLOCK)[:2], *BLOCK, cases.BF16),
        "quantize to E5M6": lambda: launch(x, *TILE, torch.uint8, True),
        "dequantize E5M6": lambda: launch_dequantize(e5m6, scale, *TILE, cases.BF16),
        "scale given": lambda: launch_with_scale(x, cases.empty(1, dtype=cases.FP32), cases.E4M3),
        "ragged: quantize to E5M6": lambda: launch(cases.ragged(), *TILE, torch.uint8, True),
    }
