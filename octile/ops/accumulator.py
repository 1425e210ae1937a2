"""The accumulator of FP8 GEMMs, which a model of the tensor core can replace.

The references sum in FP32, in an order that is not specified. `octile.lab` sets a function that accumulates as a
particular tensor core does; while it is set, it computes all GEMMs of FP8 operands, also on a GPU. It does not compute
GEMMs of INT8 operands or those in BF16 or FP32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Block = Sequence[int]
Gemm = Callable[[Tensor, Tensor, Block, Tensor, Tensor, Block], Tensor]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PROMOTION = 128  # tokens between two promotions in the wgrad kernels, counted from token 0

# The innermost is last; global, since autograd's GPU thread must see it. While it is empty, a GEMM calls nothing here.
replacements: list[Gemm] = []


@contextmanager
def summed_by(gemm: Gemm) -> Iterator[None]:
    """Compute FP8 GEMMs inside by gemm(a, a_scale, a_block, b, b_scale, b_block): [M, K] · [N, K]ᵀ → float32 [M, N].

    This holds for all threads, and so also for a backward pass inside the context.
    """
    replacements.append(gemm)
    try:
        yield
    finally:
        replacements.remove(gemm)


def is_replaced() -> bool:
    """Whether a function computes the GEMMs of FP8 operands now."""
    return bool(replacements)


def accumulator_for(a: Tensor, b: Tensor) -> Gemm | None:
    """Return the function that replaces the GEMM of these operands; None: the reference or a kernel computes it."""
    return replacements[-1] if replacements and a.dtype in FP8 and b.dtype in FP8 else None


def grouped(
    gemm: Gemm,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    groups: list[slice],
) -> Tensor:
    """Compute `grouped_matmul_nt` in float32 [T, N], one GEMM per group."""
    scale_by_row = a_scale.repeat_interleave(a_block[0], dim=0)  # a group may begin within a block
    out_TN = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for g, rows in enumerate(groups):
        out_TN[rows] = gemm(a[rows], scale_by_row[rows], (1, a_block[1]), b[g], b_scale[g], b_block)
    return out_TN


def masked(
    gemm: Gemm, a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block
) -> Tensor:
    """Compute `masked_grouped_matmul_nt` in float32 [G, M, N], all rows."""
    return torch.stack([gemm(a[g], a_scale[g], a_block, b[g], b_scale[g], b_block) for g in range(len(b))])


def wgrad(
    gemm: Gemm,
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Block,
    x: Tensor,
    x_scale: Tensor,
    x_block: Block,
    groups: list[slice],
) -> Tensor:
    """Compute `grouped_wgrad` in float32 [G, N, K]; tokens before a group in its first block count as zeros."""
    t = dy.shape[0]
    aligned = math.lcm(PROMOTION, *(block[0] for block in (dy_block, x_block) if block[0] < t))
    out_GNK = torch.zeros(len(groups), dy.shape[1], x.shape[1], device=x.device)
    for g, rows in enumerate(groups):
        if rows.start == rows.stop:
            continue
        first = rows.start // aligned * aligned
        operands: list[Tensor | Block] = []
        for data, scale, block in ((dy, dy_scale, dy_block), (x, x_scale, x_block)):
            encoded = data[first : rows.stop].view(torch.uint8).clone()
            encoded[: rows.start - first] = 0
            blocks = slice(first // block[0], -(-rows.stop // block[0]))
            operands += [encoded.view(data.dtype).mT, scale[blocks].mT, block[::-1]]
        out_GNK[g] = gemm(*operands)  # type: ignore[arg-type]
    return out_GNK
