"""The seam at which a model of the tensor core replaces the sums of FP8 products.

The references sum in FP32, in an order that is not specified. A later room (`octile.lab`) sets a function that sums as
a certain tensor core does; while it is set, all products of FP8 operands go through it, on a GPU too. INT8 operands and
products in BF16 or FP32 are not concerned.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Block = Sequence[int]
Product = Callable[[Tensor, Tensor, Block, Tensor, Tensor, Block], Tensor]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PROMOTION = 128  # rows of tokens between two promotions of the kernels' weight gradient, counted from the first of all

_products: list[Product] = []  # the innermost last; of the process: autograd's thread for a GPU must see it, too


@contextmanager
def summed_by(product: Product) -> Iterator[None]:
    """Products inside are product(a, a_scale, a_block, b, b_scale, b_block): [M, K] · [N, K]ᵀ → float32 [M, N].

    It holds for all threads, and so for a backward pass that runs inside.
    """
    _products.append(product)
    try:
        yield
    finally:
        _products.remove(product)


def accumulator_for(a: Tensor, b: Tensor) -> Product | None:
    """What sums the product of these operands instead of the reference or the kernel; None: nothing does."""
    return _products[-1] if _products and a.dtype in FP8 and b.dtype in FP8 else None


def grouped(
    product: Product,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    groups: list[slice],
) -> Tensor:
    """`grouped_matmul_nt` in float32 [T, N], one product a group."""
    scale_by_row = a_scale.repeat_interleave(a_block[0], dim=0)  # a group may begin within a block
    out_TN = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for g, rows in enumerate(groups):
        out_TN[rows] = product(a[rows], scale_by_row[rows], (1, a_block[1]), b[g], b_scale[g], b_block)
    return out_TN


def masked(
    product: Product, a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block
) -> Tensor:
    """`masked_grouped_matmul_nt` in float32 [G, M, N], all rows computed."""
    return torch.stack([product(a[g], a_scale[g], a_block, b[g], b_scale[g], b_block) for g in range(len(b))])


def wgrad(
    product: Product,
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Block,
    x: Tensor,
    x_scale: Tensor,
    x_block: Block,
    groups: list[slice],
) -> Tensor:
    """`grouped_wgrad` in float32 [G, N, K]; the tokens before a group in its first block count as zeros."""
    t = dy.shape[0]
    aligned = math.lcm(PROMOTION, *(block[0] for block in (dy_block, x_block) if block[0] < t))
    out_GNK = torch.zeros(len(groups), dy.shape[1], x.shape[1], device=x.device)
    for g, rows in enumerate(groups):
        if rows.start == rows.stop:
            continue
        first = rows.start // aligned * aligned
        operands: list[Tensor | Block] = []
        for data, scale, block in ((dy, dy_scale, dy_block), (x, x_scale, x_block)):
            codes = data[first : rows.stop].view(torch.uint8).clone()
            codes[: rows.start - first] = 0
            blocks = slice(first // block[0], -(-rows.stop // block[0]))
            operands += [codes.view(data.dtype).mT, scale[blocks].mT, block[::-1]]
        out_GNK[g] = product(*operands)  # type: ignore[arg-type]
    return out_GNK
