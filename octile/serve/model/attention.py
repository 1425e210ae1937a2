"""Multi-head latent attention in serving: rows of several requests, each one position, over a paged latent cache.

    decode rows      attend in the absorbed form: queries times W_UK, attention over the pages, results times W_UV
    prefill chunks   attend in the naive form: keys and values are computed of the latents that the pages hold, by one
                     kernel for all chunks of a piece; those of a long text in parts, whose results are merged

A model with indexers attends to top-k positions where there are more than that: from the decode rows of a step if one
has more, and from the chunks that have more, both in the absorbed form. Layers without an indexer of their own attend
to the top-k positions of the last one before them.

With `batch_invariant` all rows attend in the absorbed form, and each is divided by its own length alone.

Ranks of a group may share the rows and the heads (`octile.serve.ranks.tensor_parallel`): the block's input is then a
rank's own rows, and queries are those of all rows and of its own heads.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, DeepSeek-V3 (arXiv 2412.19437) §2.1.1.
Shapes: T rows, D model, H heads of this rank, C latent, R rotary key, N the rest of a head's key, V a head's value,
X = N + R, W = C + R, K top-k positions; G heads and E channels of the indexer; a chunk has S rows and reads L
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octile.kernels.cuda.jit.launch import only_activations_are_new
from octile.models.config import ModelConfig
from octile.nn.indexer import weight_factor
from octile.nn.norm import LAYER_NORM_EPS
from octile.ops.absorbed_attention import absorb, attend_to_latents
from octile.ops.attention import attention, ragged_attention
from octile.ops.index_rows import index_rows, rotate_first
from octile.ops.latent_cache import normalizes_as_rms_norm, write_and_rotate
from octile.ops.norm import rms_norm
from octile.ops.paged_attention import has_product_kernel, paged_attention
from octile.ops.rope import latent_keys, rotate_
from octile.ops.row_invariant import row_invariant_matmul_nt
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention
from octile.scaled import ScaledTensor
from octile.serve.model.gemms import Gemms, Rows
from octile.serve.model.top_k_keys import (
    MAX_LOGITS,
    IndexQueries,
    schedule,
    top_k_of_pages,
    top_k_of_pages_in_fp32,
    top_k_of_prefix,
)
from octile.serve.ranks.tensor_parallel import TensorParallel
from octile.serve.runner.kv_cache import IndexCache, KVCache
from octile.serve.runner.step import PrefillPiece, Step, TopKPositions
from octile.serve.weights.block_weights import NORM_EPS, AttentionWeights, BlockWeights, IndexerWeights

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN builds some
GEMM_ROWS = 2048  # of a GEMM of cached positions outside of graphs: larger ones would have more sizes, and kernels
SPLITS = 16  # of a list of top-k positions, in batch-invariant mode
MAX_QUERIES = 2**26  # numbers of absorbed queries of a chunk that attends to top-k positions, at the same time


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
        kv: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Attend from the rows of a piece, and write the result to out.

        Args:
            out_SHV, q_SHX: values and queries of the piece's rows.
            layer, w: which block it is, and its weights.
            step, piece: the rows of the step, and which of them these are.
            kv: `decompressed` of the piece's positions; None: it is computed.
        """
        assert step.context is not None
        if piece.positions > step.max_positions:  # one chunk
            slots_L = step.context.narrow(0, piece.first_position, piece.positions)
            out_SHV.copy_(self._attend_in_parts(q_SHX, layer, w, slots_L, step.max_positions))
            return
        if kv is None:
            slots_L = step.context.narrow(0, piece.first_position, piece.n_read)
            kv_LY, rope_LR = self.decompressed(layer, w, slots_L)
            kv = kv_LY[: piece.positions], rope_LR[: piece.positions]
        k_LHX, v_LHV = self._assembled(*kv)
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


class Queries(NamedTuple):
    """What rows attend with: queries [T, H, X], and those of the indexer, if they attend to top-k positions."""

    q: Tensor
    index_queries: IndexQueries | None

    def rows(self, first: int, n: int) -> Queries:
        """Return n rows."""
        return Queries(self.q.narrow(0, first, n), self.index_queries and self.index_queries.rows(first, n))


@dataclass(frozen=True)
class Attention:
    """The attention of a model's layers.

    Attributes:
        config: configuration of the model.
        n_heads: H.
        gemms: by the model's weights.
        cache: the layers' pages; that of multi-token prediction is the last.
        index: the pages of the indexers' keys; None: rows attend to all positions.
        naive: attention of prefill chunks to all positions.
        softmax_scale: factor of the scores of attention.
        tp: the ranks that share the rows of a step and the heads.
    """

    config: ModelConfig
    n_heads: int
    gemms: Gemms
    cache: KVCache
    index: IndexCache | None
    naive: NaiveAttention
    softmax_scale: float
    tp: TensorParallel

    def with_schedule(self, step: Step) -> Step:
        """Return a step with what all layers need to find top-k positions, and with those that layers share."""
        if self.index is None:
            return step
        if self.config.shares_top_k:
            step = step._replace(top_k=TopKPositions())
        if not step.is_sparse or not len(step.lengths):
            return step
        return step._replace(schedule=schedule(step.lengths))

    def is_sparse(self, longest: int) -> bool:
        """Whether decode rows attend to top-k positions, if the longest attends to so many.

        In batch-invariant mode they always do, because rows may not attend in another way for the sake of others.
        """
        return self.index is not None and (self.gemms.batch_invariant or longest > self._index_topk)

    @property
    def _index_topk(self) -> int:
        """K: how many positions a row attends to at most, if not to all."""
        return self.config.index_topk or 0

    def _indexer(self, w: BlockWeights) -> IndexerWeights | None:
        """Return the weights of a block's indexer; None: it has none, or rows attend to all positions."""
        return None if self.index is None else w.attention.indexer

    def write_and_attend(
        self, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]
    ) -> Rows:
        """Write the latents of a step's rows, and attend from them: [T, H·V], as the output's projection reads it.

        Args:
            x_TD, layer, w: the block's input, which block it is, and its weights.
            step, cos_sin: the rows, and the cosines and sines of their positions.
        """
        if self._indexer(w) is None and step.only_decodes:
            return self._decode(x_TD, layer, w, step, cos_sin)
        o_TV = self.attend(self.queries(x_TD, layer, w, step.slots, cos_sin), layer, w.attention, step)
        return self.gemms.rows_for(o_TV, w.attention.o)

    def add_output_(self, x_TD: Tensor, o: Rows, w: AttentionWeights) -> None:
        """Add to a rank's own rows what attention has returned for all rows, times the output's projection."""
        if self.tp.size == 1:
            self.gemms.add_nt_(x_TD, o, w.o)
        else:
            self.tp.add_sums_(x_TD, self.gemms.nt(o, w.o))

    def _decode(self, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]) -> Rows:
        """Write the latents of decode rows, and attend from them: as `attend` of `queries`, in fewer launches.

        One kernel normalizes and writes latents, rotates, and writes the rotary part of absorbed queries. In
        batch-invariant mode `rms_norm` normalizes latents before where that kernel gives them other bits.
        """
        c = self.config
        _, _, q_TX, latent_TC, rope_TR = self._projected(x_TD, w)
        q_THX = q_TX.unflatten(-1, (self.n_heads, -1))
        q_THW = q_THX.new_empty(*q_THX.shape[:2], c.kv_lora_rank + c.qk_rope_head_dim)
        weight: Tensor | None = w.attention.kv_norm
        if self.gemms.batch_invariant and not normalizes_as_rms_norm(latent_TC, w.attention.kv_norm):
            latent_TC, weight = rms_norm(latent_TC, w.attention.kv_norm, NORM_EPS)[0], None
        rows = self.cache.layers[layer], step.slots, latent_TC, rope_TR
        write_and_rotate(*rows, weight, NORM_EPS, *cos_sin, q_THX, q_THW)
        q_THC, q_THN, w_k = q_THW[..., : c.kv_lora_rank], q_THX[..., : c.qk_nope_head_dim], w.attention.w_k
        self.gemms.heads_nt(q_THN, w_k, q_THC)
        # latents were written one kernel earlier, for which octile's product has waited before attention starts
        with only_activations_are_new() if has_product_kernel(q_THC, q_THN, w_k) else nullcontext():
            parts = self._latents_of_pages(q_THW, self._top_k_of_pages(None, layer, step), layer, step)
        if len(parts) == 1:
            return self.gemms.heads_rows(parts[0][1], w.attention.w_v, w.attention.o)
        out_TV = q_THX.new_empty(len(q_THX), self.n_heads * c.v_head_dim)
        self._multiply_by_w_v(parts, w.attention, out_TV.unflatten(-1, (self.n_heads, -1)))
        return self.gemms.rows_for(out_TV, w.attention.o)

    def query_width(self, w: AttentionWeights) -> int:
        """Return the columns of the GEMM that projects queries: theirs, then those of weights that are joined to it."""
        return sum(w.x.sizes[0]) if w.q_up is None else self.n_heads * self.config.qk_head_dim

    def queries(
        self,
        x_TD: Tensor,
        layer: int,
        w: BlockWeights,
        slots: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        out_TW: Tensor | None = None,
    ) -> Queries:
        """Compute a block's queries, and write the rows' latents, and the keys of the indexer.

        Args:
            x_TD, layer, w, slots, cos_sin: the block's input, which block it is, where its latents are written.
            out_TW: memory for the queries, as wide as `query_width`; None: new memory.
        """
        x, q, q_TX, latent_TC, rope_TR = self._projected(x_TD, w, out_TW)
        indexer = self._indexer(w)
        q_THX = q_TX.unflatten(-1, (self.n_heads, -1))
        rotate_(q_THX[None], *cos_sin)
        rotate_(rope_TR[None, :, None], *cos_sin)
        latent_TC, _ = rms_norm(latent_TC, w.attention.kv_norm, NORM_EPS)
        self.cache.write(layer, slots, latent_TC, rope_TR)
        if indexer is None:
            return Queries(q_THX, None)
        assert q is not None  # the indexer reads compressed queries
        return Queries(q_THX, self._index(x, q, layer, indexer, slots, cos_sin))

    def _projected(
        self, x_TD: Tensor, w: BlockWeights, out_TW: Tensor | None = None
    ) -> tuple[Rows, Rows | None, Tensor, Tensor, Tensor]:
        """Compute what the projections of a block's input give.

        Returns:
            the normed input, compressed queries if there are any, queries [T, H·X], latents [T, C] before their norm,
            and rotary keys [T, R] before they are rotated.
        """
        projections, indexer = w.attention.x, self._indexer(w)
        fp8, values = projections.has_fp8, projections.has_values
        if indexer is not None:  # whose weights of heads are in high precision
            fp8, values = fp8 or isinstance(indexer.k, ScaledTensor), True
        x = self._gathered(self.gemms.norm(x_TD, w.input_norm, self.config.rms_norm_eps, fp8, values))
        out = out_TW if w.attention.q_up is None else None
        q_TX, latent_TC, rope_TR = self.gemms.projections(x, projections, out=out)
        q: Rows | None = None
        if w.attention.q_up is not None:
            assert w.attention.q_norm is not None
            read_by = [w.attention.q_up] if indexer is None else [w.attention.q_up, indexer.q_up]
            are_fp8 = [isinstance(weight, ScaledTensor) for weight in read_by]
            q = self.gemms.norm(q_TX, w.attention.q_norm, NORM_EPS, any(are_fp8), not all(are_fp8))
            q_TX = self.gemms.nt(q, w.attention.q_up, out=out_TW)
        return x, q, q_TX, latent_TC, rope_TR

    def _gathered(self, x: Rows) -> Rows:
        """Return the rows of all ranks of a group, of each rank's own ones."""
        return Rows(
            None if x.values is None else self.tp.gather(x.values),
            None if x.q is None else self.tp.gather_quantized(x.q),
        )

    def _index(
        self, x: Rows, q: Rows, layer: int, w: IndexerWeights, slots: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> IndexQueries:
        """Compute the indexer's queries, of the block's input and of compressed queries, and write its keys."""
        assert self.index is not None
        assert x.values is not None
        k_TE = F.layer_norm(self.gemms.nt(x, w.k).float(), w.k_norm.shape, w.k_norm, w.k_bias, LAYER_NORM_EPS)
        q_TGE = self.gemms.nt(q, w.q_up).unflatten(-1, (len(w.heads), -1))
        k, k_scale = self._index_rows(k_TE[None, :, None], cos_sin)
        self.index.write(layer, slots, k[0, :, 0], k_scale[0, :, 0])
        if self.gemms.batch_invariant:
            weights_TG = row_invariant_matmul_nt(x.values.float()[None], w.heads[None], torch.float32)[0]
        else:
            weights_TG = F.linear(x.values.float(), w.heads)
        index_q, q_scale = self._index_rows(q_TGE[None], cos_sin)
        return IndexQueries(index_q[0], weights_TG * weight_factor(*q_TGE.shape[1:]) * q_scale[0])

    def _index_rows(self, x_1THE: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotate the indexer's queries or keys, and quantize them unless they are in FP32: as `index_rows`."""
        assert self.index is not None
        if self.index.dtype != torch.float32:
            return index_rows(x_1THE, *cos_sin, self.config.indexer_rope_interleave)
        rotated_1THE = rotate_first(x_1THE, *cos_sin, self.config.indexer_rope_interleave)
        return rotated_1THE, rotated_1THE.new_ones(rotated_1THE.shape[:3])

    def attend(self, queries: Queries, layer: int, w: AttentionWeights, step: Step) -> Tensor:
        """Attend from all rows of a step: [T, H·V].

        Args:
            queries, layer, w, step: the queries, which block it is, its weights, the rows.
        """
        out_TV = queries.q.new_empty(len(queries.q), self.n_heads * self.config.v_head_dim)
        if len(step.lengths):
            self.attend_from_decode_rows(queries, layer, w, step, out_TV)
        self.attend_from_prompts(queries, layer, w, step, None, out_TV)
        return out_TV

    def attend_from_decode_rows(
        self, queries: Queries, layer: int, w: AttentionWeights, step: Step, out_TV: Tensor
    ) -> None:
        """Attend from the decode rows of a step, the first ones, and write the result to out.

        Args:
            queries, layer, w, step: arguments of `attend`.
            out_TV: memory for the result of all rows.
        """
        n = len(step.lengths)
        q, index_queries = queries.rows(0, n)
        q_THW = absorb(q, w.w_k, self.gemms.heads_nt)
        out_THV = out_TV[:n].unflatten(-1, (self.n_heads, -1))
        self._attend_to_pages(q_THW, index_queries, layer, w, step, out_THV)

    def attend_from_prompts(
        self,
        queries: Queries,
        layer: int,
        w: AttentionWeights,
        step: Step,
        kv: Sequence[tuple[Tensor, Tensor]] | None,
        out_TV: Tensor,
    ) -> None:
        """Attend from the prefill chunks of a step, after its decode rows have, and write the result to out.

        Args:
            queries, layer, w, step: arguments of `attend`.
            kv: `NaiveAttention.decompressed` of the positions of each piece; None: it is computed where it is needed.
            out_TV: memory for the result of all rows. Those after the last chunk, which only fill GEMMs, become 0.
        """
        end = step.prefills[-1].first_row + step.prefills[-1].rows if step.prefills else len(step.lengths)
        out_TV[end:] = 0
        o_THV = out_TV.unflatten(-1, (self.n_heads, -1))
        for i, piece in enumerate(step.prefills):
            piece_queries = queries.rows(piece.first_row, piece.rows)
            out_SHV = o_THV.narrow(0, piece.first_row, piece.rows)
            if self.is_piece_sparse(piece):
                self._attend_to_top_k(out_SHV, piece_queries, layer, w, step, piece)
            else:
                self.naive.attend(out_SHV, piece_queries.q, layer, w, step, piece, None if kv is None else kv[i])

    def _attend_to_pages(
        self, q_THW: Tensor, index: IndexQueries | None, layer: int, w: AttentionWeights, step: Step, out_THV: Tensor
    ) -> None:
        """Attend from absorbed queries to the rows' pages, and write the result times W_UV to out."""
        parts = self._latents_of_pages(q_THW, self._top_k_of_pages(index, layer, step), layer, step)
        self._multiply_by_w_v(parts, w, out_THV)

    def _multiply_by_w_v(self, parts: Sequence[tuple[slice, Tensor]], w: AttentionWeights, out_THV: Tensor) -> None:
        for rows, o_THC in parts:
            self.gemms.heads_nt(o_THC, w.w_v, out_THV[rows])

    def _latents_of_pages(
        self, q_THW: Tensor, top_k_TK: Tensor | None, layer: int, step: Step
    ) -> list[tuple[slice, Tensor]]:
        """Attend from absorbed queries to the rows' pages, or to top-k positions in them.

        Returns:
            which rows, and their results [·, H, C]: rows that stand alone attend apart from those in texts.
        """
        cached, c, scale = self.cache.layers[layer], self.config.kv_lora_rank, self.softmax_scale
        if top_k_TK is not None:
            splits = SPLITS if self.gemms.batch_invariant else 0
            return [(slice(None), paged_sparse_attention(q_THW, cached, step.pages, top_k_TK, c, scale, splits))]
        attend = attend_to_latents if self.gemms.batch_invariant else paged_attention
        parts = list[tuple[slice, Tensor]]()
        for rows, n in ((slice(step.first_text), 1), (slice(step.first_text, None), step.rows_per_text)):
            if len(q := q_THW[rows]):
                text = step.pages[rows], step.lengths[rows]
                parts.append((rows, attend(q, cached, *text, c, scale, rows_per_text=n)))
        return parts

    def _top_k_of_pages(self, index: IndexQueries | None, layer: int, step: Step) -> Tensor | None:
        """Return the top-k positions of decode rows, int32 [T, K], or those that the layer shares; None: all."""
        if self.index is None or step.schedule is None:
            return None
        if index is None:
            assert step.top_k is not None
            return step.top_k.decode
        if self.index.dtype == torch.float32:
            read, text = partial(self._index_keys, layer), (step.pages, step.lengths)
            top_k_TK = top_k_of_pages_in_fp32(index, read, *text, self._index_topk)
        else:
            keys, scheduled = self.index.layers[layer], (step.pages, step.lengths, step.schedule)
            top_k_TK = top_k_of_pages(index, keys, *scheduled, self._index_topk)
        if step.top_k is not None:
            step.top_k.decode = top_k_TK
        return top_k_TK

    def _index_keys(self, layer: int, slots: Tensor) -> Tensor:
        """Return the indexer's keys in slots of a layer, which are in FP32."""
        assert self.index is not None
        return self.index.read(layer, slots)[0]

    def is_piece_sparse(self, piece: PrefillPiece) -> bool:
        """Whether a piece is a chunk that attends to top-k positions: it has more than K."""
        return self.index is not None and piece.max_positions > self._index_topk

    def _attend_to_top_k(
        self, out_SHV: Tensor, queries: Queries, layer: int, w: AttentionWeights, step: Step, chunk: PrefillPiece
    ) -> None:
        """Attend from the rows of one chunk to top-k positions, and write what is computed to out."""
        assert step.context is not None
        c, latents, index = self.config, self.cache.layers[layer].flatten(0, 1), queries.index_queries
        slots_L = step.context.narrow(0, chunk.first_position, chunk.positions)
        n_rows, at_once = len(queries.q), MAX_QUERIES // (self.n_heads * c.latent_dim)
        keys, parts = None, list[Tensor]()
        if self.index is not None and index is not None:
            at_once, keys = min(at_once, MAX_LOGITS // len(slots_L)), self.index.read(layer, slots_L)
        at_once = max(at_once, 1)
        for row in range(0, n_rows, at_once):
            n = min(at_once, n_rows - row)
            if index is None or keys is None:
                assert step.top_k is not None
                slots_TK = step.top_k.chunks[chunk.first_row].narrow(0, row, n)
            else:
                position = len(slots_L) - n_rows + row
                slots_TK = top_k_of_prefix(index.rows(row, n), *keys, slots_L, position, self._index_topk)
                if step.top_k is not None:
                    parts.append(slots_TK)
            q_THW = absorb(queries.q.narrow(0, row, n), w.w_k, self.gemms.heads_nt)
            o_THC = sparse_attention(q_THW, latents, slots_TK, c.kv_lora_rank, self.softmax_scale)
            self.gemms.heads_nt(o_THC, w.w_v, out_SHV.narrow(0, row, n))
        if step.top_k is not None and parts:
            step.top_k.chunks[chunk.first_row] = torch.cat(parts)
