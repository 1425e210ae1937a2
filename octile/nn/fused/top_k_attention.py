"""Attention of each query to its top-k keys, of keys and values of all heads, a block of queries at a time.

    forward     a mask of the top-k keys, and torch's attention with it
    backward    the same once more, and its gradients; those of keys and values are summed over the blocks in FP32

Latent attention computes keys and values only where their layer has to be called, because it has hooks or was replaced;
otherwise `octile.nn.fused.sparse_latent_attention` reads the top-k keys alone. Here scores are computed of all keys and
masked, so the time is that of dense attention. Only a block's masks and scores are in memory at once, and what is saved
for backward is linear in the length of the sequence.

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


@torch.no_grad()
def top_k_weights(q_BSHX: Tensor, k_BSHX: Tensor, top_k_BSK: Tensor, scale: float) -> Tensor:
    """Return the mean over heads of the weights of the top-k keys, float32 [B, S, K]; 0 where there is none.

    Args:
        q_BSHX, k_BSHX, top_k_BSK, scale: as in `top_k_attention`.
    """
    b, s, h, _ = q_BSHX.shape
    weights_BSK = torch.empty(top_k_BSK.shape, dtype=torch.float32, device=q_BSHX.device)
    for block in causal_query_blocks(b * h, s, MAX_SCORES):
        top_k_BCK, k_BTHX = top_k_BSK[:, block], k_BSHX[:, : block.stop]
        with without_autocast(q_BSHX.device):
            p_BCT = attention_distribution(q_BSHX[:, block], k_BTHX, top_k_mask(top_k_BCK, block.stop), scale)
        weights_BCK = p_BCT.gather(-1, top_k_BCK.clamp(min=0).long())
        weights_BSK[:, block] = weights_BCK.masked_fill_(top_k_BCK < 0, 0.0)
    return weights_BSK


def attention_distribution(q_BCHX: Tensor, k_BTHX: Tensor, seen_BCT: Tensor, scale: float) -> Tensor:
    """Return the mean over heads of attention's weights: float32 [B, C, T], of which each row's sum is 1."""
    q_BHCX, k_BHXT = q_BCHX.permute(0, 2, 1, 3).float(), k_BTHX.permute(0, 2, 3, 1).float()
    score_BHCT = (q_BHCX @ k_BHXT).mul_(scale).masked_fill_(~seen_BCT[:, None], -torch.inf)
    return score_BHCT.softmax(-1).mean(1)


class _TopKAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, top_k_BSK: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, top_k_BSK)
        ctx.scale = scale
        b, s, h, _ = q.shape
        blocks = causal_query_blocks(b * h, s, MAX_SCORES)
        parts = [_attend(q[:, i], k[:, : i.stop], v[:, : i.stop], top_k_BSK[:, i], scale) for i in blocks]
        return torch.cat(parts, dim=1)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do_BSHV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, top_k_BSK = ctx.saved_tensors
        b, s, h, _ = q.shape
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
        for block in causal_query_blocks(b * h, s, MAX_SCORES):
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


def causal_query_blocks(rows: int, length: int, max_scores: int) -> Iterator[slice]:
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
