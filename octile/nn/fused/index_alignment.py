"""The loss that aligns the indexer with attention, a block of queries at a time.

    p = the mean over heads of attention's weights                      of the keys that the query sees
    i = Σ over heads of weight · relu(index query · index key)
    loss = KL(p ‖ softmax(i)), the mean over all queries

The keys are all of a causal mask, for which p is computed here, or the query's top-k keys, for which attention has
computed it. Logits of other keys are not computed then, so that time grows with S · K. On a GPU the products over top-k
keys are those of BF16: the indexer's queries and keys are exact in it, the gradients of the scores are rounded to it.
The gradients are computed with the loss, since p is the larger part of the work: what is saved for backward is as large
as the indexer's queries.

Source: DeepSeek-V3.2-Exp (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) §2.1, equations 3 and 4, which sum over the
queries.
Shapes: B batch, S sequence, H heads and X channels of attention, G heads and E channels of the indexer, K top-k keys,
T keys that a block of C queries sees.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.top_k_attention import MAX_SCORES, attention_distribution, causal_query_blocks
from octile.ops.matmul import without_autocast
from octile.ops.sparse_attention_backward import add_rows


def alignment_loss(
    index_q_BSGE: Tensor, index_k_BSE: Tensor, weights_BSG: Tensor, q_BSHX: Tensor, k_BSHX: Tensor, scale: float
) -> Tensor:
    """Compute the loss over all keys up to the query's own, in nats, float32 []; differentiable in the first three.

    Args:
        index_q_BSGE, index_k_BSE, weights_BSG: queries, keys and weights of the indexer, float32.
        q_BSHX, k_BSHX: attention's queries and keys, which get no gradient.
        scale: factor of attention's scores.
    """
    return _AlignmentLoss.apply(index_q_BSGE, index_k_BSE, weights_BSG, q_BSHX, k_BSHX, scale)


def top_k_alignment_loss(
    index_q_BSGE: Tensor, index_k_BSE: Tensor, weights_BSG: Tensor, top_k_BSK: Tensor, p_BSK: Tensor
) -> Tensor:
    """Compute the loss over the top-k keys, in nats, float32 []; differentiable in the first three arguments.

    Args:
        index_q_BSGE, index_k_BSE, weights_BSG: as in `alignment_loss`; on a GPU q and k are rounded to BF16.
        top_k_BSK: int32, positions up to the query's own, each at most once; −1 stands for none, at least one is not.
        p_BSK: float32, the mean over heads of attention's weights of the top-k keys, which gets no gradient.
    """
    return _TopKAlignmentLoss.apply(index_q_BSGE, index_k_BSE, weights_BSG, top_k_BSK, p_BSK)


class _AlignmentLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, k: Tensor, scale: float
    ) -> Tensor:
        (b, s, h, _), g = q.shape, index_q.shape[2]
        total = index_q.new_zeros(())
        gradients = [torch.zeros_like(t) for t in (index_q, index_k, weights)] if any(ctx.needs_input_grad) else []
        with without_autocast(q.device):
            for block in causal_query_blocks(b * (h + 2 * g), s, MAX_SCORES):
                query_C, key_T = (torch.arange(first, block.stop, device=q.device) for first in (block.start, 0))
                seen_1CT = (key_T <= query_C[:, None])[None]
                p_BCT = attention_distribution(q[:, block], k[:, : block.stop], seen_1CT, scale)
                inputs = [index_q[:, block], index_k[:, : block.stop], weights[:, block]]
                with torch.set_grad_enabled(bool(gradients)):
                    inputs = [t.detach().requires_grad_(bool(gradients)) for t in inputs]
                    loss = _divergence(p_BCT, index_logits(*inputs), seen_1CT) / (b * s)
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
        return *(dloss * gradient for gradient in ctx.saved_tensors), None, None, None


class _TopKAlignmentLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index_q: Tensor, index_k: Tensor, weights: Tensor, top_k_BSK: Tensor, p_BSK: Tensor
    ) -> Tensor:
        (b, s, g, e), k = index_q.shape, top_k_BSK.shape[2]
        total = index_q.new_zeros(())
        gradients = [torch.zeros_like(t) for t in (index_q, index_k, weights)] if any(ctx.needs_input_grad) else []
        columns_K = torch.arange(k, device=index_q.device) % s
        compute = torch.bfloat16 if index_q.is_cuda else index_q.dtype
        q_BSGE, k_BSE = index_q.to(compute), index_k.to(compute)
        rows = max(MAX_SCORES // max(2 * k * (g + e), 1), 1)
        with without_autocast(index_q.device):
            for i, first in product(range(b), range(0, s, rows)):
                block = i, slice(first, first + rows)
                is_key_CK, p_CK = top_k_BSK[block] >= 0, p_BSK[block]
                positions_CK = top_k_BSK[block].where(is_key_CK, columns_K).long()  # to others zeros are added
                q_CGE, keys_CKE, w_CG = q_BSGE[block], k_BSE[i][positions_CK], weights[block]
                score_CGK = _multiply(q_CGE, keys_CKE.mT).relu_()
                logits_CK = (w_CG[:, None] @ score_CGK)[:, 0]
                log_CK = logits_CK.masked_fill_(~is_key_CK, -torch.inf).log_softmax(-1)
                total += torch.xlogy(p_CK, p_CK).sum() - (p_CK * log_CK.masked_fill(~is_key_CK, 0.0)).sum()
                if gradients:
                    dlogits_CK = (log_CK.exp() * p_CK.sum(-1, keepdim=True) - p_CK).masked_fill_(~is_key_CK, 0.0)
                    gradients[2][block] = (score_CGK @ dlogits_CK[..., None])[..., 0]
                    dscore_CGK = (w_CG[..., None] * dlogits_CK[:, None]).masked_fill_(score_CGK == 0, 0.0)
                    dscore_CGK = dscore_CGK.to(compute)
                    gradients[0][block] = _multiply(dscore_CGK, keys_CKE)
                    add_rows(gradients[1][i], positions_CK, _multiply(dscore_CGK.mT, q_CGE))
        ctx.save_for_backward(*gradients)
        ctx.queries = b * s
        return total / ctx.queries

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *(dloss / ctx.queries * gradient for gradient in ctx.saved_tensors), None, None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply batches of matrices, summed in FP32; the result of BF16 is FP32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else a @ b


def index_logits(q_BCGE: Tensor, k_BTE: Tensor, weights_BCG: Tensor) -> Tensor:
    """Return the indexer's logits, float32 [B, C, T]; see `octile.ops.mqa_logits`, which has no gradient."""
    score_BCGT = (q_BCGE.flatten(1, 2) @ k_BTE.mT).unflatten(1, q_BCGE.shape[1:3]).relu()
    return (weights_BCG[:, :, None] @ score_BCGT)[:, :, 0]


def _divergence(p_BCT: Tensor, logits_BCT: Tensor, seen_BCT: Tensor) -> Tensor:
    """Return the sum of KL(p ‖ softmax(logits)) over all queries; both are of the keys that each sees."""
    log_BCT = logits_BCT.masked_fill(~seen_BCT, -torch.inf).log_softmax(-1).masked_fill(~seen_BCT, 0.0)
    return torch.xlogy(p_BCT, p_BCT).sum() - (p_BCT * log_BCT).sum()
