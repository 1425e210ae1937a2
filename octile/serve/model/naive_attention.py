"""Attention of prefill chunks in the naive form: keys and values are computed of the latents that the pages hold.

    chunks of a step        one kernel for all chunks of a piece, whose keys and values are in memory at once
    chunk of a long text    its positions in parts, whose results are merged

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.
Shapes: H heads of this rank, C latent, R rotary key, N the rest of a head's key, V a head's value, X = N + R,
Y = H·(N + V); a chunk or a piece has S rows and reads L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octile.models.config import ModelConfig
from octile.ops.attention import attention, ragged_attention
from octile.ops.rope import latent_keys
from octile.serve.model.gemms import Gemms
from octile.serve.runner.kv_cache import KVCache
from octile.serve.runner.step import PrefillPiece, Step
from octile.serve.weights.block_weights import AttentionWeights

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN builds some
GEMM_ROWS = 2048  # of a GEMM of cached positions outside of graphs: larger ones would have more sizes, and kernels


@dataclass(frozen=True)
class NaiveAttention:
    """Attention of prefill chunks to all positions before each row.

    Attributes:
        config: configuration of the model.
        n_heads: H.
        gemms: by the model's weights.
        cache: the layers' pages.
        unrotated: cosines and sines [1, R/2] of no angle.
        softmax_scale: factor of the scores of attention.
    """

    config: ModelConfig
    n_heads: int
    gemms: Gemms
    cache: KVCache
    unrotated: tuple[Tensor, Tensor]
    softmax_scale: float

    def attend(
        self,
        out_SHV: Tensor,
        q_SHX: Tensor,
        layer: int,
        w: AttentionWeights,
        step: Step,
        piece: PrefillPiece,
        own: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Attend from the rows of a piece, and write the result to out.

        Args:
            out_SHV, q_SHX: values and queries of the piece's rows.
            layer, w: which block it is, and its weights.
            step, piece: the rows of the step, and which of them these are.
            own: `decompressed` of all rows of the step, if its chunks attend to no others.
        """
        assert step.context is not None
        if piece.positions > step.max_positions:  # one chunk
            slots_L = step.context.narrow(0, piece.first_position, piece.positions)
            out_SHV.copy_(self._attend_in_parts(q_SHX, layer, w, slots_L, step.max_positions))
            return
        if own is None:
            slots_L = step.context.narrow(0, piece.first_position, piece.n_read)
            read = (t[: piece.positions] for t in self.decompressed(layer, w, slots_L))
        else:
            read = (t.narrow(0, piece.first_row, piece.rows) for t in own)
        k_LHX, v_LHV = self._assembled(*read)
        starts = piece.row_starts, piece.position_starts, piece.max_rows, piece.max_positions
        ragged_attention(out_SHV, q_SHX, k_LHX, v_LHV, *starts, self.softmax_scale)

    def _attend_in_parts(
        self, q_SHX: Tensor, layer: int, w: AttentionWeights, slots_L: Tensor, max_positions: int
    ) -> Tensor:
        """Attend from the rows of one chunk to more positions than fit into memory at once: [S, H, V].

        The softmax over the positions before the chunk is computed in parts, which are merged with that over its own.
        """
        q_BSHX = q_SHX[None]
        before, own = slots_L.split([len(slots_L) - len(q_SHX), len(q_SHX)])
        k_SHX, v_SHV = self._keys_and_values(layer, w, own)
        with sdpa_kernel(WITHOUT_PLANS):
            o_BSHV, lse_BHS = attention(q_BSHX, k_SHX[None], v_SHV[None], self.softmax_scale)
            for part in before.split(max_positions):
                k_LHX, v_LHV = self._keys_and_values(layer, w, part)
                attended = attention(q_BSHX, k_LHX[None], v_LHV[None], self.softmax_scale, False)
                o_BSHV, lse_BHS = _merge((o_BSHV, lse_BHS), attended)
        return o_BSHV[0].to(q_SHX.dtype)

    def _keys_and_values(self, layer: int, w: AttentionWeights, slots_L: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values of cached positions: [L, H, X] and [L, H, V]."""
        return self._assembled(*self.decompressed(layer, w, slots_L))

    def decompressed(
        self, layer: int, w: AttentionWeights, slots_L: Tensor, out_LY: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute what keys and values of cached positions consist of: [L, H·(N + V)], and rotary keys [L, R].

        Args:
            layer, w, slots_L: the block, its weights, and where the positions are cached.
            out_LY: memory for the first; None: new memory.
        """
        latent_LC, rope_LR = self.cache.read(layer, slots_L, self.gemms.dtype)
        if out_LY is not None or len(latent_LC) <= GEMM_ROWS:
            return self.gemms.nt(self.gemms.rows_for(latent_LC, w.kv_up), w.kv_up, out=out_LY), rope_LR
        out_LY = latent_LC.new_empty(len(latent_LC), w.kv_up.shape[0])
        for part_LC, out in zip(latent_LC.split(GEMM_ROWS), out_LY.split(GEMM_ROWS), strict=True):
            self.gemms.nt(self.gemms.rows_for(part_LC, w.kv_up), w.kv_up, out=out)
        return out_LY, rope_LR

    def _assembled(self, kv_LY: Tensor, rope_LR: Tensor) -> tuple[Tensor, Tensor]:
        """Assemble keys, with rotary keys shared by all heads, and values: [L, H, X] and [L, H, V]."""
        nope = self.config.qk_nope_head_dim
        kv_LHY = kv_LY.unflatten(-1, (self.n_heads, -1))
        cos, sin = (t.expand(len(rope_LR), -1) for t in self.unrotated)  # what is cached is rotated
        k_LHX = latent_keys(kv_LHY[None], rope_LR[None], cos, sin, nope)[0]
        return k_LHX, kv_LHY[..., nope:]


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results of attending to two parts of the keys: o [B, S, H, V] float32, and lse [B, H, S]."""
    lse_BHS = torch.logaddexp(a[1], b[1])
    shares = (torch.exp(lse - lse_BHS).transpose(1, 2).unsqueeze(-1) for _, lse in (a, b))
    o_BSHV, other_BSHV = (o.float() * share_BSH1 for (o, _), share_BSH1 in zip((a, b), shares, strict=True))
    return o_BSHV.add_(other_BSHV), lse_BHS
