"""Multi-head attention with rotary positions, with the four layers around it, as one function.

    forward     q, k, v = x · wᵀ in BF16, q and k rotated by their positions
                o = softmax(q · kᵀ) · v
                o → 1×128 for the GEMM, and → E5M6, saved once
                y = o · w_oᵀ
    backward    dy → 1×128 and 128×1, do = dy · w_o
                q, k, v as saved, or recomputed by three more GEMMs, as the recipe's `attention_inputs` says
                dq, dk, dv from q, k, v and the saved o, rotated back → 1×128 and 128×1
                dx = dq · w_q + dk · w_k + dv · w_v
                dw: four GEMMs; the saved o → 128×1, x recomputed → 128×1

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3; RoFormer (arXiv 2104.09864).
Shapes: B batch, S sequence, T = B·S tokens, D model, H heads, X channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.attention_output import output, output_backward
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, load_saved, save_for_backward, settings
from octile.nn.fused.linear import nt, nt_sum
from octile.nn.fused.quantize import WeightForms, quantize_gradient, requantize
from octile.nn.rope import CosSin
from octile.ops.attention import attention, attention_backward
from octile.ops.rope import rotate_
from octile.scaled import ScaledTensor


def rotary_attention(
    x: BlockInput,
    cos_sin: CosSin,
    weights: Sequence[Tensor],
    batch: int,
    heads: int,
    softmax_scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute causal attention: [T, D] in dtype.

    Args:
        cos_sin: cosines and sines of the S positions, each [S, X/2].
        weights: weights of queries, keys and values [H·X, D], and of the output [D, H·X].
    """
    s = settings(x.recipe, dtype, weights, x.x)
    return _RotaryAttention.apply(x.x, x, cos_sin, (batch, heads, softmax_scale), s, *weights)


class _RotaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        x: BlockInput,
        cos_sin: CosSin,
        shape: tuple[int, int, float],
        s: Settings,
        *weights: Tensor,
    ) -> Tensor:
        layers = FusedLayers(weights, ctx.needs_input_grad[5:], s)
        *w_qkv, w_o = quantized = layers.quantize(weights)
        qkv = _queries_keys_values(x.q, w_qkv, cos_sin, shape, s.dtype)
        o_BSHX, lse_BHS = attention(*qkv, shape[2])
        y_TD, saved_o = output(o_BSHX, layers, 3, weights, w_o)

        for i, w in enumerate(w_qkv):
            layers.report_fprop(i, weights, lambda: x_TD, x.q, w)
        saved_qkv = None if s.recipe.attention_inputs == "recomputed" else qkv
        save_for_backward(ctx, layers, quantized, x=x.saved, cos_sin=cos_sin, qkv=saved_qkv, o=saved_o, lse=lse_BHS)
        ctx.how_saved, ctx.shape, ctx.x_dtype = x.how_saved, shape, x_TD.dtype
        return y_TD

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        layers, (*w_qkv, w_o), saved = load_saved(ctx, dy_TD)
        s, cos_sin, formats = layers.settings, saved["cos_sin"], layers.settings.formats

        x = ctx.how_saved.quantized(saved["x"])
        q, k, v = saved["qkv"] or _queries_keys_values(x, w_qkv, cos_sin, ctx.shape, s.dtype)
        do_BSHX, dw_o = output_backward(dy_TD, v.shape, saved["o"], layers, 3, w_o)
        o_BSHX = saved["o"].dequantize(s.dtype).view(v.shape)
        gradients = attention_backward(do_BSHX, q, k, v, o_BSHX, saved["lse"], ctx.shape[2])
        cos_SX, minus_sin_SX = cos_sin[0], -cos_sin[1]
        for d in gradients[:2]:
            rotate_(d, cos_SX, minus_sin_SX)

        ds_TX = [d.flatten(2).flatten(0, 1) for d in gradients]
        quantized_ds = [quantize_gradient(d, formats) for d in ds_TX]
        x_t = requantize(x, formats.wgrad_x)
        dws = []
        for i, (dgrad_dy, wgrad_dy) in enumerate(quantized_ds):
            before = partial(ds_TX.__getitem__, i)
            layers.report_dgrad(i, before, dgrad_dy, w_qkv[i])
            dws += layers.wgrad(i, before, wgrad_dy, x_t)
        dx = None
        if ctx.needs_input_grad[0]:
            pairs = [(dgrad_dy, w.w_t) for (dgrad_dy, _), w in zip(quantized_ds, w_qkv, strict=True)]
            dx = nt_sum(pairs, None, ctx.x_dtype)
        return dx, None, None, None, None, *dws, dw_o


def _queries_keys_values(
    x: ScaledTensor,
    weights: Sequence[WeightForms],
    cos_sin: CosSin,
    shape: tuple[int, int, float],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Compute q, k, v [B, S, H, X], q and k rotated."""
    batch, heads, _ = shape
    q, k, v = (nt(x, w.w, None, dtype).unflatten(0, (batch, -1)).unflatten(-1, (heads, -1)) for w in weights)
    rotate_(q, *cos_sin)
    rotate_(k, *cos_sin)
    return q, k, v
