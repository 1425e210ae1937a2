"""Attention of each query to its top-k keys, with its backward pass, a block of queries at a time.

    forward     a mask of the top-k keys, and torch's attention with it
    backward    the same once more, and its gradients; those of keys and values are summed over the blocks in FP32

Scores are computed of all keys and masked, so the time is that of dense attention; only a block's masks and scores are
in memory at once, and what is saved for backward is linear in the length of the sequence. Serving attends with
`octile.ops.sparse_attention`, which reads the top-k keys alone and has no backward pass.

Source: DeepSeek-V3.2-Exp (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) §1.
Shapes: B batch, S sequence, H heads, X channels of a query and a key, V of a value, K top-k keys, T keys that a block
of C queries sees.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.ops.matmul import without_autocast

MAX_SCORES = 2**26  # of attention or of the indexer in memory at once, at least those of one query of each sequence


def top_k_attention(q_BSHX: Tensor, k_BSHX: Tensor, v_BSHV: Tensor, top_k_BSK: Tensor, scale: float) -> Tensor:
    """Attend from each query to its top-k keys: [B, S, H, V]; differentiable in q, k and v.

    Args:
        q_BSHX, k_BSHX, v_BSHV: in one dtype.
        top_k_BSK: int32, positions up to the query's own, each at most once; −1 stands for none, at least one is not.
        scale: the factor of the scores.
    """
    return _TopKAttention.apply(q_BSHX, k_BSHX, v_BSHV, top_k_BSK, scale)


class _TopKAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, top_k_BSK: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, top_k_BSK)
        ctx.scale = scale
        b, s, h, _ = q.shape
        blocks = query_blocks(b * h, s, MAX_SCORES)
        parts = [_attend(q[:, i], k[:, : i.stop], v[:, : i.stop], top_k_BSK[:, i], scale) for i in blocks]
        return torch.cat(parts, dim=1)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do_BSHV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, top_k_BSK = ctx.saved_tensors
        b, s, h, _ = q.shape
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
        for block in query_blocks(b * h, s, MAX_SCORES):
            with torch.enable_grad():
                inputs = q[:, block], k[:, : block.stop], v[:, : block.stop]
                inputs = tuple(t.detach().requires_grad_() for t in inputs)
                o = _attend(*inputs, top_k_BSK[:, block], ctx.scale)
            dq[:, block], dk_block, dv_block = torch.autograd.grad(o, inputs, do_BSHV[:, block])
            dk[:, : block.stop] += dk_block
            dv[:, : block.stop] += dv_block
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, top_k_BCK: Tensor, scale: float) -> Tensor:
    mask_B1CT = top_k_mask(top_k_BCK, k.shape[1])[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with without_autocast(q.device):
        return F.scaled_dot_product_attention(q, k, v, mask_B1CT, scale=scale).transpose(1, 2)


def query_blocks(rows: int, length: int, max_scores: int) -> Iterator[slice]:
    """Divide the queries of a sequence into blocks, of which each has at most max_scores scores, or is one query.

    Args:
        rows: scores of one query and one key, those of all heads and sequences.
        length: S.
        max_scores: the most scores, rows · C · T, of a block, where T is its end.
    """
    first = 0
    while first < length:
        # the largest C with rows · C · (first + C) ≤ max_scores
        c = int(((first**2 + 4 * max_scores / max(rows, 1)) ** 0.5 - first) / 2)
        last = min(first + max(c, 1), length)
        yield slice(first, last)
        first = last


def top_k_mask(top_k_BCK: Tensor, n_keys: int) -> Tensor:
    """Whether each of T keys is among the top-k keys: bool [B, C, T]."""
    columns = top_k_BCK.masked_fill(top_k_BCK < 0, n_keys).long()
    mask = torch.zeros(*top_k_BCK.shape[:2], n_keys + 1, dtype=torch.bool, device=top_k_BCK.device)
    return mask.scatter_(-1, columns, True)[..., :n_keys]
