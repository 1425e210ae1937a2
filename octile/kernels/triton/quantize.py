"""Block quantisation: x ≈ data · scale, one scale a block; bit for bit what `octile.ops.quantize` specifies.

A block that fits into a program is read once: its largest magnitude, its scale and its codes come from registers. A
larger one (a whole tensor) is read twice: first every program raises the block's largest magnitude by an atomic
maximum, whose result does not depend on the order, then the block is cast.
"""

import torch
import triton
from torch import Tensor

from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import launch_config
from octile.kernels.triton.fp8_bits import FORMAT_OF, as_codes, cast_constants, constants
from octile.kernels.triton.launch_config import ELEMENTWISE, EXACT
from octile.kernels.triton.layout import in_vectors
from octile.kernels.triton.quantize_kernels import block_amax, cast_block, cast_with_scale, dequantize, quantize_blocks

PART = 8192  # elements that one program takes of a block too large for one


def launch(x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantises x in blocks of block_rows × block_cols.

    Args:
        x: [..., M, K] float32, bfloat16 or float16, any strides.
        dtype: of the data: float8_e4m3fn, float8_e5m2, int8, or uint8: packed E5M6.

    Returns:
        data [..., M, K] (E5M6: [..., M, 3K/2]), contiguous, and scale [..., ⌈M/R⌉, ⌈K/C⌉] float32, stored as
        `new_scale` says.
    """
    m, k = x.shape[-2:]
    blocks = (triton.cdiv(m, block_rows), triton.cdiv(k, block_cols))
    data = x.new_empty(*x.shape[:-1], k // 2 * 3 if dtype == torch.uint8 else k, dtype=dtype)
    scale = new_scale(x, block_rows, block_cols)
    if x.numel() == 0:
        return data, scale

    block_rows, block_cols = min(block_rows, m), min(block_cols, k)
    x = x.reshape(-1, m, k)
    codes = as_codes(data)
    scale_strides = scale.view(-1, *blocks).stride()
    options = {"POWER_OF_2": power_of_2} | cast_constants(dtype) | EXACT
    with torch.cuda.device_of(x):
        most = launch_config.LARGEST_TILE if in_vectors(x) else launch_config.LARGEST_RAGGED_TILE
        if tile := _tile_of_whole_blocks(m, k, block_rows, block_cols, most):
            if dtype == torch.uint8 and k % 8 == 0:
                codes = codes.view(torch.int32)  # eight codes in three words
            grid = (x.shape[0] * triton.cdiv(m, tile["ROWS"]) * triton.cdiv(k, tile["COLS"]),)
            quantize_blocks[grid](x, codes, scale, m, k, *x.stride(), *blocks, *scale_strides, **tile, **options)
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
            cast_block[grid](*arguments, codes, scale, *scale_strides, **part, **options)
    return data, scale


def launch_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., M, K], any strides, in the one scale [1] that is given → data [..., M, K]; saturates, NaN stays."""
    m, k = x.shape[-2:]
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        x = x.reshape(-1, m, k)
        grid = (len(x) * triton.cdiv(m, ELEMENTWISE["ROWS"]) * triton.cdiv(k, ELEMENTWISE["COLS"]),)
        with torch.cuda.device_of(x):
            cast_with_scale[grid](
                x, m, k, *x.stride(), as_codes(data), scale, MAX=FORMAT_OF[dtype].max, **constants(FORMAT_OF[dtype]),
                **ELEMENTWISE, **EXACT,
            )  # fmt: skip
    return data


def launch_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, out_dtype: torch.dtype) -> Tensor:
    """data [..., M, K] times its scale [..., ⌈M/R⌉, ⌈K/C⌉] → [..., M, K] in out_dtype."""
    m, k = data.shape[-2:]
    if data.dtype == torch.uint8:
        k = k // 3 * 2
    out = torch.empty(*data.shape[:-1], k, dtype=out_dtype, device=data.device)
    if out.numel() == 0:
        return out
    codes = as_codes(data).reshape(-1, m, data.shape[-1])
    scale = scale.reshape(-1, *scale.shape[-2:])
    grid = (len(codes) * triton.cdiv(m, ELEMENTWISE["ROWS"]) * triton.cdiv(k, ELEMENTWISE["COLS"]),)
    with torch.cuda.device_of(data):
        dequantize[grid](
            codes, scale, out, m, k, *codes.stride(), *scale.stride(), block_rows, block_cols,
            MANTISSA=constants(FORMAT_OF[data.dtype])["MANTISSA"], **ELEMENTWISE, **EXACT,
        )  # fmt: skip
    return out


def _tile_of_whole_blocks(m: int, k: int, block_rows: int, block_cols: int, most: int) -> dict[str, int] | None:
    """The one-pass kernel's tile and blocks, all powers of two, or None where a block is none or too large."""
    # a block that covers a whole side may as well end at the next power of two
    r = block_rows if block_rows < m else triton.next_power_of_2(m)
    c = block_cols if block_cols < k else triton.next_power_of_2(k)
    if r & (r - 1) or c & (c - 1):
        return None
    cols = max(c, 64 if r >= 64 else 128)  # 128 bytes a row at least, so that loads and stores fill their sectors
    rows = max(r, launch_config.CAST_NUMBERS // cols)
    if rows * cols > most:
        return None
    return {"R": r, "C": c, "ROWS": rows, "COLS": cols, "num_warps": rows * cols // launch_config.NUMBERS_A_WARP}


def _part(block_rows: int, block_cols: int) -> dict[str, int]:
    cols = min(triton.next_power_of_2(block_cols), 1024)
    rows = min(triton.next_power_of_2(block_rows), PART // cols)
    return {"ROWS": rows, "COLS": cols, "num_warps": max(rows * cols // launch_config.NUMBERS_A_WARP, 4)}
