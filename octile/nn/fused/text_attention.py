"""Attention to the tokens of one sequence, or to those of one text of packed sequences.

Shapes: B batch, S sequence, T = B·S tokens, H heads, X channels of a query and a key, V of a value.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels import flash_attn_4
from octile.nn.double_backward import creates_graph, differentiable_gradients, first_derivative_only
from octile.nn.fused.elementwise import can_use_operators
from octile.nn.packed_texts import TextBorders
from octile.ops.attention import attention, attention_backward
from octile.ops.packed_attention import packed_attention, packed_attention_backward


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, texts: TextBorders | None) -> tuple[Tensor, Tensor]:
    """Compute causal attention, without a gradient.

    Args:
        q, k: [B, S, H, X]; with texts [1, T, H, X].
        v: [B, S, H, V]; with texts [1, T, H, V].
        scale: the factor of q · k.
        texts: the borders of packed texts; None: a query attends to its whole sequence.

    Returns:
        o in the shape of v, and lse [B, H, S] or [1, H, T], float32.
    """
    if texts is None:
        return attention(q, k, v, scale)
    o_THV, lse_HT = packed_attention(q[0], k[0], v[0], texts.cu_seqlens, scale, texts.mean_seqlen)
    return o_THV[None], lse_HT[None]


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, texts: TextBorders | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, in their shapes, from the gradient of o and the results of `attend`."""
    if texts is None:
        return attention_backward(do, q, k, v, o, lse, scale)
    operands = do[0], q[0], k[0], v[0], o[0], lse[0]
    dq, dk, dv = packed_attention_backward(*operands, texts.cu_seqlens, scale, texts.mean_seqlen)
    return dq[None], dk[None], dv[None]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of whole sequences, q, k [B, S, H, X], v [B, S, H, V] → [B, S, H, V]; differentiable.

    torch's `scaled_dot_product_attention` computes it, or the operators do where they call flash-attn-4. Second
    derivatives are torch's.
    """
    can_use = can_use_operators(q, k, v) and q.dtype == k.dtype == v.dtype
    if can_use and flash_attn_4.why_not(q, v, causal=True) is None:
        return _CausalAttention.apply(q, k, v, scale)
    return _attend_by_torch(q, k, v, scale)


def _attend_by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q_BHSX, k_BHSX, v_BHSV = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q_BHSX, k_BHSX, v_BHSV, is_causal=True, scale=scale).transpose(1, 2)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        o, lse = attention(q, k, v, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        if creates_graph():
            formula = functools.partial(_attend_by_torch, scale=ctx.scale)
            return *differentiable_gradients(formula, (q, k, v), (do,)), None
        return *attention_backward(do.contiguous(), q, k, v, o, lse, ctx.scale), None


def text_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, texts: TextBorders) -> Tensor:
    """Compute attention within packed texts, q, k [1, T, H, X], v [1, T, H, V] → [1, T, H, V]; differentiable."""
    return _TextAttention.apply(q, k, v, scale, *texts)


class _TextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor, mean_seqlen: int | None
    ) -> Tensor:
        o, lse = attend(q, k, v, scale, TextBorders(cu_seqlens, mean_seqlen))
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)
        ctx.scale, ctx.mean_seqlen = scale, mean_seqlen
        return o

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
        texts = TextBorders(cu_seqlens, ctx.mean_seqlen)
        return *attend_backward(do.contiguous(), q, k, v, o, lse, ctx.scale, texts), None, None, None
