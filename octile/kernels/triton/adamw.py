# mypy: allow-untyped-defs
"""AdamW in one pass over memory, bit for bit as `octile.ops.adamw` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import ADAMW, EXACT


def launch(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    skip: Tensor | None = None,
) -> None:
    """Update weight and moments in place; all are contiguous tensors of one shape. Arguments as `octile.ops.adamw`."""
    n = weight.numel()
    flag = None if skip is None else skip.view(torch.uint8)
    if n:
        with torch.cuda.device_of(weight):
            adamw[(triton.cdiv(n, ADAMW["ELEMENTS"]),)](
                weight, gradient, exp_avg, exp_avg_sq, corrections, flag, corrections.stride(0), n,
                1 - beta1, float(beta2), 1 - beta2, float(eps), **ADAMW, **EXACT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rest1", "beta2", "rest2", "eps"])
def adamw(
    weight, gradient, exp_avg, exp_avg_sq, corrections, skip, corrections_step, N,
    rest1, beta2, rest2, eps, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """A program updates ELEMENTS elements. rest1 and rest2 are 1 − beta1 and 1 − beta2."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < N
    if skip is not None:
        inside = inside & (tl.zeros_like(at) == tl.load(skip))
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0)
    step_size = tl.load(corrections)
    root = tl.load(corrections + corrections_step)
    decay = tl.load(corrections + 2 * corrections_step)
    m = tl.fma(g - m, tl.zeros_like(g) + rest1, m)
    v = tl.fma(g * rest2, g, v * beta2)
    w = w * decay - tl.div_rn(m * step_size, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(weight + at, w, mask=inside)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
