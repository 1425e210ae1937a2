"""The lightning indexer of DeepSeek sparse attention (DSA): it finds the top-k keys, to which each query attends.

    q_h = wq_b · (compressed query)      k = LayerNorm(wk · x)      both rotated and in FP8: octile.ops.index_rows
    w   = weights_proj · x / √(heads · channels)
    logit[s, t] = Σ over h of w[s, h] · relu(q[s, h] · k[t])

A query attends to the `topk` keys with the highest logits. Up to `topk` keys it attends to all: attention is dense.

Rotary positions are those of the first R channels, whose pairs are channels i and i + R/2, or adjacent ones in GLM-5;
attention itself rotates adjacent channels.

Training has two stages. In the warm-up attention is dense, the rest of the model is frozen, and the indexer learns the
distribution of attention over all keys. Then attention is sparse, and it learns the distribution over the top-k keys.
Its inputs are detached: only this loss trains it, and it trains nothing else. Gradients pass through FP8's rounding.

Layers may share the top-k keys of an earlier layer's indexer and have none of their own, as in GLM-5.2. Each of them
adds the same loss of its own attention, and the indexer learns the mean of these losses, which has the gradient of the
loss of the mean distribution.

Source: DeepSeek-V3.2-Exp (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) §1 and §2.1, inference/model.py; for shared
keys IndexCache (arXiv 2603.12201) §3.2.
Shapes: B batch, S queries, T keys, D model, L compressed query, G heads and E channels of the indexer, R rotary
channels, K top-k keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.formats import TILE
from octile.nn.checkpointed_loss import leave_behind, pop_loss
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.index_alignment import alignment_loss, top_k_alignment_loss
from octile.nn.norm import LayerNorm
from octile.nn.rope import CosSin
from octile.ops.index_rows import hadamard, index_rows, rotate_first
from octile.ops.matmul import without_autocast
from octile.ops.mqa_logits import mqa_logits
from octile.ops.quantize import quantize
from octile.ops.top_keys import top_keys

MAX_LOGITS = 2**26  # that are in memory at the same time


class IndexInput(NamedTuple):
    """What the logits are computed of, float32: values that FP8 with a power-of-two scale holds, and weights.

    Attributes:
        q: [B, S, G, E].
        k: [B, S, E].
        weights: [B, S, G].
    """

    q: Tensor
    k: Tensor
    weights: Tensor


class IndexReader(nn.Module):
    """A layer that attends to the top-k keys of an indexer: the part that aligns the indexer with its attention.

    Attributes:
        alignment_loss: loss of the last forward pass in training mode, until it is popped.

    Args:
        n_readers: how many layers read the top-k keys of the indexer, by whose number the loss is divided.
    """

    def __init__(self, n_readers: int = 1):
        super().__init__()
        self.n_readers = n_readers
        self.alignment_loss: Tensor | None = None

    def align(self, index: IndexInput, q_BSHX: Tensor, k_BSHX: Tensor, scale: float) -> Tensor:
        """Set `alignment_loss` to that of a forward pass with dense attention, and return the queries to attend with.

        Args:
            index: the result of `Indexer.forward` for the same tokens.
            q_BSHX, k_BSHX: attention's queries and keys.
            scale: factor of attention's scores.
        """
        loss = alignment_loss(*index, q_BSHX.detach(), k_BSHX.detach(), scale)
        return self._leave_behind(loss, q_BSHX)

    def align_top_k(self, index: IndexInput, top_k_BSK: Tensor, weights_BSK: Tensor, o_BSHV: Tensor) -> Tensor:
        """Set `alignment_loss` to that of a forward pass with sparse attention, and return its result to compute with.

        Args:
            index: the result of `Indexer.forward` for the same tokens.
            top_k_BSK: the result of `Indexer.top_k_keys`.
            weights_BSK: float32, the mean over heads of attention's weights of these keys.
            o_BSHV: attention's result.
        """
        loss = top_k_alignment_loss(*index, top_k_BSK, weights_BSK)
        return self._leave_behind(loss, o_BSHV)

    def _leave_behind(self, loss: Tensor, activation: Tensor) -> Tensor:
        if self.n_readers > 1:
            loss = loss / self.n_readers
        return leave_behind(self, "alignment_loss", loss, activation)

    def pop_alignment_loss(self) -> Tensor | float:
        """Return the alignment loss of the last forward pass in training mode, once; 0 if there was none."""
        loss, self.alignment_loss = self.alignment_loss, None
        return 0.0 if loss is None else loss


class Indexer(IndexReader):
    """The indexer of one layer; parameters are named as in the published checkpoints.

    Attributes:
        warm_up: whether this is the first stage of training: in training mode attention is dense.
        alignment_loss: as in `IndexReader`.

    Args:
        hidden_size: D.
        q_lora_rank: L.
        n_heads, head_dim: G and E.
        topk: K.
        interleaved: whether the pairs of rotary channels are adjacent.
        n_readers: as in `IndexReader`.
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int,
        n_heads: int,
        head_dim: int,
        topk: int,
        interleaved: bool = False,
        n_readers: int = 1,
    ):
        super().__init__(n_readers)
        self.n_heads, self.head_dim, self.topk, self.interleaved = n_heads, head_dim, topk, interleaved
        self.wq_b = nn.Linear(q_lora_rank, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, head_dim, bias=False)
        self.k_norm = LayerNorm(head_dim)
        self.weights_proj = nn.Linear(hidden_size, n_heads, bias=False)
        self.warm_up = False

    def forward(self, x_BSD: Tensor, q_latent_BSL: Tensor, cos_sin: CosSin) -> IndexInput:
        """Compute queries, keys and weights.

        Args:
            x_BSD: the input of the layer's attention.
            q_latent_BSL: its compressed queries, normalized.
            cos_sin: cosines and sines of the S positions, each [S, R / 2].
        """
        x_BSD, q_latent_BSL = x_BSD.detach(), q_latent_BSL.detach()
        q_BSGE = self.wq_b(q_latent_BSL).unflatten(-1, (self.n_heads, self.head_dim))
        k_BSE = self.k_norm(self.wk(x_BSD))
        with without_autocast(x_BSD.device):
            weights_BSG = F.linear(x_BSD.float(), self.weights_proj.weight.float())
        q_BSGE = _IndexValues.apply(q_BSGE, *cos_sin, self.interleaved)
        k_BSE = _IndexValues.apply(k_BSE[:, :, None], *cos_sin, self.interleaved)[:, :, 0]
        return IndexInput(q_BSGE, k_BSE, weights_BSG * weight_factor(self.n_heads, self.head_dim))

    @torch.no_grad()
    def top_k_keys(self, q_BSGE: Tensor, k_BTE: Tensor, weights_BSG: Tensor) -> Tensor | None:
        """Find the top-k keys of each query, of which the S-th sees all T keys, and those before it one less each.

        Returns:
            int32 [B, S, K], as `octile.ops.top_keys.top_keys`; None: every query attends to all keys that it sees.
        """
        b, s, t = *q_BSGE.shape[:2], k_BTE.shape[1]
        if (self.warm_up and self.training) or t <= self.topk:
            return None
        top_k_BSK = torch.empty(b, s, self.topk, dtype=torch.int32, device=q_BSGE.device)
        rows = max(MAX_LOGITS // t, 1)
        ends_S = torch.arange(t - s + 1, t + 1, dtype=torch.int32, device=q_BSGE.device)
        starts_S = torch.zeros_like(ends_S)
        for i in range(b):
            k, k_scale = quantize_index(k_BTE[i])
            for first in range(0, s, rows):
                block = slice(first, first + rows)
                q, q_scale = quantize_index(q_BSGE[i, block])
                weights = weights_BSG[i, block] * q_scale
                seen = starts_S[block], ends_S[block]
                logits = mqa_logits(q, k, k_scale, weights, *seen, 0, False, torch.float32)
                top_k_BSK[i, block] = top_keys(logits, *seen, self.topk)
        return top_k_BSK

    def pop_alignment_loss(self) -> Tensor | float:
        """Return the alignment loss of the last forward pass in training mode, once; 0 if there was none.

        Raises:
            RuntimeError: compiled code computed it without gradients, as in a reentrant checkpoint.
        """
        return pop_loss(self, "alignment_loss", self.wk.weight)


def weight_factor(n_heads: int, head_dim: int) -> float:
    """The factor of the heads' weights: the softmax scale, and one that keeps the sum of the heads as large."""
    return float((n_heads * head_dim) ** -0.5)


def quantize_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., E] with one power-of-two scale each: E4M3 [..., E], contiguous, and float32 [...]."""
    data, scale = quantize(x.contiguous(), *TILE, "e4m3", True)
    return data.contiguous(), scale[..., 0].contiguous()


class _IndexValues(torch.autograd.Function):
    """Rotate rows [B, S, H, E] and round them to what FP8 holds, float32; the gradient passes through the rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype, ctx.interleaved = x.dtype, interleaved
        data, scale = index_rows(x, cos, sin, interleaved)
        return data.float() * scale[..., None]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate_first(hadamard(dy), cos, -sin, ctx.interleaved).to(ctx.dtype), None, None, None
