# mypy: allow-untyped-defs
"""AdamW in one pass over memory for many tensors, bit for bit as `octile.ops.adamw` specifies."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import ADAMW, EXACT
from octile.kernels.triton.tensor_table import COLUMNS, TRITON_DTYPES, address, find_tensor, tables


def launch(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    corrections: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    skip: Tensor | None = None,
    gradient_scale: Tensor | None = None,
) -> None:
    """Update weights and moments in place; all are contiguous. Arguments as `octile.ops.adamw`.

    One launch for each combination of dtypes that occurs.
    """
    flag = None if skip is None else skip.view(torch.uint8)
    for table in tables([weights, gradients, exp_avgs, exp_avg_sqs, copies], ADAMW["ELEMENTS"]):
        with torch.cuda.device_of(corrections):
            adamw[(table.programs,)](
                table.words, table.tensors, corrections, flag, gradient_scale,
                1 - beta1, float(beta2), 1 - beta2, float(eps),
                *(TRITON_DTYPES[dtype] for dtype in table.dtypes[1:]), ALIGNED=table.is_aligned, STEPS=table.steps,
                **ADAMW, **EXACT,
            )  # fmt: skip


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def step(gradient: torch.dtype, copies: list[Tensor], *skip_and_scale: Tensor) -> None:
        dtypes = cases.FP32, gradient, cases.BF16, cases.BF16
        weights, gradients, m, v = ([cases.empty(cases.N, cases.K, dtype=dtype)] for dtype in dtypes)
        corrections = cases.empty(1, 3, dtype=cases.FP32)
        launch(weights, gradients, m, v, copies, corrections, 0.9, 0.95, 1e-8, *skip_and_scale)

    skip, scale = cases.empty(dtype=torch.bool), cases.empty(dtype=cases.FP32)
    return {
        "AdamW": lambda: step(cases.FP32, []),
        "AdamW of BF16 parameters, scaled, skipped": lambda: step(
            cases.BF16, [cases.empty(cases.N, cases.K)], skip, scale
        ),
    }


@triton.jit(do_not_specialize=["tensors", "rest1", "beta2", "rest2", "eps"])
def adamw(
    table, tensors, corrections, skip, gradient_scale, rest1, beta2, rest2, eps,
    GRADIENT: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, STEPS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """A program updates ELEMENTS elements of a tensor. rest1 and rest2 are 1 − beta1 and 1 − beta2."""
    program = tl.program_id(0)
    tensor = find_tensor(table, tensors, program, STEPS)
    lists: tl.constexpr = 4 if COPY is None else 5
    row = table + tensors + tensor * (COLUMNS + lists)
    n = tl.load(row)
    if skip is not None:
        n = tl.where(tl.load(skip) == 0, n, 0)
    own = corrections + 3 * tl.load(row + 1)
    scale = 1.0
    if gradient_scale is not None:
        scale = tl.load(gradient_scale)
    first = (program - tl.load(table + tensor)) * ELEMENTS
    weight = address(row, 0, tl.float32, ALIGNED) + first
    gradient = address(row, 1, GRADIENT, ALIGNED) + first
    exp_avg = address(row, 2, EXP_AVG, ALIGNED) + first
    exp_avg_sq = address(row, 3, EXP_AVG_SQ, ALIGNED) + first
    copy = weight if COPY is None else address(row, 4, COPY, ALIGNED) + first
    if first + ELEMENTS <= n:  # without a mask, loads and stores are vectorized
        update(
            weight, gradient, exp_avg, exp_avg_sq, copy, own, scale, rest1, beta2, rest2, eps, None,
            gradient_scale is not None, COPY is not None, ELEMENTS,
        )  # fmt: skip
    else:
        update(
            weight, gradient, exp_avg, exp_avg_sq, copy, own, scale, rest1, beta2, rest2, eps, n - first,
            gradient_scale is not None, COPY is not None, ELEMENTS,
        )  # fmt: skip


@triton.jit
def update(
    weight, gradient, exp_avg, exp_avg_sq, copy, corrections, scale, rest1, beta2, rest2, eps, remaining,
    SCALED: tl.constexpr, COPIED: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Update the elements at the pointers: ELEMENTS, or the remaining ones."""
    at = tl.arange(0, ELEMENTS)
    inside = None if remaining is None else at < remaining
    g = tl.load(gradient + at, mask=inside).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
    w = tl.load(weight + at, mask=inside)
    step_size = tl.load(corrections)
    root = tl.load(corrections + 1)
    decay = tl.load(corrections + 2)
    if SCALED:
        g = g * scale
    m = tl.fma(g - m, tl.zeros_like(g) + rest1, m)
    v = tl.fma(g * rest2, g, v * beta2)
    w = w * decay - tl.div_rn(m * step_size, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(weight + at, w, mask=inside)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if COPIED:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)
