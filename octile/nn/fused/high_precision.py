"""The linear layer in high precision: the baseline that FP8 is compared with.

Operands are cast to BF16, FP16 or FP32 and nothing else happens to them. Groups, `main_grad` and autocast mean what
they mean in `octile.nn.functional`, so a baseline differs from a recipe in its precision only.

On a GPU torch has a grouped GEMM for BF16 only. In FP16 and FP32 it reads the offsets on the host, so experts in these
dtypes cannot be captured in a CUDA graph.

Shapes: T tokens, K inputs, N outputs, G experts.
"""

from typing import Any

import torch
from torch import Tensor

from octile.nn.fused.shared_quantization import Shared, compute_once
from octile.nn.observer import ObservedGemm, has_gemm_observers, report_backward, report_fprop
from octile.ops.high_precision import high_precision_grouped_nt, high_precision_grouped_tn
from octile.ops.matmul import without_autocast


class HighPrecisionLinear(torch.autograd.Function):
    """y = x · weightᵀ, both cast to `compute`; with offs, every group of rows has its own weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight: Tensor,
        offs: Tensor | None,
        compute: torch.dtype,
        out_dtype: torch.dtype,
        shared: Shared | None = None,
    ) -> Tensor:
        """Compute y [T, N] from x [T, K] and the weight: [N, K], or [E, N, K] with groups that end at `offs`."""
        x, w = compute_once(shared, compute, lambda: x_TK.to(compute)), weight.to(compute).contiguous()
        x_has_gradient, w_has_gradient, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if w_has_gradient else None, w if x_has_gradient else None, offs)
        ctx.compute, ctx.x_dtype, ctx.w_dtype = compute, x_TK.dtype, weight.dtype
        ctx.main_grad = getattr(weight, "main_grad", None)
        observed = has_gemm_observers() and (x_has_gradient or w_has_gradient)
        ctx.seen = report_fprop(weight, ObservedGemm("fprop", x_TK, offs=offs)) if observed else []
        y = nt(x, w, offs)
        return y if y.dtype == out_dtype else y.to(out_dtype)  # see `octile.nn.fused.linear.nt`

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of the weight from dy [T, N]; None for the other arguments."""
        x, w, offs = ctx.saved_tensors
        dy = dy_TN.to(ctx.compute)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            report_backward(ctx.seen, ObservedGemm("dgrad", dy_TN, offs=offs))
            dx = nt(dy, w.mT, offs).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            report_backward(ctx.seen, ObservedGemm("wgrad", dy_TN.mT, offs=offs))
            dw = tn(dy, x, offs).to(ctx.w_dtype if ctx.main_grad is None else torch.float32)
        if dw is not None and ctx.main_grad is not None:
            ctx.main_grad.add_(dw)
            dw = None
        return dx, dw, None, None, None, None


def nt(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """Multiply a[T, K] · bᵀ with b[N, K] or [G, N, K], also where autocast is on; other rows are zero."""
    if offs is not None:
        return high_precision_grouped_nt(a, b, offs)
    with without_autocast(a.device):
        return a @ b.mT


def tn(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """Multiply aᵀ · b, summed over the rows of a[T, N] and b[T, K]; with offs, over those of each group."""
    if offs is not None:
        return high_precision_grouped_tn(a, b, offs)
    with without_autocast(a.device):
        return a.mT @ b
