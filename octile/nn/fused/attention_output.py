"""Autograd function of attention and its output projection, which saves the attention output once, in E5M6.

    forward     o = softmax(q · kᵀ) · v in BF16        o → 1×128 for the GEMM, and → E5M6, saved with q, k and v
                y = o · wᵀ
    backward    dy → 1×128 and 128×1, do = dy · w      dq, dk, dv from q, k, v and the saved o
                dw = dyᵀ · o, the saved o → 128×1

This function saves queries, keys and values. `rotary_attention` and `latent_attention` can recompute them.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch, S sequence, T = B·S tokens, H heads, X channels of a query and a key, V of a value, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.layers import FusedLayers, Settings, load_saved, save_for_backward, settings
from octile.nn.fused.linear import nt
from octile.nn.fused.quantize import WeightForms, quantize_gradient, quantize_operand, requantize
from octile.ops.attention import attention, attention_backward
from octile.recipe import Recipe
from octile.scaled import ScaledTensor, quantize


def attention_linear(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, softmax_scale: float, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Compute causal attention and a linear layer of its output: [B, S, N] in dtype.

    Args:
        q, k: [B, S, H, X]; v: [B, S, H, V]; all of one dtype.
        weight: [N, H·V], `main_grad` as in `functional.linear`.
        recipe: one with `can_fuse_attention`.
    """
    s = settings(recipe, dtype, (weight,), q, k, v)
    return _AttentionLinear.apply(q, k, v, softmax_scale, s, weight)


class _AttentionLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, s: Settings, weight: Tensor) -> Tensor:
        layers = FusedLayers((weight,), ctx.needs_input_grad[5:], s)
        (w,) = layers.quantize((weight,))
        o_BSHV, lse_BHS = attention(q, k, v, softmax_scale)
        y_TN, saved_o = output(o_BSHV, layers, 0, (weight,), w)
        save_for_backward(ctx, layers, [w], q=q, k=k, v=v, o=saved_o, lse=lse_BHS)
        ctx.softmax_scale = softmax_scale
        return y_TN.unflatten(0, q.shape[:2])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_BSN: Tensor) -> tuple[Tensor | None, ...]:
        layers, (w,), saved = load_saved(ctx, dy_BSN)
        q, k, v = saved["q"], saved["k"], saved["v"]
        do_BSHV, dw = output_backward(dy_BSN.flatten(0, 1), v.shape, saved["o"], layers, 0, w)
        o_BSHV = saved["o"].dequantize(v.dtype).view(v.shape)
        do_BSHV = do_BSHV.to(v.dtype)
        return *attention_backward(do_BSHV, q, k, v, o_BSHV, saved["lse"], ctx.softmax_scale), None, None, dw


def output(
    o_BSHV: Tensor, layers: FusedLayers, i: int, weights: Sequence[Tensor], w: WeightForms
) -> tuple[Tensor, ScaledTensor]:
    """Compute y = o · wᵀ [T, N], and o as it is saved.

    Args:
        i: the number of the layer among layers, with all their weights and w, its quantized weight.
    """
    s = layers.settings
    format_of_o = s.recipe.attention_output
    assert format_of_o is not None
    o_TX = o_BSHV.flatten(2).flatten(0, 1)
    o = quantize_operand(o_TX, s.formats.x, "x")
    layers.report_fprop(i, weights, lambda: o_TX, o, w)
    return nt(o, w.w, None, s.dtype), quantize(o_TX, format_of_o.block, format_of_o.fmt, format_of_o.scale)


def output_backward(
    dy_TN: Tensor, shape: torch.Size, saved_o: ScaledTensor, layers: FusedLayers, i: int, w: WeightForms
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of o, in the shape [B, S, H, V], and of the weight."""
    formats = layers.settings.formats
    dy, dy_t = quantize_gradient(dy_TN, formats)
    layers.report_dgrad(i, lambda: dy_TN, dy, w)
    do_TX = nt(dy, w.w_t, None, layers.settings.dtype)
    (dw,) = layers.wgrad(i, lambda: dy_TN, dy_t, requantize(saved_o, formats.wgrad_x))
    return do_TX.view(shape), dw
