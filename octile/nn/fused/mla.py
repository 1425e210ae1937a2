"""Multi-head latent attention, from its two compressed inputs to its result, as one function.

    forward     q = x_q · w_qᵀ, its rotary part rotated        k, v = x_kv · w_kvᵀ, k followed by the rotated key
                o = softmax(q · kᵀ) · v                        in BF16
                o → 1×128 for the GEMM, and → E5M6, saved once
                y = o · w_oᵀ
    backward    dy → 1×128 and 128×1, do = dy · w_o
                q, k, v recomputed by two more GEMMs, or as saved, as the recipe's `latent_attention_inputs` says
                dq, dk, dv from q, k, v and the saved o → 1×128 and 128×1
                dx_q = dq · w_q, dx_kv = (dk, dv) · w_kv
                dw: three GEMMs; the saved o → 128×1, x_q and x_kv recomputed → 128×1

The saved o has power-of-two scales, so its values are only shifted in the new tiles, and rounded once to 8 bits.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.3 (up-projections are recomputed) and §3.3.3.
Shapes: B batch, S sequence, T = B·S tokens, H heads, R rotary key, N the rest of a head's key, V a head's value,
X = N + R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.attention_output import output, output_backward
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, load_saved, save_for_backward, settings
from octile.nn.fused.linear import nt
from octile.nn.fused.quantize import WeightForms, quantize_gradient, requantize
from octile.nn.fused.text_attention import attend, attend_backward
from octile.nn.packed_texts import TextBorders
from octile.nn.rope import CosSin
from octile.ops.rope import latent_keys, latent_keys_backward, rotate_
from octile.scaled import ScaledTensor


@dataclass(frozen=True)
class Heads:
    """The shape of the heads: batch B of the tokens, H, N, R, V, and the scale of the scores."""

    batch: int
    count: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float


def latent_attention(
    x_q: BlockInput,
    x_kv: BlockInput,
    k_rope_TR: Tensor,
    cos_sin: CosSin,
    w_q: Tensor,
    w_kv: Tensor,
    w_o: Tensor,
    heads: Heads,
    dtype: torch.dtype,
    texts: TextBorders | None = None,
) -> Tensor:
    """Compute causal attention: [T, D] in dtype.

    Args:
        x_q, x_kv: the input of the queries, and that of keys and values; both of one recipe.
        k_rope_TR: [T, R], the rotary key of all heads, not yet rotated.
        cos_sin: cosines and sines of the S positions, each [S, R/2].
        w_q [H·X, ·], w_kv [H·(N+V), ·], w_o [D, H·V].
        texts: the borders of packed texts, whose tokens are one batch: B is 1, and S is T. None: each sequence is one.
    """
    weights = (w_q, w_kv, w_o)
    s = settings(x_q.recipe, dtype, weights, x_q.x, x_kv.x, k_rope_TR)
    return _LatentAttention.apply(x_q.x, x_kv.x, k_rope_TR, x_q, x_kv, cos_sin, heads, texts, s, *weights)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_q_TK: Tensor,
        x_kv_TK: Tensor,
        k_rope_TR: Tensor,
        x_q: BlockInput,
        x_kv: BlockInput,
        cos_sin: CosSin,
        heads: Heads,
        texts: TextBorders | None,
        s: Settings,
        *weights: Tensor,
    ) -> Tensor:
        layers = FusedLayers(weights, ctx.needs_input_grad[9:], s)
        w_q, w_kv, w_o = quantized = layers.quantize(weights)
        q, k, v = _queries_keys_values(x_q.q, x_kv.q, k_rope_TR, cos_sin, w_q, w_kv, heads, s.dtype)
        o_BSHV, lse_BHS = attend(q, k, v, heads.softmax_scale, texts)
        y_TD, saved_o = output(o_BSHV, layers, 2, weights, w_o)

        layers.report_fprop(0, weights, lambda: x_q_TK, x_q.q, w_q)
        layers.report_fprop(1, weights, lambda: x_kv_TK, x_kv.q, w_kv)
        kept = s.recipe.latent_attention_inputs == "kept"
        inputs = {"x_q": x_q.saved, "x_kv": x_kv.saved, "k_rope": None if kept else k_rope_TR, "cos_sin": cos_sin}
        qkv = (q, k, v) if kept else None
        cu_seqlens, ctx.mean_seqlen = texts or (None, None)
        save_for_backward(ctx, layers, quantized, **inputs, qkv=qkv, o=saved_o, lse=lse_BHS, cu_seqlens=cu_seqlens)
        ctx.how_saved, ctx.heads = (x_q.how_saved, x_kv.how_saved), heads
        ctx.x_dtypes = x_q_TK.dtype, x_kv_TK.dtype
        return y_TD

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        layers, (w_q, w_kv, w_o), saved = load_saved(ctx, dy_TD)
        heads, (q_saved, kv_saved) = ctx.heads, ctx.how_saved
        s, cos_sin = layers.settings, saved["cos_sin"]

        shape = torch.Size((heads.batch, len(dy_TD) // max(heads.batch, 1), heads.count, heads.v_dim))
        do_BSHV, dw_o = output_backward(dy_TD, shape, saved["o"], layers, 2, w_o)

        x_q, x_kv = q_saved.quantized(saved["x_q"]), kv_saved.quantized(saved["x_kv"])
        q, k, v = saved["qkv"] or _queries_keys_values(x_q, x_kv, saved["k_rope"], cos_sin, w_q, w_kv, heads, s.dtype)
        o_BSHV = saved["o"].dequantize(s.dtype).view(v.shape)
        texts = None if saved["cu_seqlens"] is None else TextBorders(saved["cu_seqlens"], ctx.mean_seqlen)
        dqkv = attend_backward(do_BSHV, q, k, v, o_BSHV, saved["lse"], heads.softmax_scale, texts)
        dx_q, dx_kv, dk_rope_TR, dw_q, dw_kv = projections_backward(
            ctx, dqkv, cos_sin, layers, (x_q, x_kv), (w_q, w_kv)
        )
        return dx_q, dx_kv, dk_rope_TR, None, None, None, None, None, None, dw_q, dw_kv, dw_o


def _queries_keys_values(
    x_q: ScaledTensor,
    x_kv: ScaledTensor,
    k_rope_TR: Tensor,
    cos_sin: CosSin,
    w_q: WeightForms,
    w_kv: WeightForms,
    heads: Heads,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q, k [B, S, H, X] and v [B, S, H, V]."""
    q_BSHX, kv_BSHX = (
        nt(x, w.w, None, dtype).unflatten(0, (heads.batch, -1)).unflatten(-1, (heads.count, -1))
        for x, w in ((x_q, w_q), (x_kv, w_kv))
    )
    rotate_(q_BSHX, *cos_sin)
    k_BSHX = latent_keys(kv_BSHX, k_rope_TR.unflatten(0, (heads.batch, -1)), *cos_sin, heads.nope_dim)
    return q_BSHX, k_BSHX, kv_BSHX[..., heads.nope_dim :]


def projections_backward(
    ctx: Any,
    dqkv: tuple[Tensor, Tensor, Tensor],
    cos_sin: CosSin,
    layers: FusedLayers,
    inputs: tuple[ScaledTensor, ScaledTensor],
    weights: tuple[WeightForms, WeightForms],
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of both projections, and of the rotary key, from those of q, k and v.

    Args:
        ctx: context of the autograd function, whose first two arguments are the inputs; `x_dtypes` has their dtypes.
        dqkv: gradients of q, k [B, S, H, X] and v [B, S, H, V]; that of q is overwritten.
        layers: the projections are its first two GEMMs.
        inputs, weights: what the projection to queries multiplied, then that to keys and values.

    Returns:
        gradients of both inputs, None where not needed; of the rotary key [T, R]; and of both weights, as
        `FusedLayers.wgrad` returns them.
    """
    dq_BSHX, dk_BSHX, dv_BSHV = dqkv
    (x_q, x_kv), (w_q, w_kv), formats = inputs, weights, layers.settings.formats
    cos_SR, sin_SR = cos_sin
    rotate_(dq_BSHX, cos_SR, -sin_SR)
    dkv_BSHX, dk_rope_BSR = latent_keys_backward(dk_BSHX, dv_BSHV, cos_SR, sin_SR)
    dq_TX, dkv_TX = (d.flatten(2).flatten(0, 1) for d in (dq_BSHX, dkv_BSHX))

    dq, dq_t = quantize_gradient(dq_TX, formats)
    dkv, dkv_t = quantize_gradient(dkv_TX, formats)
    layers.report_dgrad(0, lambda: dq_TX, dq, w_q)
    layers.report_dgrad(1, lambda: dkv_TX, dkv, w_kv)
    dx_q, dx_kv = (
        nt(d, w.w_t, None, dtype) if needed else None
        for d, w, dtype, needed in zip((dq, dkv), weights, ctx.x_dtypes, ctx.needs_input_grad, strict=False)
    )
    (dw_q,) = layers.wgrad(0, lambda: dq_TX, dq_t, requantize(x_q, formats.wgrad_x))
    (dw_kv,) = layers.wgrad(1, lambda: dkv_TX, dkv_t, requantize(x_kv, formats.wgrad_x))
    return dx_q, dx_kv, dk_rope_BSR.flatten(0, 1), dw_q, dw_kv
