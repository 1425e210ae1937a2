"""The linear layer in high precision: the baseline that FP8 is compared with.

Operands are cast to BF16, FP16 or FP32 and nothing else happens to them. Results are summed in FP32 and rounded once,
as those of FP8 GEMMs are: a weight's gradient is FP32 where the weight is. Groups, `main_grad` and autocast mean what
they mean in `octile.nn.functional`, so a baseline differs from a recipe in its precision only.

On a GPU torch has a grouped GEMM for BF16 only. In FP16 and FP32 it reads the offsets on the host, so experts in these
dtypes cannot be captured in a CUDA graph.

Shapes: T tokens, K inputs, N outputs, G experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octile.nn.deferred_wgrad import parameters_of, run_or_defer
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.shared_quantization import Shared, compute_once
from octile.nn.main_grad import main_grads_of
from octile.nn.observer import ObservedGemm, has_gemm_observers, report_backward, report_fprop
from octile.ops.high_precision import high_precision_grouped_nt, high_precision_grouped_tn
from octile.ops.matmul import without_autocast
from octile.ops.row_invariant import row_invariant_groups_nt


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
        batch_invariant: bool = False,
    ) -> Tensor:
        """Compute y [T, N] from x [T, K] and the weight: [N, K], or [E, N, K] with groups that end at `offs`."""
        y, saved = linear_forward(ctx, x_TK, weight, offs, compute, out_dtype, shared, batch_invariant)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of the weight from dy [T, N]; None for the other arguments."""
        return *linear_backward(ctx, ctx.saved_tensors, dy_TN), None, None, None, None, None


def linear_forward(
    ctx: Any,
    x_TK: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    shared: Shared | None,
    batch_invariant: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Compute `HighPrecisionLinear.forward` for a function whose first arguments are x and the weight.

    Returns:
        y, and what is saved for `linear_backward`, besides what ctx holds.
    """
    x, w = compute_once(shared, compute, lambda: x_TK.to(compute)), weight.to(compute).contiguous()
    x_has_gradient, w_has_gradient, *_ = ctx.needs_input_grad
    ctx.compute, ctx.x_dtype, ctx.w_dtype = compute, x_TK.dtype, weight.dtype
    ctx.main_grads, ctx.parameters = main_grads_of((weight,)), parameters_of((weight,))
    observed = has_gemm_observers() and (x_has_gradient or w_has_gradient)
    ctx.seen = report_fprop(weight, ObservedGemm("fprop", x_TK, offs=offs)) if observed else []
    y = row_invariant_groups_nt(x, w, offs, out_dtype) if batch_invariant else nt(x, w, offs, out_dtype)
    return y, (x if w_has_gradient else None, w if x_has_gradient else None, offs)


def linear_backward(ctx: Any, saved: Sequence[Tensor | None], dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight from dy [T, N] and what `linear_forward` has saved."""
    x, w, offs = saved
    dy = dy_TN.to(ctx.compute)
    dx = dw = None
    if ctx.needs_input_grad[0]:
        assert w is not None
        report_backward(ctx.seen, ObservedGemm("dgrad", dy_TN, offs=offs))
        dx = nt(dy, w.mT, offs, ctx.x_dtype)
    if ctx.needs_input_grad[1]:
        assert x is not None
        rows = x
        report_backward(ctx.seen, ObservedGemm("wgrad", dy_TN.mT, offs=offs))
        settings = offs, ctx.w_dtype
        (dw,) = run_or_defer(
            ctx.parameters, ctx.main_grads, lambda main_grads: [wgrad(dy, rows, *settings, *main_grads)]
        )
    return dx, dw


def nt(a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply a[T, K] · bᵀ with b[N, K] or [G, N, K] → [T, N] in dtype, rounded once; other rows are zero."""
    if offs is not None:
        y = high_precision_grouped_nt(a, b, offs, _out_dtype(a, dtype))
    else:
        y = _mm(a, b.mT, _out_dtype(a, dtype))
    return y if y.dtype == dtype else y.to(dtype)  # see `octile.nn.fused.linear.nt`


def wgrad(dy: Tensor, x: Tensor, offs: Tensor | None, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """Return the weight's gradient dyᵀ · x in dtype, summed in FP32 and rounded once, or None if added to main_grad.

    Args:
        dy, x: [T, N] and [T, K]; with offs, each group of rows has a gradient of its own.
        main_grad: float32 of the weight's shape, or None.
    """
    out_dtype = _out_dtype(dy, dtype) if main_grad is None else torch.float32
    dw = _mm(dy.mT, x, out_dtype) if offs is None else high_precision_grouped_tn(dy, x, offs, out_dtype)
    return into_main_grad(dw, dtype, main_grad)


def into_main_grad(dw: Tensor, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """Return dw in dtype, or None where it was added to main_grad."""
    if main_grad is None:
        return dw.to(dtype)
    main_grad.add_(dw)
    return None


def _out_dtype(operand: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a GEMM stores a result that is wanted in dtype, so that it is rounded once."""
    return dtype if dtype == operand.dtype else torch.float32


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply a · b, summed in FP32, also where autocast is on; out_dtype is that of the operands, or float32."""
    with without_autocast(a.device):
        if not a.is_cuda:
            y = a.float() @ b.float()
            return y if out_dtype == torch.float32 else y.to(out_dtype)  # see `octile.nn.fused.linear.nt`
        return a @ b if out_dtype == a.dtype else torch.mm(a, b, out_dtype=out_dtype)
