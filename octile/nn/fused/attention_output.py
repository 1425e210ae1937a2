"""Attention and the layer that reads its output, as one function that keeps that output once, in E5M6.

    forward     o = softmax(q · kᵀ) · v in BF16        o → 1×128 for the product, and → E5M6, kept with q, k and v
                y = o · wᵀ
    backward    dy → 1×128 and 128×1, do = dy · w      dq, dk, dv from q, k, v and the kept o
                dw = dyᵀ · o, the kept o → 128×1

For attention whose queries, keys and values are made without a compression that would be cheap to repeat; where they
are made again as well, see `latent_attention`.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch, S sequence, T = B·S tokens, H heads, X channels of a query and a key, V of a value, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octile.nn.fused.layers import FusedLayers, Settings, save, saved, settings
from octile.nn.fused.linear import nt
from octile.nn.fused.quantize import Weight, quantize_gradient, quantize_operand, requantize
from octile.ops.attention import attention, attention_backward
from octile.recipe import Recipe
from octile.scaled import ScaledTensor, quantize


def attention_linear(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, softmax_scale: float, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Causal attention, and a linear layer of its output: [B, S, N] in dtype.

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
        (w,) = layers.cast((weight,))
        o_BSHV, lse_BHS = attention(q, k, v, softmax_scale)
        y_TN, kept_o = output(o_BSHV, layers, 0, weight, w)
        save(ctx, layers, [w], q=q, k=k, v=v, o=kept_o, lse=lse_BHS)
        ctx.softmax_scale = softmax_scale
        return y_TN.unflatten(0, q.shape[:2])

    @staticmethod
    def backward(ctx: Any, dy_BSN: Tensor) -> tuple[Tensor | None, ...]:
        layers, (w,), kept = saved(ctx)
        q, k, v = kept["q"], kept["k"], kept["v"]
        do_BSHV, dw = output_backward(dy_BSN.flatten(0, 1), v.shape, kept["o"], layers, 0, w)
        o_BSHV = kept["o"].dequantize(v.dtype).view(v.shape)
        do_BSHV = do_BSHV.to(v.dtype)
        return *attention_backward(do_BSHV, q, k, v, o_BSHV, kept["lse"], ctx.softmax_scale), None, None, dw


def output(o_BSHV: Tensor, layers: FusedLayers, i: int, weight: Tensor, w: Weight) -> tuple[Tensor, ScaledTensor]:
    """y = o · wᵀ [T, N], and o as it is kept; weight is the i-th of layers, w its cast."""
    s = layers.settings
    formats, how = s.recipe.formats, s.recipe.attention_output
    assert formats is not None
    assert how is not None
    o_TX = o_BSHV.flatten(2).flatten(0, 1)
    o = quantize_operand(o_TX, formats.x, "x")
    layers.show_fprop(i, weight, lambda: o_TX, o, w)
    return nt(o, w.w, None, s.dtype), quantize(o_TX, how.block, how.fmt, how.scale)


def output_backward(
    dy_TN: Tensor, shape: torch.Size, kept_o: ScaledTensor, layers: FusedLayers, i: int, w: Weight
) -> tuple[Tensor, Tensor | None]:
    """The gradients of o, [B, S, H, V], and of the weight."""
    formats = layers.settings.recipe.formats
    assert formats is not None
    dy, dy_t = quantize_gradient(dy_TN, formats)
    layers.show_dgrad(i, lambda: dy_TN, dy, w)
    do_TX = nt(dy, w.w_t, None, layers.settings.dtype)
    return do_TX.view(shape), layers.wgrad(i, lambda: dy_TN, dy_t, requantize(kept_o, formats.wgrad_x))
