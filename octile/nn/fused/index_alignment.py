"""The loss that aligns the indexer with attention, a block of queries at a time.

    p = Σ over heads of softmax(scale · q · kᵀ), divided by its sum        of the keys that the query sees
    i = Σ over heads of weight · relu(index query · index key)
    loss = KL(p ‖ softmax(i)), the mean over all queries

The keys are all of a causal mask, or the query's top-k keys. The gradients are computed with the loss,
since p is the larger part of the work: what is saved for backward is as large as the indexer's queries.

Source: DeepSeek-V3.2-Exp (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) §2.1, equations 3 and 4, which sum over the
queries.
Shapes: B batch, S sequence, H heads and X channels of attention, G heads and E channels of the indexer, K top-k keys,
T keys that a block of C queries sees.
"""

from typing import Any

import torch
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.top_k_attention import MAX_SCORES, query_blocks, top_k_mask
from octile.ops.matmul import without_autocast


def alignment_loss(
    index_q_BSGE: Tensor,
    index_k_BSE: Tensor,
    weights_BSG: Tensor,
    q_BSHX: Tensor,
    k_BSHX: Tensor,
    top_k_BSK: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute the loss in nats, float32 []; differentiable in the first three arguments.

    Args:
        index_q_BSGE, index_k_BSE, weights_BSG: queries, keys and weights of the indexer, float32.
        q_BSHX, k_BSHX: attention's queries and keys, which get no gradient.
        top_k_BSK: as in `octile.nn.fused.top_k_attention`; None: each query sees all keys up to its own.
        scale: factor of attention's scores.
    """
    return _AlignmentLoss.apply(index_q_BSGE, index_k_BSE, weights_BSG, q_BSHX, k_BSHX, top_k_BSK, scale)


class _AlignmentLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        weights: Tensor,
        q: Tensor,
        k: Tensor,
        top_k_BSK: Tensor | None,
        scale: float,
    ) -> Tensor:
        (b, s, h, _), g = q.shape, index_q.shape[2]
        total = index_q.new_zeros(())
        gradients = [torch.zeros_like(t) for t in (index_q, index_k, weights)] if any(ctx.needs_input_grad) else []
        with without_autocast(q.device):
            for block in query_blocks(b * (h + 2 * g), s, MAX_SCORES):
                seen_BCT = _seen(block, top_k_BSK, q.device)
                p_BCT = attention_distribution(q[:, block], k[:, : block.stop], seen_BCT, scale)
                inputs = [index_q[:, block], index_k[:, : block.stop], weights[:, block]]
                with torch.set_grad_enabled(bool(gradients)):
                    inputs = [t.detach().requires_grad_(bool(gradients)) for t in inputs]
                    loss = _divergence(p_BCT, index_logits(*inputs), seen_BCT) / (b * s)
                total += loss.detach()
                if gradients:
                    sums = gradients[0][:, block], gradients[1][:, : block.stop], gradients[2][:, block]
                    for total_gradient, gradient in zip(sums, torch.autograd.grad(loss, inputs), strict=True):
                        total_gradient += gradient
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *(dloss * gradient for gradient in ctx.saved_tensors), None, None, None, None


def attention_distribution(q_BCHX: Tensor, k_BTHX: Tensor, seen_BCT: Tensor, scale: float) -> Tensor:
    """Return the mean over heads of attention's weights: float32 [B, C, T], of which each row's sum is 1."""
    q_BHCX, k_BHXT = q_BCHX.permute(0, 2, 1, 3).float(), k_BTHX.permute(0, 2, 3, 1).float()
    score_BHCT = (q_BHCX @ k_BHXT).mul_(scale).masked_fill_(~seen_BCT[:, None], -torch.inf)
    return score_BHCT.softmax(-1).mean(1)


def index_logits(q_BCGE: Tensor, k_BTE: Tensor, weights_BCG: Tensor) -> Tensor:
    """Return the indexer's logits, float32 [B, C, T]; see `octile.ops.mqa_logits`, which has no gradient."""
    score_BCGT = (q_BCGE.flatten(1, 2) @ k_BTE.mT).unflatten(1, q_BCGE.shape[1:3]).relu()
    return (weights_BCG[:, :, None] @ score_BCGT)[:, :, 0]


def _seen(block: slice, top_k_BSK: Tensor | None, device: torch.device) -> Tensor:
    """Which keys each query of a block sees: bool [B or 1, C, T]."""
    if top_k_BSK is not None:
        return top_k_mask(top_k_BSK[:, block], block.stop)
    query_C, key_T = (torch.arange(first, block.stop, device=device) for first in (block.start, 0))
    return (key_T <= query_C[:, None])[None]


def _divergence(p_BCT: Tensor, logits_BCT: Tensor, seen_BCT: Tensor) -> Tensor:
    """Return the sum of KL(p ‖ softmax(logits)) over all queries; both are of the keys that each sees."""
    log_BCT = logits_BCT.masked_fill(~seen_BCT, -torch.inf).log_softmax(-1).masked_fill(~seen_BCT, 0.0)
    return torch.xlogy(p_BCT, p_BCT).sum() - (p_BCT * log_BCT).sum()
