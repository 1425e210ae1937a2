"""Multi-head attention with rotary positions, with the four layers around it, as one function that keeps little.

    forward     q, k, v = x · wᵀ in BF16, q and k turned by their positions
                o = softmax(q · kᵀ) · v
                o → 1×128 for the product, and → E5M6, once, to be kept
                y = o · w_oᵀ
    backward    dy → 1×128 and 128×1, do = dy · w_o
                q, k, v as they were kept, or three products more, where the recipe's `attention_inputs` says so
                dq, dk, dv from q, k, v and the kept o, turned back → 1×128 and 128×1
                dx = dq · w_q + dk · w_k + dv · w_v
                dw: four products; the kept o → 128×1, x again → 128×1

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3; RoFormer (arXiv 2104.09864).
Shapes: B batch, S sequence, T = B·S tokens, D model, H heads, X channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octile.nn.fused.attention_output import output, output_backward
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, save, saved, settings
from octile.nn.fused.linear import nt, nt_sum
from octile.nn.fused.quantize import Weight, quantize_gradient, requantize
from octile.nn.rope import CosSin
from octile.ops.attention import attention, attention_backward
from octile.ops.rope import rotate_
from octile.recipe import Recipe
from octile.scaled import ScaledTensor


def rotary_attention(
    x: BlockInput,
    cos_sin: CosSin,
    weights: Sequence[Tensor],
    batch: int,
    heads: int,
    softmax_scale: float,
    recipe: Recipe,
    dtype: torch.dtype,
) -> Tensor:
    """Causal attention: [T, D] in dtype.

    Args:
        cos_sin: of the S positions, each [S, X/2].
        weights: of queries, keys and values [H·X, D], and of the output [D, H·X].
    """
    s = settings(recipe, dtype, weights, x.x)
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
        *into, w_o = all_cast = layers.cast(weights)
        qkv = _queries_keys_values(x.q, into, cos_sin, shape, s.dtype)
        o_BSHX, lse_BHS = attention(*qkv, shape[2])
        y_TD, kept_o = output(o_BSHX, layers, 3, weights[3], w_o)

        for i, w in enumerate(into):
            layers.show_fprop(i, weights[i], lambda: x_TD, x.q, w)
        kept_qkv = None if s.recipe.attention_inputs == "recomputed" else qkv
        save(ctx, layers, all_cast, x=x.kept, cos_sin=cos_sin, qkv=kept_qkv, o=kept_o, lse=lse_BHS)
        ctx.source, ctx.shape, ctx.x_dtype = x.source, shape, x_TD.dtype
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        layers, (*into, w_o), kept = saved(ctx)
        s, cos_sin = layers.settings, kept["cos_sin"]
        formats = s.recipe.formats
        assert formats is not None

        x = ctx.source.again(kept["x"])
        q, k, v = kept["qkv"] or _queries_keys_values(x, into, cos_sin, ctx.shape, s.dtype)
        do_BSHX, dw_o = output_backward(dy_TD, v.shape, kept["o"], layers, 3, w_o)
        o_BSHX = kept["o"].dequantize(s.dtype).view(v.shape)
        gradients = attention_backward(do_BSHX, q, k, v, o_BSHX, kept["lse"], ctx.shape[2])
        cos_SX, minus_sin_SX = cos_sin[0], -cos_sin[1]
        for d in gradients[:2]:
            rotate_(d, cos_SX, minus_sin_SX)

        ds_TX = [d.flatten(2).flatten(0, 1) for d in gradients]
        both = [quantize_gradient(d, formats) for d in ds_TX]
        x_t = requantize(x, formats.wgrad_x)
        dws = []
        for i, (rows, columns) in enumerate(both):
            before = partial(ds_TX.__getitem__, i)
            layers.show_dgrad(i, before, rows, into[i])
            dws.append(layers.wgrad(i, before, columns, x_t))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = nt_sum([(rows, w.w_t) for (rows, _), w in zip(both, into, strict=True)], None, ctx.x_dtype)
        return dx, None, None, None, None, *dws, dw_o


def _queries_keys_values(
    x: ScaledTensor, weights: Sequence[Weight], cos_sin: CosSin, shape: tuple[int, int, float], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k, v [B, S, H, X], q and k turned."""
    batch, heads, _ = shape
    q, k, v = (nt(x, w.w, None, dtype).unflatten(0, (batch, -1)).unflatten(-1, (heads, -1)) for w in weights)
    rotate_(q, *cos_sin)
    rotate_(k, *cos_sin)
    return q, k, v
