"""Block quantisation: x ≈ data · scale, one scale a block; bit for bit what `octile.ops.quantize` specifies.

A block that fits into a program is read once: its largest magnitude, its scale and its codes come from registers. A
larger one (a whole tensor) is read twice: first every program raises the block's largest magnitude by an atomic
maximum, whose result does not depend on the order, then the block is cast.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from octile.kernels.triton.codes import FORMAT_OF, constants
from octile.kernels.triton.machine import machine
from octile.kernels.triton.quantize_kernels import block_amax, cast_block, dequantize, quantize_blocks

LARGEST_TILE = 16384  # elements that 8 warps hold in 64 registers a thread
EXACT = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where the specification rounds twice
PART = 8192  # elements that one program takes of a block too large for one


def launch(x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantises x in blocks of block_rows × block_cols.

    Args:
        x: [..., M, K] float32, bfloat16 or float16, any strides.
        dtype: of the data: float8_e4m3fn, float8_e5m2 or int8.

    Returns:
        data [..., M, K] and scale [..., ⌈M/R⌉, ⌈K/C⌉] float32, both contiguous.
    """
    *batch, m, k = x.shape
    blocks = (triton.cdiv(m, block_rows), triton.cdiv(k, block_cols))
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = x.new_empty(*batch, *blocks, dtype=torch.float32)
    if x.numel() == 0:
        return data, scale

    block_rows, block_cols = min(block_rows, m), min(block_cols, k)
    x = x.reshape(-1, m, k)
    codes = _codes(data)
    options = {"POWER_OF_2": power_of_2} | _format(dtype) | EXACT
    with torch.cuda.device_of(x):
        if tile := _tile_of_whole_blocks(m, k, block_rows, block_cols):
            grid = (x.shape[0] * triton.cdiv(m, tile["ROWS"]) * triton.cdiv(k, tile["COLS"]),)
            quantize_blocks[grid](x, codes, scale, m, k, *x.stride(), *blocks, **tile, **options)
        else:
            amax = torch.zeros_like(scale, dtype=torch.int32)
            part = _part(block_rows, block_cols)
            arguments = (x, amax, m, k, *x.stride(), *blocks, block_rows, block_cols)
            grid = (scale.numel() * triton.cdiv(block_rows, part["ROWS"]) * triton.cdiv(block_cols, part["COLS"]),)
            block_amax[grid](*arguments, **part, **EXACT)
            cast_block[grid](*arguments, codes, scale, **part, **options)
    return data, scale


def launch_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    """data [..., M, K] times its scale [..., ⌈M/R⌉, ⌈K/C⌉] → [..., M, K] in out_dtype."""
    m, k = data.shape[-2:]
    out = torch.empty(data.shape, dtype=out_dtype, device=data.device)
    if out.numel() == 0:
        return out
    codes = data if data.dtype == torch.int8 else data.view(torch.uint8)
    codes = codes.reshape(-1, m, k)
    scale = scale.reshape(-1, *scale.shape[-2:])
    grid = (codes.shape[0] * triton.cdiv(m, 32) * triton.cdiv(k, 128),)
    with torch.cuda.device_of(data):
        dequantize[grid](
            codes, scale, out, m, k, *codes.stride(), *scale.stride(), block_rows, block_cols,
            MANTISSA=constants(FORMAT_OF[data.dtype])["MANTISSA"], ROWS=32, COLS=128, **EXACT,
        )  # fmt: skip
    return out


def _tile_of_whole_blocks(m: int, k: int, block_rows: int, block_cols: int) -> dict[str, int] | None:
    """The one-pass kernel's tile and blocks, all powers of two, or None where a block is none or too large."""
    # a block that covers a whole side may as well end at the next power of two
    r = block_rows if block_rows < m else triton.next_power_of_2(m)
    c = block_cols if block_cols < k else triton.next_power_of_2(k)
    if r & (r - 1) or c & (c - 1):
        return None
    cols = max(c, 64 if r >= 64 else 128)  # 128 bytes a row at least, so that loads and stores fill their sectors
    rows = max(r, 4096 // cols)
    if rows * cols > LARGEST_TILE:
        return None
    return {"R": r, "C": c, "ROWS": rows, "COLS": cols, "num_warps": 8 if rows * cols == LARGEST_TILE else 4}


def _part(block_rows: int, block_cols: int) -> dict[str, int]:
    cols = min(triton.next_power_of_2(block_cols), 1024)
    return {"ROWS": min(triton.next_power_of_2(block_rows), PART // cols), "COLS": cols}


def _codes(data: Tensor) -> Tensor:
    """The same memory, as integers where the GPU has no cast to FP8."""
    return data if machine(data.device).fp8 or data.dtype == torch.int8 else data.view(torch.uint8)


def _format(dtype: torch.dtype) -> dict[str, Any]:
    fmt = FORMAT_OF[dtype]
    return {"MAX": fmt.max} | constants(fmt)
