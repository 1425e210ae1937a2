"""Operators of small-batch decode: products of FP8 weights and latent attention, each with what surrounds it.

With few rows a product reads its weight and does little else, and a step of many small operators waits for their
starts. So these operators take together what other steps compute one after the other, with the same formulas:

    few_rows_nt        rms_norm_quantize or quantize, matmul_nt, and the addition of other rows
    latent_attention   queries times W_UK, rotary embeddings, the norm of latents, write_latents, paged_attention, and
                       its result times W_UV

Results that lie between these are rounded to the rows' dtype where the single operators return them. Hopper has kernels
for at most 8 rows in bfloat16; the single operators compute other calls.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1; DeepSeek-V3 (arXiv 2412.19437) §3.3.
Shapes: M rows, N and K of a weight, H heads, C channels of a latent, R of the rotary key, W = C + R, X the other
channels of a head's query, V channels of a head's value, P pages.
"""

import torch
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.kernels.cuda.few_rows import attention, launcher
from octile.ops.absorbed_attention import attend, multiply_heads
from octile.ops.latent_cache import check_write, write_and_rotate, write_latents
from octile.ops.matmul import matmul_nt
from octile.ops.norm import check_operands, rms_norm, rms_norm_quantize
from octile.ops.operator import operator
from octile.ops.paged_attention import check_attention, paged_attention
from octile.ops.quantize import check_device, check_input_dtype, check_scale, quantize
from octile.ops.rope import check_angles, rotate_
from octile.ops.row_invariant import row_invariant_scaled_nt


@operator()
def few_rows_nt(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    power_of_2: bool,
    add: Tensor | None = None,
    row_invariant: bool = False,
) -> Tensor:
    """Quantize rows to E4M3 in 1×128 tiles, after normalizing them, and multiply: x[M, K] · weight[N, K]ᵀ → [M, N].

    Args:
        x: [M, K] bfloat16 or float32.
        norm_weight: [K], float32, bfloat16 or float16, of RMSNorm before the quantization; None: x is not normalized.
        eps: what RMSNorm adds to the mean of the squares.
        weight, scale: float8_e4m3fn [N, K] in 128×128 blocks, and float32 [⌈N/128⌉, ⌈K/128⌉]. A GPU reads these and
            norm_weight before the previous kernel of the stream has ended, which must not write them.
        power_of_2: whether to round the scales of x up to powers of two.
        add: [M, N] in x's dtype, added to the rounded product; None: nothing.
        row_invariant: whether a row has the bits of `row_invariant_scaled_nt`, for any M and at any position.

    Returns:
        [M, N] in x's dtype.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_nt(x, norm_weight, weight, scale, add)
    return _few_rows_nt(x, norm_weight, eps, weight, scale, power_of_2, add, row_invariant)


def _few_rows_nt(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    power_of_2: bool,
    add: Tensor | None,
    row_invariant: bool,
) -> Tensor:
    if norm_weight is None:
        data, x_scale = quantize(x, *TILE, "e4m3", power_of_2)
    else:
        data, x_scale, _, _ = rms_norm_quantize(x, norm_weight, eps, "e4m3", power_of_2, False)
    operands = data, x_scale, TILE, weight, scale, BLOCK
    y = row_invariant_scaled_nt(*operands, None, x.dtype) if row_invariant else matmul_nt(*operands, x.dtype)
    return y if add is None else y.add_(add)


@few_rows_nt.register_fake
def _(x, norm_weight, eps, weight, scale, power_of_2, add=None, row_invariant=False):
    return x.new_empty(x.shape[0], weight.shape[0])


@few_rows_nt.register_kernel("cuda")
def _(x, norm_weight, eps, weight, scale, power_of_2, add=None, row_invariant=False):
    _check_nt(x, norm_weight, weight, scale, add)
    arguments = x, norm_weight, eps, weight, scale, power_of_2, add, row_invariant
    if launcher.why_unsupported(x, norm_weight, weight, scale, add, row_invariant):
        return _few_rows_nt(*arguments)
    return launcher.few_rows_nt(*arguments)


@operator(writes=("cache",))
def latent_attention(
    q: Tensor,
    kv: Tensor,
    w_k: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    w_v: Tensor,
    scale: float,
    row_invariant: bool = False,
) -> Tensor:
    """Write the rows' latents and rotary keys to a cache, and attend from each row to the first positions of its text.

    Args:
        q: [M, H·(X + R)], float32, bfloat16 or float16, rows contiguous: queries, not rotated.
        kv: [M, C + R] in q's dtype, rows contiguous: latents, not normalized, and rotary keys, not rotated.
        w_k: [H, C, X] in q's dtype, contiguous: W_UK. A GPU reads it and w_v before the previous kernel of the stream
            has ended, which must not write them.
        norm_weight: [C], float32, bfloat16 or float16, of the RMSNorm of latents.
        eps: what RMSNorm adds to the mean of the squares.
        cos, sin: float32 [M, R/2], of the rows' positions.
        slots: int64 [M], where each row is written; negative: nowhere. To rows that attend to it, a slot is one of
            their last 8 positions: a GPU reads others before they are written.
        cache: as in `octile.ops.latent_cache.write_latents`.
        pages, lengths: as in `octile.ops.paged_attention.paged_attention`.
        w_v: [H, V, C] in q's dtype, contiguous: W_UV.
        scale: the factor of the scores.
        row_invariant: whether results and cache have the bits of the operators that batch-invariant mode takes:
            `rms_norm`, `write_and_rotate`, and those of `octile.ops.absorbed_attention`.

    Returns:
        [M, H·V] in q's dtype.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together; on a CPU, as in `paged_attention`.
        IndexError: on a CPU, a slot is not in the cache. A GPU does not write such a row.
    """
    _check_attention(q, kv, w_k, norm_weight, cos, sin, slots, cache, pages, lengths, w_v)
    queries, values = (_row_invariant_queries, _row_invariant_values) if row_invariant else (_queries, _values)
    q_MHW = queries(q, kv, w_k, norm_weight, eps, cos, sin, slots, cache)
    return values(q_MHW, cache, pages, lengths, w_v, scale)


def _queries(
    q: Tensor, kv: Tensor, w_k: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, slots: Tensor,
    cache: Tensor,
) -> Tensor:  # fmt: skip
    """Return queries in the absorbed form, [M, H, C + R], and write the rows' latents and rotary keys."""
    n_heads, latent_dim, nope_dim = w_k.shape
    q_MHX, latent_MC, rope_MR = q.clone().unflatten(-1, (n_heads, -1)), kv[:, :latent_dim], kv[:, latent_dim:].clone()
    rotate_(q_MHX[None], cos, sin)
    rotate_(rope_MR[None, :, None], cos, sin)
    write_latents(cache, slots, rms_norm(latent_MC, norm_weight, eps)[0], rope_MR)
    q_MHW = q.new_empty(len(q), n_heads, kv.shape[1])
    torch.bmm(q_MHX[..., :nope_dim].transpose(0, 1), w_k.mT, out=q_MHW[..., :latent_dim].transpose(0, 1))
    q_MHW[..., latent_dim:] = q_MHX[..., nope_dim:]
    return q_MHW


def _values(q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """Return the result of attention times the values' weight, [M, H·V]."""
    o_MHC = paged_attention(q, cache, pages, lengths, w_v.shape[2], scale)
    o_MHV = q.new_empty(*q.shape[:2], w_v.shape[1])
    torch.bmm(o_MHC.transpose(0, 1), w_v.mT, out=o_MHV.transpose(0, 1))
    return o_MHV.flatten(1)


def _row_invariant_queries(
    q: Tensor, kv: Tensor, w_k: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, slots: Tensor,
    cache: Tensor,
) -> Tensor:  # fmt: skip
    n_heads, latent_dim, nope_dim = w_k.shape
    q_MHX, latent_MC = q.unflatten(-1, (n_heads, -1)), rms_norm(kv[:, :latent_dim], norm_weight, eps)[0]
    q_MHW = q.new_empty(len(q), n_heads, kv.shape[1])
    write_and_rotate(cache, slots, latent_MC, kv[:, latent_dim:], None, eps, cos, sin, q_MHX, q_MHW)
    multiply_heads(q_MHX[..., :nope_dim], w_k, q_MHW[..., :latent_dim])
    return q_MHW


def _row_invariant_values(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, w_v: Tensor, scale: float
) -> Tensor:  # fmt: skip
    o_MHV = q.new_empty(*q.shape[:2], w_v.shape[1])
    attend(q, cache, pages, lengths, w_v, scale, o_MHV)
    return o_MHV.flatten(1)


@latent_attention.register_fake
def _(q, kv, w_k, norm_weight, eps, cos, sin, slots, cache, pages, lengths, w_v, scale, row_invariant=False):
    return q.new_empty(q.shape[0], w_v.shape[0] * w_v.shape[1])


@latent_attention.register_kernel("cuda")
def _(q, kv, w_k, norm_weight, eps, cos, sin, slots, cache, pages, lengths, w_v, scale, row_invariant=False):
    _check_attention(q, kv, w_k, norm_weight, cos, sin, slots, cache, pages, lengths, w_v)
    arguments = q, kv, w_k, norm_weight, eps, cos, sin, slots, cache
    why_no_queries = attention.why_no_queries(q, kv, w_k, norm_weight, cos, sin, slots, cache)
    if row_invariant:
        why_no_queries = why_no_queries or attention.why_no_row_invariant_queries(w_k, norm_weight)
        q_MHW = (_row_invariant_queries if why_no_queries else attention.latent_queries)(*arguments)
        has_no_kernel = attention.why_no_values(q_MHW, cache, pages, w_v, row_invariant)
        values = _row_invariant_values if has_no_kernel else attention.row_invariant_values
    else:
        q_MHW = (_queries if why_no_queries else attention.latent_queries)(*arguments)
        values = _values if attention.why_no_values(q_MHW, cache, pages, w_v) else attention.attention_values
    return values(q_MHW, cache, pages, lengths, w_v, scale)


def _check_nt(x: Tensor, norm_weight: Tensor | None, weight: Tensor, scale: Tensor, add: Tensor | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x must be bfloat16 or float32, not {x.dtype}")
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"weight must be float8_e4m3fn, not {weight.dtype}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x and weight must be [M, K] and [N, K], not {tuple(x.shape)} and {tuple(weight.shape)}")
    check_device("x", x, "weight", weight)
    check_scale("weight", weight, scale, *BLOCK)
    if norm_weight is not None:
        check_operands(x, norm_weight, "norm_weight")
    if add is None:
        return
    if add.dtype != x.dtype:
        raise TypeError(f"add must be {x.dtype} as x, not {add.dtype}")
    if add.shape != (len(x), len(weight)):
        raise ValueError(f"add must be ({len(x)}, {len(weight)}), not {tuple(add.shape)}")
    check_device("x", x, "add", add)


def _check_attention(
    q: Tensor, kv: Tensor, w_k: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor,
    pages: Tensor, lengths: Tensor, w_v: Tensor,
) -> None:  # fmt: skip
    check_input_dtype("q", q)
    for name, t in (("kv", kv), ("w_k", w_k), ("w_v", w_v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
        check_device("q", q, name, t)
    if q.dim() != 2 or kv.dim() != 2 or w_k.dim() != 3 or len(q) != len(kv):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, kv, w_k))
        raise ValueError(f"q, kv and w_k must be [M, H·(X + R)], [M, C + R] and [H, C, X], not {shapes}")
    n_heads, latent_dim, nope_dim = w_k.shape
    rope_dim = kv.shape[1] - latent_dim
    if rope_dim < 0 or q.shape[1] != n_heads * (nope_dim + rope_dim):
        raise ValueError(f"q must have {n_heads}·({nope_dim} + {rope_dim}) channels as w_k and kv, not {q.shape[1]}")
    if w_v.dim() != 3 or (w_v.shape[0], w_v.shape[2]) != (n_heads, latent_dim):
        raise ValueError(f"w_v must be ({n_heads}, V, {latent_dim}) as w_k, not {tuple(w_v.shape)}")
    check_operands(kv[:, :latent_dim], norm_weight, "norm_weight")
    check_angles("q", q.unflatten(-1, (n_heads, -1))[None], cos, sin)
    if 2 * cos.shape[1] != rope_dim:
        raise ValueError(f"cos must be ({len(q)}, {rope_dim // 2}) for kv's rotary channels, not {tuple(cos.shape)}")
    check_write(cache, slots, kv[:, :latent_dim], kv[:, latent_dim:])
    check_attention(q.new_empty(len(q), n_heads, kv.shape[1]), cache, pages, lengths, latent_dim, 0, 1)
