"""Multi-head latent attention with the forward pass of serving, as one function.

    forward     q = x_q · w_qᵀ, its rotary part rotated        rows = latents and rotated key, rounded as if cached
                o by the operators of serving                  (`octile.ops.absorbed_attention`)
                o → 1×128 for the GEMM, and → E5M6, saved once
                y = o · w_oᵀ
    backward    dy → 1×128 and 128×1, do = dy · w_o
                q recomputed, or as saved, as the recipe's `latent_attention_inputs` says
                k, v = rows · w_kvᵀ in high precision
                dq, dk, dv from q, k, v, the saved o and the softmax's denominators → 1×128 and 128×1
                dx_q = dq · w_q, dlatent = (dk, dv) · w_kv
                dw: three GEMMs; the saved o → 128×1, x_q and the rows recomputed → 128×1

The forward pass multiplies queries by W_UK and results by W_UV, whose values are those of the quantized w_kv, and
computes no key or value of a head. The backward pass is that of attention to keys and values: the same function, in
another order of sums, with the result and the denominators of the forward pass. The gradient passes through the
rounding of rows and weights. Observers see the quantized w_kv, and no GEMM of it.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.2; DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch, S sequence, T = B·S tokens, H heads, C latent, R rotary key, N the rest of a head's key, V a head's
value, X = N + R, W = C + R; a text has P pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused import high_precision
from octile.nn.fused.attention_output import output, output_backward
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, load_saved, save_for_backward, settings
from octile.nn.fused.linear import nt
from octile.nn.fused.mla import Heads, projections_backward
from octile.nn.fused.quantize import WeightForms, quantize_operand
from octile.nn.rope import CosSin
from octile.nn.tables import table
from octile.ops.absorbed_attention import ROWS, attend_with_lse, multiply_heads
from octile.ops.attention import attention_backward
from octile.ops.latent_cache import PAGE, read_latents, row_bytes, write_latents
from octile.ops.rope import latent_keys, rotate_, rotate_and_copy_
from octile.scaled import ScaledTensor


def served_attention(
    x_q: BlockInput,
    latent_TC: Tensor,
    k_rope_TR: Tensor,
    cos_sin: CosSin,
    w_q: Tensor,
    w_kv: Tensor,
    w_o: Tensor,
    heads: Heads,
    dtype: torch.dtype,
) -> Tensor:
    """Compute causal attention: [T, D] in dtype.

    Args:
        x_q: the input of the queries.
        latent_TC: normalized latents, in dtype.
        k_rope_TR: the rotary key of all heads, not yet rotated.
        cos_sin: cosines and sines of the S positions, each [S, R/2].
        w_q [H·X, ·], w_kv [H·(N+V), C], w_o [D, H·V].
    """
    weights = (w_q, w_kv, w_o)
    s = settings(x_q.recipe, dtype, weights, x_q.x, latent_TC, k_rope_TR)
    return _ServedAttention.apply(x_q.x, latent_TC, k_rope_TR, x_q, cos_sin, heads, s, *weights)


class _ServedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_q_TK: Tensor,
        latent_TC: Tensor,
        k_rope_TR: Tensor,
        x_q: BlockInput,
        cos_sin: CosSin,
        heads: Heads,
        s: Settings,
        *weights: Tensor,
    ) -> Tensor:
        layers = FusedLayers(weights, ctx.needs_input_grad[7:], s)
        w_q, w_kv, w_o = quantized = layers.quantize(weights)
        cache = _cached(latent_TC, k_rope_TR, cos_sin, heads.batch, s.recipe.latents)
        w_k_HCN, w_v_HVC = _weights_of_heads(w_kv, heads, s.dtype)
        q_BSHX = _queries(x_q.q, w_q, heads, s)
        q_BSHW = _rotate_and_absorb(q_BSHX, cos_sin, w_k_HCN)
        o_BSHV, lse_BHS = _attend(q_BSHW, cache, w_v_HVC, heads.softmax_scale)
        y_TD, saved_o = output(o_BSHV, layers, 2, weights, w_o)

        layers.report_fprop(0, weights, lambda: x_q_TK, x_q.q, w_q)
        kept = q_BSHX if s.recipe.latent_attention_inputs == "kept" else None
        attended = {"q": kept, "cache": cache, "cos_sin": cos_sin, "lse": lse_BHS}
        save_for_backward(ctx, layers, quantized, x_q=x_q.saved, o=saved_o, **attended)
        ctx.how_saved, ctx.heads, ctx.latent_dim = x_q.how_saved, heads, latent_TC.shape[1]
        ctx.x_dtypes = x_q_TK.dtype, latent_TC.dtype
        return y_TD

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        layers, (w_q, w_kv, w_o), saved = load_saved(ctx, dy_TD)
        heads, s, cos_sin = ctx.heads, layers.settings, saved["cos_sin"]
        shape = torch.Size((heads.batch, len(dy_TD) // max(heads.batch, 1), heads.count, heads.v_dim))
        do_BSHV, dw_o = output_backward(dy_TD, shape, saved["o"], layers, 2, w_o)

        x_q = ctx.how_saved.quantized(saved["x_q"])
        q_BSHX = saved["q"]
        if q_BSHX is None:
            q_BSHX = _queries(x_q, w_q, heads, s)
            rotate_(q_BSHX, *cos_sin)
        latent_TC, rope_TR = _read(saved["cache"], ctx.latent_dim, shape, s.dtype)
        k_BSHX, v_BSHV = _keys_and_values(latent_TC, rope_TR, w_kv, shape, heads, s)
        o_BSHV = saved["o"].dequantize(s.dtype).view(shape)
        dqkv = attention_backward(do_BSHV, q_BSHX, k_BSHX, v_BSHV, o_BSHV, saved["lse"], heads.softmax_scale)
        x_kv = quantize_operand(latent_TC, s.formats.x, "x")
        dx_q, dlatent, dk_rope_TR, dw_q, dw_kv = projections_backward(
            ctx, dqkv, cos_sin, layers, (x_q, x_kv), (w_q, w_kv)
        )
        return dx_q, dlatent, dk_rope_TR, None, None, None, None, dw_q, dw_kv, dw_o


def _queries(x: ScaledTensor, w: WeightForms, heads: Heads, s: Settings) -> Tensor:
    """Compute queries [B, S, H, X], not yet rotated."""
    q_TX = nt(x, w.w, None, s.dtype, batch_invariant=True)
    return q_TX.unflatten(0, (heads.batch, -1)).unflatten(-1, (heads.count, -1))


def _rotate_and_absorb(q_BSHX: Tensor, cos_sin: CosSin, w_k_HCN: Tensor) -> Tensor:
    """Rotate queries in place, and return them times W_UK, followed by their rotary channels: [B, S, H, W]."""
    _, c, n = w_k_HCN.shape
    q_BSHW = q_BSHX.new_empty(*q_BSHX.shape[:3], c + q_BSHX.shape[3] - n)
    rotate_and_copy_(q_BSHX, q_BSHW, *cos_sin)
    multiply_heads(q_BSHX.flatten(0, 1)[..., :n], w_k_HCN, q_BSHW.flatten(0, 1)[..., :c])
    return q_BSHW


def _cached(latent_TC: Tensor, k_rope_TR: Tensor, cos_sin: CosSin, batch: int, latents: str) -> Tensor:
    """Write the rows of all texts to pages of their own, as serving caches them: [B·P, 64, W], or bytes."""
    c, r = latent_TC.shape[1], k_rope_TR.shape[1]
    rope_BS1R = k_rope_TR.reshape(batch, -1, 1, r).clone()
    rotate_(rope_BS1R, *cos_sin)
    s = rope_BS1R.shape[1]
    n_pages = -(-s // PAGE)
    width, dtype = (row_bytes(c, r), torch.uint8) if latents == "fp8" else (c + r, latent_TC.dtype)
    new = latent_TC.new_zeros if s % PAGE else latent_TC.new_empty  # rows without a position may hold no NaN
    cache = new(batch * n_pages, PAGE, width, dtype=dtype)
    slots_T = _row_tables(batch, s, cache.device).slots_T
    write_latents(cache, slots_T, latent_TC.contiguous(), rope_BS1R.flatten(0, 2))
    return cache


class _RowTables(NamedTuple):
    """Where the rows of texts are, and what they attend to.

    Attributes:
        slots_T: int64, the slot of each row.
        pages_RP: int32, the pages of its text, also of rows that are added to a text (see `_attend`).
        lengths_R: int32, its position plus 1; 0 of added rows.
    """

    slots_T: Tensor
    pages_RP: Tensor
    lengths_R: Tensor


def _row_tables(b: int, s: int, device: torch.device) -> _RowTables:
    """Return the tables of b texts of s positions, the same for all layers."""
    n_pages, added = -(-s // PAGE), -s % ROWS

    def compute() -> _RowTables:
        pages_BP = torch.arange(b * n_pages, dtype=torch.int32, device=device).view(b, n_pages)
        slots_BL = torch.arange(b * n_pages * PAGE, device=device).view(b, n_pages * PAGE)
        lengths_R = F.pad(torch.arange(1, s + 1, dtype=torch.int32, device=device), (0, added))
        return _RowTables(slots_BL[:, :s].flatten(), pages_BP.repeat_interleave(s + added, dim=0), lengths_R.repeat(b))

    return table(("tables of rows", b, s, device), compute)


def _attend(q_BSHW: Tensor, cache: Tensor, w_v_HVC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from each row to those of its text up to its own: [B, S, H, V], and lse as `attention` returns it.

    Rows without positions follow the last one of a text, so that its rows are a multiple of `ROWS`.
    """
    b, s = q_BSHW.shape[:2]
    added = -s % ROWS
    q_BRHW = F.pad(q_BSHW, (0, 0, 0, 0, 0, added)) if added else q_BSHW
    tables = _row_tables(b, s, q_BSHW.device)
    texts = tables.pages_RP, tables.lengths_R
    o_BRHV = q_BSHW.new_empty(*q_BRHW.shape[:3], w_v_HVC.shape[1])
    out_THV = o_BRHV.flatten(0, 1)
    lse_TH = attend_with_lse(q_BRHW.flatten(0, 1), cache, *texts, w_v_HVC, scale, out_THV, max(s + added, 1))
    lse_BRH = lse_TH.view(b, s + added, -1)
    return o_BRHV[:, :s].contiguous(), lse_BRH[:, :s].transpose(1, 2).contiguous()


def _read(cache: Tensor, latent_dim: int, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows of all texts [B, S, ·]: latents [T, C] and rotated keys [T, R]."""
    b, s = shape[:2]
    if cache.dtype == dtype:  # not copied if texts fill their pages
        rows_BLW = cache.unflatten(0, (b, -(-s // PAGE))).flatten(1, 2)
        rows_TW = rows_BLW[:, :s].flatten(0, 1)
    else:
        rows_TW = read_latents(cache, _row_tables(b, s, cache.device).slots_T, latent_dim, dtype)
    return rows_TW[:, :latent_dim], rows_TW[:, latent_dim:]


def _weights_of_heads(w_kv: WeightForms, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return W_UK [H, C, N] and W_UV [H, V, C], contiguous as serving has them, with the quantized weight's values."""
    w_HYC = w_kv.w.dequantize(dtype).unflatten(0, (heads.count, -1))
    w_k_HNC, w_v_HVC = w_HYC.split([heads.nope_dim, heads.v_dim], dim=1)
    return w_k_HNC.mT.contiguous(), w_v_HVC.contiguous()


def _keys_and_values(
    latent_TC: Tensor, rope_TR: Tensor, w_kv: WeightForms, shape: torch.Size, heads: Heads, s: Settings
) -> tuple[Tensor, Tensor]:
    """Compute k [B, S, H, X] and v [B, S, H, V]; rotary keys are rotated before."""
    kv_TX = high_precision.nt(latent_TC, w_kv.w.dequantize(s.dtype), None, s.dtype)
    kv_BSHX = kv_TX.view(*shape[:2], heads.count, -1)
    angles = table(("no rotation", shape[1], heads.rope_dim, rope_TR.device), lambda: _no_rotation(rope_TR, shape[1]))
    k_BSHX = latent_keys(kv_BSHX, rope_TR.view(*shape[:2], -1), *angles, heads.nope_dim)
    return k_BSHX, kv_BSHX[..., heads.nope_dim :]


def _no_rotation(rope_TR: Tensor, length: int) -> CosSin:
    """Return cosines and sines of angles of 0."""
    sin_SR = rope_TR.new_zeros(length, rope_TR.shape[1] // 2, dtype=torch.float32)
    return sin_SR + 1, sin_SR
