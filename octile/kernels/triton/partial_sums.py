# mypy: allow-untyped-defs
"""Sums of the partial results of several programs, in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import PARTIAL_SUMS


def launch(partials: Tensor) -> Tensor:
    """Sum partials [P, ...] float32, contiguous, over P → [...] float32; zeros if P is 0.

    torch's sum takes up to three times as long for some tens of partials.
    """
    total = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    if total.numel():
        with torch.cuda.device_of(partials):
            rows = min(triton.next_power_of_2(max(len(partials), 1)), PARTIAL_SUMS["ROWS"])
            columns = PARTIAL_SUMS["elements"] // rows
            partial_sums[(triton.cdiv(total.numel(), columns),)](
                partials, total, len(partials), total.numel(), COLUMNS=columns, ROWS=rows,
                num_warps=PARTIAL_SUMS["num_warps"],
            )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["P"])
def partial_sums(partials, total, P, N, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """A program sums COLUMNS columns of partials [P, N], ROWS rows at a time."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        sums += tl.load(partials + row * N + column, mask=(row < P) & (column < N), other=0.0)
    own = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(total + own, tl.sum(sums, axis=0), mask=own < N)
