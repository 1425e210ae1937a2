"""How results lie in memory, so that Hopper's products read them as they are.

Its tensor cores take FP8 operands contiguous along the summed side, and the copy engine (TMA) takes matrices whose
rows begin at multiples of 16 bytes. What is padded for that is memory between the rows: shapes stay as they are, and
so the reference, the fake and the kernel of an operator allocate by the same functions.
"""

import torch
from torch import Tensor

VECTOR = 16  # bytes


def padded(n: int, itemsize: int = 1) -> int:
    """n rounded up until n numbers fill whole vectors."""
    whole = VECTOR // itemsize
    return -(-n // whole) * whole


def new_scale(x: Tensor, block_rows: int, block_cols: int) -> Tensor:
    """An empty scale [..., ⌈M/R⌉, ⌈K/C⌉] float32 for x [..., M, K] in blocks of R×C.

    A tile's scales lie one beside the other across tiles, since a product reads those of one step of its sum together:
    tiles of 1×C have them contiguous along M, tiles of R×1 along K, so that the transposed view of either is the other.
    Blocks that extend both ways have them row by row.
    """
    *batch, m, k = x.shape
    rows, cols = -(-m // block_rows), -(-k // block_cols)
    if block_rows == 1 < block_cols:
        return x.new_empty(*batch, cols, padded(rows, 4), dtype=torch.float32)[..., :rows].mT
    if block_cols == 1 < block_rows:
        return x.new_empty(*batch, rows, padded(cols, 4), dtype=torch.float32)[..., :cols]
    return x.new_empty(*batch, rows, cols, dtype=torch.float32)


def new_transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty [..., K, M] of one byte a number for x [..., M, K]: contiguous along M, rows padded to whole vectors."""
    *batch, m, k = x.shape
    return x.new_empty(*batch, k, padded(m), dtype=dtype)[..., :m]


def new_quantized_transposed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An empty `new_transposed` and its scale in 1×128 along M, [..., K, ⌈M/128⌉]."""
    return new_transposed(x, dtype), new_scale(x, 128, 1).mT
