# mypy: allow-untyped-defs
"""Rows copied by an index whose length is known on the device only, for exchanges of which the host knows no counts.

Shapes: M rows of C bytes, S entries of the index, N of them used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.peer_rows import sizes, words


def launch(x: Tensor, index: Tensor | None, counts: Tensor, out: Tensor) -> None:
    """Copy row index[i] of x to row i of out, for all i below the sum of counts; other rows are not written.

    Args:
        x: uint8 [M, C], in rows of any stride that is a multiple of 16 bytes if it is not C.
        index: int32 [S] of rows of x; None: row i is copied to row i.
        counts: int64 [G], contiguous; if their sum is more than S, S rows are copied.
        out: uint8 [≥ S, C], in rows as those of x.
    """
    rows, groups = len(x) if index is None else len(index), len(counts)
    if not rows or not x.numel():
        return
    size = sizes(x, None)
    strides = (t.stride(0) * size["WORDS"] // x.shape[1] for t in (x, out))
    with torch.cuda.device_of(x):
        gather_rows[(triton.cdiv(rows, size["ROWS"]),)](
            words(x), x if index is None else index, rows, counts, groups, words(out), *strides,
            GROUPS=triton.next_power_of_2(groups), HAS_INDEX=index is not None, WORDS=size["WORDS"], COLS=size["COLS"],
            ROWS=size["ROWS"], num_warps=size["num_warps"],
        )  # fmt: skip


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x, out = cases.empty(cases.T, cases.K, dtype=torch.uint8), cases.empty(8 * cases.T + 1, cases.K, dtype=torch.uint8)
    index, counts = cases.empty(64 * cases.T, dtype=torch.int32), cases.empty(8, dtype=torch.int64)
    return {"gather rows of other ranks": lambda: launch(x, index, counts, out)}


@triton.jit(do_not_specialize=["S", "G"])
def gather_rows(
    x, index, S, counts, G, out, x_stride, out_stride,
    GROUPS: tl.constexpr, HAS_INDEX: tl.constexpr, WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program copies ROWS rows, or ends at once if none of them is used."""
    group, col = tl.arange(0, GROUPS), tl.arange(0, COLS)
    count = tl.minimum(tl.sum(tl.load(counts + group, mask=group < G, other=0)), S)
    first = tl.program_id(0) * ROWS
    if first < count:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        source = row
        if HAS_INDEX:
            source = tl.load(index + row, mask=row < count, other=0).to(tl.int64)
        inside = (row < count)[:, None] & (col < WORDS)[None, :]
        values = tl.load(x + source[:, None] * x_stride + col[None, :], mask=inside)
        tl.store(out + row[:, None] * out_stride + col[None, :], values, mask=inside)
