"""The linear layer on quantized operands: its three GEMMs, and the autograd function of one layer.

    forward     x → 1×128, saved for backward in FP8 only           y  = x · wᵀ                     fprop
    backward    dy → 1×128                                          dx = dy · w                     dgrad
                dy → 128×1, saved x → 128×1                         dw = dyᵀ · x, summed in FP32    wgrad

The recipe says how each operand is quantized. A dense layer and the experts of a mixture differ only in the operator
that they call: experts have offs, int32 [G], where each expert's rows end; a dense layer has None. wgrad's operands of
experts have tiles of 128 rows of one expert each (`octile.ops.groups`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1, figure 6. Shapes: T tokens, K inputs, N outputs, G experts.
"""

from typing import Any

import torch
from torch import Tensor

from octile.nn.deferred_wgrad import parameters_of, run_or_defer
from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused import high_precision
from octile.nn.fused.quantize import (
    RecomputedWeight,
    align_experts,
    in_tiles,
    quantize_gradient,
    quantize_operand,
    quantize_weight,
    quantize_wgrad_gradient,
    recomputes_transposed,
    requantize,
)
from octile.nn.fused.shared_quantization import Shared, compute_once
from octile.nn.main_grad import main_grads_of
from octile.nn.observer import ObservedGemm, has_gemm_observers, report_backward, report_fprop
from octile.ops.grouped import grouped_matmul_nt
from octile.ops.groups import AlignedGroups
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.row_invariant import row_invariant_scaled_nt
from octile.recipe import GemmFormats, Recipe
from octile.scaled import ScaledTensor, grouped_wgrad
from octile.scaled import matmul_nt as scaled_matmul_nt


def nt(
    a: ScaledTensor, b: ScaledTensor, offs: Tensor | None, dtype: torch.dtype, batch_invariant: bool = False
) -> Tensor:
    """Multiply a[T, K] · bᵀ with b[N, K] or [G, N, K] → [T, N] in dtype; see `Recipe.batch_invariant`."""
    out_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # an FP16 result could overflow
    operands = (a.data, a.scale, a.block, b.data, b.scale, b.block)
    if batch_invariant:
        y = row_invariant_scaled_nt(*operands, offs, out_dtype)
    else:
        y = matmul_nt(*operands, out_dtype) if offs is None else grouped_matmul_nt(*operands, offs, out_dtype)
    # `to` its own dtype would be a second result to the compiler of torch 2.11, which then loses its gradient
    return y if y.dtype == dtype else y.to(dtype)


def nt_sum(pairs: list[tuple[ScaledTensor, ScaledTensor]], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ a · bᵀ in dtype: the input gradient of layers that read one input."""
    (a, b), *more = pairs
    adds_in_gemm = offs is None or not more
    total = nt(a, b, offs, dtype if dtype == torch.bfloat16 and adds_in_gemm else torch.float32)
    for a, b in more:
        if adds_in_gemm:
            matmul_nt_out(total, a.data, a.scale, a.block, b.data, b.scale, b.block, True)
        else:
            total += nt(a, b, offs, torch.float32)
    return total.to(dtype)


def wgrad(
    dy: ScaledTensor, x: ScaledTensor, offs: Tensor | None, dtype: torch.dtype, main_grad: Tensor | None
) -> Tensor | None:
    """Return the weight's gradient in dtype, summed in FP32, or None where it was added to main_grad.

    Args:
        dy, x: [T, N] and [T, K], quantized along the tokens.
        offs: the end of each expert's tokens among these T; None: a dense layer.
        main_grad: float32 of the weight's shape, or None. That of experts may be the transpose of contiguous memory.
    """
    swaps = main_grad is not None and offs is not None and dy.block == x.block and main_grad.mT.is_contiguous()
    if main_grad is None or not (offs is None or swaps or main_grad.is_contiguous()):
        # FP16 could overflow before it is unscaled; a BF16 result is rounded once, when the GEMM stores it
        out_dtype = torch.bfloat16 if main_grad is None and dtype == torch.bfloat16 else torch.float32
        dw = scaled_matmul_nt(dy.mT, x.mT, out_dtype) if offs is None else grouped_wgrad(dy, x, offs, out_dtype)
        return high_precision.into_main_grad(dw, dtype, main_grad)
    if offs is None:
        scaled_matmul_nt(dy.mT, x.mT, out=main_grad, accumulate=True)
    elif swaps:
        grouped_wgrad(x, dy, offs, out=main_grad.mT, accumulate=True)
    else:
        grouped_wgrad(dy, x, offs, out=main_grad, accumulate=True)
    return None


class QuantizedLinear(torch.autograd.Function):
    """y = x · weightᵀ with those operands in FP8 that the recipe quantizes; the others in its high precision."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight: Tensor,
        offs: Tensor | None,
        recipe: Recipe,
        history: AmaxHistory | None,
        out_dtype: torch.dtype,
        shared: Shared | None,
        can_cache_weight: bool,
        needs_dgrad: bool,
    ) -> Tensor:
        """Compute y [T, N] in FP8 from x [T, K] and the weight: [N, K], or [E, N, K] with groups that end at `offs`."""
        formats, in_high_precision, compute = recipe.formats, recipe.high_precision, recipe.compute
        assert formats is not None
        shared = None if formats.is_delayed else shared
        x = compute_once(shared, formats.x, lambda: quantize_operand(x_TK, formats.x, "x", history))
        recomputes_w_t = recomputes_transposed(recipe, weight, can_cache_weight)
        weights = quantize_weight(weight, formats.w, history, can_cache_weight, needs_dgrad and not recomputes_w_t)
        x_has_gradient, w_has_gradient, *_ = ctx.needs_input_grad
        # the cache holds them: nothing more to save
        ctx.weights = weights if can_cache_weight and not recomputes_w_t else None
        saves_x, wgrad_x = w_has_gradient and "wgrad" not in in_high_precision, x
        if saves_x and not formats.requantizes_x:
            groups = align_experts(offs, x_TK.shape[0], formats)
            wgrad_x = compute_once(
                shared,
                formats.wgrad_x,
                lambda: quantize_operand(in_tiles(x_TK, groups), formats.wgrad_x, "wgrad_x", history),
            )
        saved_x = (wgrad_x.data, wgrad_x.scale) if saves_x else (None, None)
        saves_w = x_has_gradient and ctx.weights is None and not recomputes_w_t
        dgrad_w = weights.w_t.mT if saves_w else None
        saved_w = (None, None) if dgrad_w is None else (dgrad_w.data, dgrad_w.scale)
        high_precision_x = x_TK.to(compute) if w_has_gradient and "wgrad" in in_high_precision else None
        high_precision_w = weight.to(compute) if x_has_gradient and "dgrad" in in_high_precision else None
        own_weight = weight if x_has_gradient and recomputes_w_t else None
        ctx.save_for_backward(*saved_x, *saved_w, own_weight, high_precision_x, high_precision_w, offs)
        ctx.blocks = wgrad_x.block, None if dgrad_w is None else dgrad_w.block
        ctx.recipe, ctx.history, ctx.x_dtype, ctx.w_dtype = recipe, history, x_TK.dtype, weight.dtype
        ctx.main_grads, ctx.parameters = main_grads_of((weight,)), parameters_of((weight,))
        a, b = (x, weights.w) if "fprop" not in in_high_precision else (None, None)
        observed = has_gemm_observers() and (x_has_gradient or w_has_gradient)
        ctx.seen = report_fprop(weight, ObservedGemm("fprop", x_TK, a, b, offs)) if observed else []
        if "fprop" in in_high_precision:
            return high_precision.nt(x_TK.to(compute), weight.to(compute).contiguous(), offs, out_dtype)
        return nt(x, weights.w, offs, out_dtype, recipe.batch_invariant)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of the weight from dy [T, N], in FP8 unless the recipe excepts a GEMM."""
        x_data, x_scale, w_data, w_scale, weight, high_precision_x, high_precision_w, offs = ctx.saved_tensors
        formats, compute = ctx.recipe.formats, ctx.recipe.compute
        x_has_gradient, w_has_gradient, *_ = ctx.needs_input_grad
        dx = dw = None
        in_fp8 = x_has_gradient and high_precision_w is None, w_has_gradient and high_precision_x is None
        groups = align_experts(offs, dy_TN.shape[0], formats) if in_fp8[1] else None
        dgrad_dy, wgrad_dy = _quantize_gradient(dy_TN, formats, ctx.history, groups, *in_fp8)
        if dgrad_dy is not None:
            if weight is not None:
                w_t = RecomputedWeight(weight, formats.w, dy_TN).w_t
            else:
                w_t = ctx.weights.w_t if ctx.weights else ScaledTensor(w_data, w_scale, ctx.blocks[1]).mT
            report_backward(ctx.seen, ObservedGemm("dgrad", dy_TN, dgrad_dy, w_t, offs))
            dx = nt(dgrad_dy, w_t, offs, ctx.x_dtype)
        elif x_has_gradient:
            report_backward(ctx.seen, ObservedGemm("dgrad", dy_TN, offs=offs))
            dx = high_precision.nt(dy_TN.to(compute), high_precision_w.mT, offs, ctx.x_dtype)
        if wgrad_dy is not None:
            x = ScaledTensor(x_data, x_scale, ctx.blocks[0])
            if formats.requantizes_x and (groups is not None or formats.wgrad_x != formats.x):
                x = requantize(x, formats.wgrad_x, groups=groups)
            offs, tiles = (offs, None) if groups is None else (groups.offs, groups.tiles)
            if ctx.seen:
                report_backward(ctx.seen, ObservedGemm("wgrad", dy_TN.mT, wgrad_dy.mT, x.mT, offs, tiles))
            settings = offs, ctx.w_dtype
            (dw,) = run_or_defer(
                ctx.parameters, ctx.main_grads, lambda main_grads: [wgrad(wgrad_dy, x, *settings, *main_grads)]
            )
        elif w_has_gradient:
            report_backward(ctx.seen, ObservedGemm("wgrad", dy_TN.mT, offs=offs))
            dy, settings = dy_TN.to(compute), (offs, ctx.w_dtype)
            (dw,) = run_or_defer(
                ctx.parameters,
                ctx.main_grads,
                lambda main_grads: [high_precision.wgrad(dy, high_precision_x, *settings, *main_grads)],
            )
        return dx, dw, None, None, None, None, None, None, None


def _quantize_gradient(
    dy: Tensor,
    formats: GemmFormats,
    history: AmaxHistory | None,
    groups: AlignedGroups | None,
    dgrad: bool,
    wgrad: bool,
) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """Quantize dy for those of dgrad and wgrad that are made in FP8; None for the other."""
    if dgrad and wgrad:
        return quantize_gradient(dy, formats, history, groups)
    rows = quantize_operand(dy, formats.dy, "dy", history) if dgrad else None
    return rows, quantize_wgrad_gradient(dy, formats, history, groups) if wgrad else None
