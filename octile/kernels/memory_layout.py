"""The memory layout of quantized tensors, such that Hopper's GEMMs read them without a copy.

FP8 tensor cores need operands contiguous along the contracted dimension, and TMA needs rows that begin at multiples of
16 bytes. Rows are therefore padded in memory; shapes do not change. The reference, the fake and the kernel of an
operator allocate with these functions.
"""

import torch
from torch import Tensor

VECTOR = 16  # bytes, the alignment of rows


def padded(n: int, itemsize: int = 1) -> int:
    """Round n up until n elements of itemsize bytes fill a multiple of 16 bytes."""
    elements = VECTOR // itemsize
    return n + -n % elements  # which a symbolic n is known not to exceed, as torch.export needs it


def new_scale(x: Tensor, block_rows: int, block_cols: int) -> Tensor:
    """Allocate an uninitialized scale [..., ⌈M/R⌉, ⌈K/C⌉] float32 for x [..., M, K] in blocks of R×C.

    A GEMM reads the scales of one k-block together. So the scales of 1×C tiles are contiguous along M, those of R×1
    tiles along K; the transposed view of either has the layout of the other. The scales of other blocks are row-major.
    """
    *batch, m, k = x.shape
    rows, cols = -(-m // block_rows), -(-k // block_cols)
    if block_rows == 1 < block_cols:
        return x.new_empty(*batch, cols, padded(rows, 4), dtype=torch.float32)[..., :rows].mT
    if block_cols == 1 < block_rows:
        return x.new_empty(*batch, rows, padded(cols, 4), dtype=torch.float32)[..., :cols]
    return x.new_empty(*batch, rows, cols, dtype=torch.float32)


def new_transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized [..., K, M] for x [..., M, K], of a 1-byte dtype: contiguous along M, rows padded."""
    *batch, m, k = x.shape
    return x.new_empty(*batch, k, padded(m), dtype=dtype)[..., :m]


def new_quantized_transposed(
    x: Tensor, dtype: torch.dtype, tiles: Tensor | None = None, in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate `new_transposed` [..., K, M] and its scale for 1×128 tiles along M, [..., K, ⌈M/128⌉].

    With tiles [P/128, 2], those of groups of rows of a matrix (`octile.ops.groups`), P takes M's place. In 128×128
    blocks the scale is [..., ⌈K/128⌉, ⌈M/128⌉].
    """
    if tiles is not None:
        x = x.new_empty(()).expand(128 * tiles.shape[0], x.shape[1])
    return new_transposed(x, dtype), new_scale(x, 128, 128 if in_blocks else 1).mT


def contiguous_copy(x: Tensor) -> Tensor:
    """Return x [..., K] if it is contiguous, else a copy, which autograd does not know.

    Where rows are not adjacent, torch copies element by element, in BF16 at 40% of an H200's bandwidth. Here an element
    is 16 bytes, where rows consist of such.
    """
    if torch.compiler.is_compiling() or x.is_contiguous():
        return x.contiguous()
    elements, starts = VECTOR // x.itemsize, (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) != 1 or any(n % elements for n in starts):
        return x.contiguous()
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy.view(torch.complex128).copy_(x.view(torch.complex128))
    return copy
