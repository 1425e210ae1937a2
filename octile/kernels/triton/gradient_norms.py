# mypy: allow-untyped-defs
"""Norms of many tensors: partial sums of squares, then a sum of each tensor's; `octile.ops.gradient_norms` has them."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import EXACT, GRADIENT_NORMS, GRADIENT_NORMS_SUM
from octile.kernels.triton.tensor_table import COLUMNS, TRITON_DTYPES, address, find_tensor, tables


def launch(gradients: Sequence[Tensor]) -> Tensor:
    """The norms [N] of contiguous tensors: two launches for each dtype that occurs."""
    norms = torch.zeros(len(gradients), dtype=torch.float32, device=gradients[0].device)  # of empty tensors
    for table in tables([gradients], GRADIENT_NORMS["ELEMENTS"]):
        partials = torch.empty(table.programs, dtype=torch.float32, device=norms.device)
        with torch.cuda.device_of(norms):
            gradient_squares[(table.programs,)](
                table.words, table.tensors, partials, DTYPE=TRITON_DTYPES[table.dtypes[0]], ALIGNED=table.is_aligned,
                STEPS=table.steps, **GRADIENT_NORMS, **EXACT,
            )  # fmt: skip
            gradient_norms[(table.tensors,)](
                table.words, table.tensors, table.programs, partials, norms, **GRADIENT_NORMS_SUM, **EXACT
            )
    return norms


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    return {"norms of gradients": lambda: launch([cases.empty(cases.N, cases.K, dtype=cases.FP32)])}


@triton.jit(do_not_specialize=["tensors"])
def gradient_squares(
    table, tensors, partials,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, STEPS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """A program sums the squares of ELEMENTS elements of a tensor; the sum is NaN if an element is not finite.

    What it reads is evicted first, so that the L2 cache need not write what others have left there.
    """
    program = tl.program_id(0)
    tensor = find_tensor(table, tensors, program, STEPS)
    row = table + tensors + tensor * (COLUMNS + 1)
    first = (program - tl.load(table + tensor)) * ELEMENTS
    remaining = tl.load(row) - first
    gradient = address(row, 0, DTYPE, ALIGNED) + first + tl.arange(0, ELEMENTS)
    if remaining >= ELEMENTS:  # without a mask, loads are vectorized
        g = tl.load(gradient, eviction_policy="evict_first").to(tl.float32)
    else:
        inside = tl.arange(0, ELEMENTS) < remaining
        g = tl.load(gradient, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(partials + program, tl.sum(g * g + g * 0.0))  # 0 times an Inf is NaN, times anything finite 0


@triton.jit(do_not_specialize=["tensors", "programs"])
def gradient_norms(table, tensors, programs, partials, norms, ELEMENTS: tl.constexpr):
    """A program sums the partials of a tensor."""
    tensor = tl.program_id(0)
    row = table + tensors + tensor * (COLUMNS + 1)
    first = tl.load(table + tensor)
    end = tl.load(table + tensor + 1, mask=tensor + 1 < tensors, other=programs)
    squares = tl.zeros([ELEMENTS], tl.float32)
    for start in range(first, end, ELEMENTS):
        at = start + tl.arange(0, ELEMENTS)
        squares += tl.load(partials + at, mask=at < end, other=0.0)
    tl.store(norms + tl.load(row + 1), tl.sqrt_rn(tl.sum(squares)))
