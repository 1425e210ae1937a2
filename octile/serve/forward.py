"""The forward pass of serving: flat rows of several requests, each row one position, over a paged latent cache.

    decode rows      attend in the absorbed form: queries times W_UK, attention over the pages, results times W_UV
    prefill chunks   attend in the naive form: keys and values are computed of the latents that the pages hold

A model with indexers attends to chosen positions where there are more than that: from the decode rows of a step if one
has more, and from the chunks that have more, both in the absorbed form.

Everything else treats rows alike. Rows are normed and quantized once for all FP8 weights that read them, experts'
rows are sorted by expert, and a row's results are weighted in SwiGLU, as in training (`octile.nn.fused.feed_forward`).

Decode steps of few rows take another pass (`octile.serve.few_rows`), whose operators take several of these
together.

With `batch_invariant` a row's bits depend on its request alone: all rows attend in the absorbed form with a fixed
number of splits, and each GEMM computes a row in one form for any number of rows. FP8 GEMMs on a GPU are then grouped
ones with one group, which do not split K.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, DeepSeek-V3 (arXiv 2412.19437) §2.1 and §3.4.
Ranks of a group may share the rows and the heads (`octile.serve.tensor_parallel`); then D-wide rows are a rank's own.

Shapes: T rows, D model, H heads of this rank, C latent, R rotary key, N the rest of a head's key, V a head's value,
X = N + R, E experts, K chosen ones, I intermediate; a chunk has S rows and reads L positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octile.formats import TILE
from octile.kernels import cpu
from octile.kernels.cuda.gemm import num_sms
from octile.models.deepseek_v3 import rope_of
from octile.nn.dispatcher import InFlight, LocalDispatcher
from octile.nn.indexer import weight_factor
from octile.nn.norm import LAYER_NORM_EPS
from octile.ops.attention import attention
from octile.ops.decode_latents import write_and_rotate
from octile.ops.gate import choose_experts, gate
from octile.ops.grouped import grouped_matmul_nt_out
from octile.ops.high_precision import high_precision_grouped_nt
from octile.ops.index_rows import index_rows
from octile.ops.matmul import Block, group_rows, matmul_nt, matmul_nt_out
from octile.ops.norm import rms_norm, rms_norm_quantize
from octile.ops.paged_attention import paged_attention
from octile.ops.permute import unpermute
from octile.ops.quantize import quantize
from octile.ops.ragged_attention import ragged_attention
from octile.ops.rope import latent_keys, rotate_
from octile.ops.routing_plan import count_tokens
from octile.ops.row_invariant import row_invariant_matmul_nt
from octile.ops.sample_tokens import sample_tokens
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention
from octile.ops.swiglu import swiglu, swiglu_quantize
from octile.parallel.decoding import SortedExchange
from octile.parallel.symmetric_memory import PeerDispatcher
from octile.routing import choice_of
from octile.scaled import ScaledTensor
from octile.serve import few_rows
from octile.serve.chosen_keys import MAX_LOGITS, IndexQueries, choose_of_pages, choose_of_prefix, schedule
from octile.serve.expert_load import ExpertLoad
from octile.serve.index_pages import IndexPages
from octile.serve.latent_pages import LatentPages
from octile.serve.spread_experts import SpreadExperts
from octile.serve.step import PrefillPiece, Step
from octile.serve.tensor_parallel import ALONE, TensorParallel
from octile.serve.weights import (
    NORM_EPS,
    AttentionWeights,
    BlockWeights,
    IndexerWeights,
    MLPWeights,
    MoEWeights,
    Projections,
    ServedWeights,
    Weight,
)

LOCAL = LocalDispatcher()
_streams: dict[torch.device, torch.cuda.Stream] = {}  # of shared experts
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN builds some
INVARIANT_SPLITS = 16  # of a row's positions, in batch-invariant mode
MAX_QUERIES = 2**26  # numbers of absorbed queries of a chunk that attends to chosen positions, at the same time
GEMM_ROWS = 2048  # of a GEMM of cached positions outside of graphs: larger ones would have more sizes, and kernels
INVARIANT_ROWS = 64  # of a group, by which the kernel of experts in high precision is chosen in that mode


class Queries(NamedTuple):
    """What rows attend with: queries [T, H, X], and those of the indexer, if positions are chosen."""

    q: Tensor
    of_index: IndexQueries | None

    def rows(self, first: int, n: int) -> Queries:
        """Return n rows."""
        return Queries(self.q.narrow(0, first, n), self.of_index and self.of_index.rows(first, n))


class Rows(NamedTuple):
    """What several weights read: rows in high precision, where one of them does, and in FP8."""

    values: Tensor | None
    q: ScaledTensor | None


@dataclass(frozen=True)
class Forward:
    """A model's forward pass.

    Attributes:
        weights: of the model.
        cache: the layers' pages; that of multi-token prediction is the last.
        cos, sin: [max_position, R/2] float32, of all positions.
        unrotated: cosines and sines [1, R/2] of no angle.
        softmax_scale: of attention.
        batch_invariant: see the head of this file.
        expert_load: counts the tokens of each expert; None: nothing does.
        spread: the experts of all ranks, if they are spread over several.
        exchange: of the rows of decode steps, for which the host does not wait; None: by the dispatcher.
        index: the pages of the indexer's keys; None: rows attend to all positions.
        dispatcher: sends rows to experts.
        tp: the ranks that share the rows of a step and the heads of attention.
        routes_shared: whether rows choose the shared experts like routed ones (`SpreadExperts.add_shared`).
    """

    weights: ServedWeights
    cache: LatentPages
    cos: Tensor
    sin: Tensor
    unrotated: tuple[Tensor, Tensor]
    softmax_scale: float
    batch_invariant: bool
    expert_load: ExpertLoad | None
    spread: SpreadExperts | None
    index: IndexPages | None = None
    exchange: SortedExchange | None = None
    dispatcher: LocalDispatcher = LOCAL
    tp: TensorParallel = ALONE
    routes_shared: bool = False

    @classmethod
    def make(
        cls,
        weights: ServedWeights,
        cache: LatentPages,
        max_position: int,
        batch_invariant: bool,
        expert_load: ExpertLoad | None = None,
        spread: SpreadExperts | None = None,
        index: IndexPages | None = None,
    ) -> Forward:
        """Make a model's forward pass for positions below max_position."""
        c = weights.config
        rope = rope_of(c)
        cos, sin = rope.cos_sin(torch.arange(max_position, device=weights.device))
        unrotated = torch.ones_like(cos[:1]), torch.zeros_like(sin[:1])
        scale = rope.softmax_factor * c.qk_head_dim**-0.5
        forward = cls(weights, cache, cos, sin, unrotated, scale, batch_invariant, expert_load, spread, index)
        return forward if spread is None else replace(forward, dispatcher=spread.dispatcher, tp=spread.tp)

    def of_rows(self, rows: int) -> Forward:
        """Return this pass for steps of at most so many rows on any rank, or on any group of ranks."""
        if not isinstance(self.dispatcher, PeerDispatcher):
            return self
        return replace(self, dispatcher=self.dispatcher.of_at_most(self.tp.n_own(rows)))

    def hidden(self, step: Step) -> Tensor:
        """Compute what the head reads, [T, D], and write the rows' latents of all layers but the prediction layer."""
        n_rows, step = len(step.tokens), self._padded(self.with_schedule(step))
        x_TD = self.weights.embedding[self.tp.own(step.tokens)]
        cos_sin = self.cos[step.positions], self.sin[step.positions]
        for layer, block in enumerate(self.weights.blocks):
            x_TD = self._block(x_TD, layer, block, step, cos_sin)
        return self.last_norm(x_TD, n_rows)

    def last_norm(self, x_TD: Tensor, n_rows: int) -> Tensor:
        """Normalize the last block's output: what the head reads, the first n_rows of all ranks of a group."""
        return self.tp.gather(rms_norm(x_TD, self.weights.norm, self._eps)[0])[:n_rows]

    def draft(self, step: Step, hidden_TD: Tensor) -> Tensor:
        """Compute what the head reads for the token after next, [T, D]; see `octile.serve.batch.Runner.draft`."""
        mtp = self.weights.mtp
        assert mtp is not None  # `ModelRunner.draft` has checked it
        n_rows, step = len(step.tokens), self._padded(self.with_schedule(step))
        normed = (
            rms_norm(x_TD, weight, self._eps)[0]
            for x_TD, weight in (
                (self.weights.embedding[self.tp.own(step.tokens)], mtp.embedding_norm),
                (self.tp.own(hidden_TD), mtp.hidden_norm),
            )
        )
        both_TD = torch.cat((*normed,), dim=-1)
        x_TD = self._nt(self._rows(both_TD, mtp.projection), mtp.projection)
        cos_sin = self.cos[step.positions], self.sin[step.positions]
        x_TD = self._block(x_TD, len(self.weights.blocks), mtp.block, step, cos_sin)
        return self.tp.gather(rms_norm(x_TD, mtp.norm, self._eps)[0])[:n_rows]

    def logits(self, h_TD: Tensor) -> Tensor:
        """Compute the logits of rows that the head reads, float32 [T, V]; each rank of a group computes some rows."""
        return self.tp.gather(self._logits(self.tp.own(h_TD)))[: len(h_TD)]

    def sample(self, h_TD: Tensor, seed_T: Tensor, position_T: Tensor, temperature_T: Tensor) -> Tensor:
        """Choose tokens by the logits of rows that the head reads: int64 [T]; see `octile.ops.sample_tokens`."""
        h, *how = (self.tp.own(t) for t in (h_TD, seed_T, position_T, temperature_T))
        return self.tp.gather(sample_tokens(self._logits(h), *how))[: len(h_TD)]

    def _logits(self, h_TD: Tensor) -> Tensor:
        if self.batch_invariant:
            return row_invariant_matmul_nt(h_TD[None], self.weights.head[None], torch.float32)[0]
        return F.linear(h_TD, self.weights.head).float()

    @property
    def _eps(self) -> float:
        return self.weights.config.rms_norm_eps

    def _block(self, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        if few_rows.is_step_of_few_rows(self, step) and few_rows.has_products_of_few_rows(w.attention):
            x_TD = few_rows.add_attention(self, x_TD, layer, w, step, cos_sin)
            if few_rows.has_feed_forward_of_few_rows(self, w.mlp):
                return few_rows.add_feed_forward(self, x_TD, layer, w, step.slots)
            return self.add_feed_forward(x_TD, layer, w, step.slots)
        if self._decodes_alone(step):
            o_TV = self._decoded(x_TD, layer, w, step, cos_sin)
        else:
            o_TV = self.attend(self.queries(x_TD, layer, w, step.slots, cos_sin), layer, w.attention, step)
        return self.after_attention(x_TD, o_TV, layer, w, step.slots)

    def _padded(self, step: Step) -> Step:
        """Return a step with as many rows for each rank of a group; what fills them is written nowhere."""
        if len(step.tokens) == self.tp.n_padded(len(step.tokens)):
            return step
        tokens, positions, slots = (self.tp.pad(t, fill) for t, fill in zip(step[:3], (0, 0, -1), strict=True))
        return step._replace(tokens=tokens, positions=positions, slots=slots)

    def with_schedule(self, step: Step) -> Step:
        """Return a step with what all layers need of its lengths to choose positions."""
        if self.index is None or not step.chooses or not len(step.lengths):
            return step
        return step._replace(schedule=schedule(step.lengths))

    def chooses(self, longest: int) -> bool:
        """Whether decode rows attend to chosen positions, if the longest attends to so many.

        In batch-invariant mode they always do, because rows may not attend in another way for the sake of others.
        """
        return self.index is not None and (self.batch_invariant or longest > self._n_chosen)

    def _decodes_alone(self, step: Step) -> bool:
        """Whether all rows decode and attend to all positions, and steps with prompts may give them other bits."""
        return not self.batch_invariant and self.index is None and step.only_decodes

    def _decoded(self, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from decode rows alone, and write their latents: [T, H·V]."""
        c, n_heads = self.weights.config, self.weights.n_heads
        _, _, q_TX, latent_TC, rope_TR = self._projected(x_TD, w)
        q_THX = q_TX.unflatten(-1, (n_heads, -1))
        q_THW = q_THX.new_empty(*q_THX.shape[:2], c.kv_lora_rank + c.qk_rope_head_dim)
        of_norm = w.attention.kv_norm, NORM_EPS
        cached = self.cache.layers[layer]
        write_and_rotate(cached, step.slots, latent_TC, rope_TR, *of_norm, *cos_sin, q_THX, q_THW)
        self._heads_nt(q_THX[..., : c.qk_nope_head_dim], w.attention.w_k, q_THW[..., : c.kv_lora_rank])
        out_TV = q_THX.new_empty(len(q_THX), n_heads * c.v_head_dim)
        self._attend_to_pages(q_THW, None, layer, w.attention, step, out_TV.unflatten(-1, (n_heads, -1)))
        return out_TV

    def query_width(self, w: AttentionWeights) -> int:
        """Return the columns of the GEMM that projects queries: theirs, then those of weights that are joined to it."""
        return sum(w.x.sizes[0]) if w.q_up is None else self.weights.n_heads * self.weights.config.qk_head_dim

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
        indexer = None if self.index is None else w.attention.indexer
        q_THX = q_TX.unflatten(-1, (self.weights.n_heads, -1))
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
        of_x, indexer = w.attention.x, None if self.index is None else w.attention.indexer
        fp8, values = of_x.has_fp8, of_x.has_values
        if indexer is not None:  # whose weights of heads are in high precision
            fp8, values = fp8 or isinstance(indexer.k, ScaledTensor), True
        x = self._gathered(self._norm(x_TD, w.input_norm, fp8, values))
        q_TX, latent_TC, rope_TR = self._projections(x, of_x, out=out_TW if w.attention.q_up is None else None)
        q: Rows | None = None
        if w.attention.q_up is not None:
            assert w.attention.q_norm is not None
            read_by = [w.attention.q_up] if indexer is None else [w.attention.q_up, indexer.q_up]
            q = self._norm(q_TX, w.attention.q_norm, *_reads(*read_by), eps=NORM_EPS)
            q_TX = self._nt(q, w.attention.q_up, out=out_TW)
        return x, q, q_TX, latent_TC, rope_TR

    def _index(
        self, x: Rows, q: Rows, layer: int, w: IndexerWeights, slots: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> IndexQueries:
        """Compute the indexer's queries, of the block's input and of compressed queries, and write its keys."""
        assert self.index is not None
        assert x.values is not None
        k_TE = F.layer_norm(self._nt(x, w.k).float(), w.k_norm.shape, w.k_norm, w.k_bias, LAYER_NORM_EPS)
        q_TGE = self._nt(q, w.q_up).unflatten(-1, (len(w.heads), -1))
        k, k_scale = index_rows(k_TE[None, :, None], *cos_sin)
        self.index.write(layer, slots, k[0, :, 0], k_scale[0, :, 0])
        if self.batch_invariant:
            weights_TG = row_invariant_matmul_nt(x.values.float()[None], w.heads[None], torch.float32)[0]
        else:
            weights_TG = F.linear(x.values.float(), w.heads)
        index_q, q_scale = index_rows(q_TGE[None], *cos_sin)
        return IndexQueries(index_q[0], weights_TG * weight_factor(*q_TGE.shape[1:]) * q_scale[0])

    def attend(
        self,
        queries: Queries,
        layer: int,
        w: AttentionWeights,
        step: Step,
        own: tuple[Tensor, Tensor] | None = None,
        out_TV: Tensor | None = None,
    ) -> Tensor:
        """Attend from all rows of a step: [T, H·V].

        Args:
            queries, layer, w, step: the queries, which block it is, its weights, the rows.
            own: `decompressed` of the rows themselves, if prefill chunks attend to no others.
            out_TV: memory for the result; None: new memory.
        """
        heads, n_decode = self.weights.n_heads, len(step.lengths)
        if out_TV is None:
            out_TV = queries.q.new_empty(len(queries.q), heads * self.weights.config.v_head_dim)
        o_THV = out_TV.unflatten(-1, (heads, -1))
        if n_decode:
            q, of_index = queries.rows(0, n_decode)
            self._attend_to_pages(self._absorb(q, w), of_index, layer, w, step, o_THV[:n_decode])
        end = step.prefills[-1].first_row + step.prefills[-1].rows if step.prefills else n_decode
        out_TV[end:] = 0  # rows that only fill GEMMs
        for piece in step.prefills:
            assert step.context is not None
            of_piece = queries.rows(piece.first_row, piece.rows)
            out_SHV = o_THV.narrow(0, piece.first_row, piece.rows)
            slots_L = step.context.narrow(0, piece.first_position, piece.positions)
            if self._chooses(piece):
                self._chosen(of_piece, layer, w, slots_L, out_SHV)
            elif piece.positions > step.max_positions:  # one chunk
                out_SHV.copy_(self._naive_in_parts(of_piece.q, layer, w, slots_L, step.max_positions))
            else:
                if own is None:
                    slots_L = step.context.narrow(0, piece.first_position, piece.n_read)
                    read = (t[: piece.positions] for t in self.decompressed(layer, w, slots_L))
                else:
                    read = (t.narrow(0, piece.first_row, piece.rows) for t in own)
                k_LHX, v_LHV = self._assembled(*read)
                starts = piece.row_starts, piece.position_starts, piece.max_rows, piece.max_positions
                ragged_attention(out_SHV, of_piece.q, k_LHX, v_LHV, *starts, self.softmax_scale)
        return out_TV

    def after_attention(self, x_TD: Tensor, o_TV: Tensor, layer: int, w: BlockWeights, slots: Tensor) -> Tensor:
        """Add to a block's input what it computes, of what attention has returned, and return it: [T, D].

        Args:
            x_TD: the block's input, a rank's own rows.
            o_TV, slots: what attention has returned, and where the rows are cached: those of all ranks of a group.
            layer, w: which block it is, and its weights.
        """
        self.tp.add_sums_(x_TD, self._nt(self._rows(o_TV, w.attention.o), w.attention.o))
        return self.add_feed_forward(x_TD, layer, w, slots)

    def add_feed_forward(self, x_TD: Tensor, layer: int, w: BlockWeights, slots: Tensor) -> Tensor:
        """Add to rows what a block's SwiGLU layer or mixture computes of them, and return them: [T, D]."""
        if isinstance(w.mlp, MLPWeights):
            return x_TD.add_(self._mlp(self._norm(x_TD, w.post_norm, w.mlp.x.has_fp8, w.mlp.x.has_values), w.mlp))
        rows = self._norm(x_TD, w.post_norm, w.mlp.x.has_fp8 or w.mlp.shared.x.has_fp8, True)
        if self.exchange is not None:
            return self._add_exchanged(x_TD, rows, layer, w.mlp, self.tp.own(slots), self.exchange)
        return x_TD.add_(self._mixture(rows, layer, w.mlp, self.tp.own(slots)))

    def _attend_to_pages(
        self, q_THW: Tensor, of_index: IndexQueries | None, layer: int, w: AttentionWeights, step: Step, out_THV: Tensor
    ) -> None:
        """Attend from absorbed queries to the rows' pages, and write the result times W_UV to out."""
        splits = INVARIANT_SPLITS if self.batch_invariant else 0
        cached = self.cache.layers[layer]
        last = self.weights.config.kv_lora_rank, self.softmax_scale, splits
        if of_index is None or step.schedule is None:
            o_THC = paged_attention(q_THW, cached, step.pages, step.lengths, *last, step.rows_per_text)
        else:
            assert self.index is not None
            keys, text = self.index.layers[layer], (step.pages, step.lengths, step.schedule)
            chosen_TK = choose_of_pages(of_index, keys, *text, self._n_chosen)
            o_THC = paged_sparse_attention(q_THW, cached, step.pages, chosen_TK, *last)
        self._heads_nt(o_THC, w.w_v, out_THV)

    def _absorb(self, q_THX: Tensor, w: AttentionWeights) -> Tensor:
        """Multiply queries by W_UK: [T, H, C + R]."""
        c = self.weights.config
        q_THN, q_THR = q_THX.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_THW = q_THX.new_empty(*q_THX.shape[:2], c.kv_lora_rank + c.qk_rope_head_dim)
        self._heads_nt(q_THN, w.w_k, q_THW[..., : c.kv_lora_rank])
        q_THW[..., c.kv_lora_rank :] = q_THR
        return q_THW

    @property
    def _n_chosen(self) -> int:
        """How many positions a row attends to at most, if they are chosen."""
        return self.weights.config.index_topk or 0

    def _chooses(self, piece: PrefillPiece) -> bool:
        """Whether a piece is a chunk that attends to chosen positions: it has more than are chosen."""
        return self.index is not None and piece.max_positions > self._n_chosen

    def _chosen(self, queries: Queries, layer: int, w: AttentionWeights, slots_L: Tensor, out_SHV: Tensor) -> None:
        """Attend from the rows of one chunk to chosen positions, and write what is computed to out."""
        assert self.index is not None
        c, latents = self.weights.config, self.cache.layers[layer].flatten(0, 1)
        at_once = max(min(MAX_LOGITS // len(slots_L), MAX_QUERIES // (self.weights.n_heads * c.latent_dim)), 1)
        k_LE, scale_L = self.index.read(layer, slots_L)
        n_rows = len(queries.q)
        for row in range(0, n_rows, at_once):
            n = min(at_once, n_rows - row)
            of = queries.rows(row, n)
            assert of.of_index is not None
            position = len(slots_L) - n_rows + row
            slots_TK = choose_of_prefix(of.of_index, k_LE, scale_L, slots_L, position, self._n_chosen)
            o_THC = sparse_attention(self._absorb(of.q, w), latents, slots_TK, c.kv_lora_rank, self.softmax_scale)
            self._heads_nt(o_THC, w.w_v, out_SHV.narrow(0, row, n))

    def _naive_in_parts(
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
                of_part = attention(q_BSHX, k_LHX[None], v_LHV[None], self.softmax_scale, False)
                o_BSHV, lse_BHS = merge_attention((o_BSHV, lse_BHS), of_part)
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
        latent_LC, rope_LR = self.cache.read(layer, slots_L, self.weights.dtype)
        if out_LY is not None or len(latent_LC) <= GEMM_ROWS:
            return self._nt(self._rows(latent_LC, w.kv_up), w.kv_up, out=out_LY), rope_LR
        out_LY = latent_LC.new_empty(len(latent_LC), w.kv_up.shape[0])
        for part_LC, out in zip(latent_LC.split(GEMM_ROWS), out_LY.split(GEMM_ROWS), strict=True):
            self._nt(self._rows(part_LC, w.kv_up), w.kv_up, out=out)
        return out_LY, rope_LR

    def _assembled(self, kv_LY: Tensor, rope_LR: Tensor) -> tuple[Tensor, Tensor]:
        """Assemble keys, with rotary keys shared by all heads, and values: [L, H, X] and [L, H, V]."""
        nope = self.weights.config.qk_nope_head_dim
        kv_LHY = kv_LY.unflatten(-1, (self.weights.n_heads, -1))
        cos, sin = (t.expand(len(rope_LR), -1) for t in self.unrotated)  # what is cached is rotated
        k_LHX = latent_keys(kv_LHY[None], rope_LR[None], cos, sin, nope)[0]
        return k_LHX, kv_LHY[..., nope:]

    def _mlp(self, x: Rows, w: MLPWeights) -> Tensor:
        gate_TI, up_TI = self._projections(x, w.x)
        return self._nt(self._swiglu(gate_TI, up_TI, w.down), w.down)

    def _mixture(self, x: Rows, layer: int, w: MoEWeights, slots: Tensor) -> Tensor:
        weights_TK, experts_TK = self._choose(x, layer, w, slots)
        load_E = count_tokens(experts_TK, len(w.gate) if self.spread is None else self.spread.n_experts)[0]
        dispatcher = self.dispatcher
        if self.spread is not None:
            experts_TK = self.spread.slots(layer, experts_TK)
        if isinstance(dispatcher, PeerDispatcher):
            experts_TK = experts_TK.masked_fill((slots < 0)[:, None], -1)  # padding goes nowhere
        plan = dispatcher.plan(experts_TK, load_E)
        shared_TD = None if self.routes_shared else self._mlp(x, w.shared)
        if x.q is not None and w.x.has_fp8:
            rows = Rows(None, dispatcher.dispatch_quantized(dispatcher.send_quantized(x.q, plan), plan))
        else:
            assert x.values is not None
            rows = Rows(dispatcher.send(x.values, plan).index_select(0, plan.token_R), None)
        if not isinstance(w.down, ScaledTensor):
            y_RD = self._experts(rows, w, plan.offs_E)
            return unpermute(dispatcher.send_back(y_RD, plan), plan.place_TK, shared_TD, weights_TK)
        weight_R = dispatcher.dispatch_weights(dispatcher.begin_send(weights_TK, plan), plan)
        return dispatcher.combine_unweighted(self._experts(rows, w, plan.offs_E, weight_R), plan, shared_TD)

    def _add_exchanged(
        self, x_TD: Tensor, x: Rows, layer: int, w: MoEWeights, slots: Tensor, exchange: SortedExchange
    ) -> Tensor:
        """Add a mixture of decode rows to x_TD, and return it; rows of padding go nowhere.

        The shared experts have a stream of their own on a GPU: few rows leave most of it idle while they travel.
        """
        assert self.spread is not None
        shared = None if self.routes_shared else self._begin_shared(x, w.shared)
        weights_TK, experts_TK = self._choose(x, layer, w, slots)
        sent_TD = x.q if w.x.has_fp8 else x.values
        assert sent_TD is not None
        sent = exchange.send(sent_TD, experts_TK, weights_TK, self.spread.slots_of_experts(layer), slots)
        here = exchange.receive(sent, len(experts_TK))
        rows = Rows(None, here.rows) if isinstance(here.rows, ScaledTensor) else Rows(here.rows, None)
        is_weighted = isinstance(w.down, ScaledTensor)
        y_RD = self._experts(rows, w, here.offs, here.weights if is_weighted else None)
        return exchange.combine(y_RD, here, shared, None if is_weighted else weights_TK, x_TD)

    def _begin_shared(self, x: Rows, w: MLPWeights) -> InFlight[Tensor]:
        """Begin to compute the shared experts; what they read must stay until the result is waited for.

        Memory of their stream is used again by later work of that stream alone, which waits for what has read it.
        """
        device = self.weights.device
        if device.type != "cuda":
            return InFlight(self._mlp(x, w))
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        current, stream = torch.cuda.current_stream(device), _streams[device]
        stream.wait_stream(current)
        restore = num_sms.leave_free(num_sms.multiprocessors(device) // 2, math.inf)  # to the exchange
        try:
            with torch.cuda.stream(stream):
                result = self._mlp(x, w)
        finally:
            restore()
        return InFlight(result, lambda: current.wait_stream(stream))

    def _experts(self, rows: Rows, w: MoEWeights, offs_E: Tensor, weight_R: Tensor | None = None) -> Tensor:
        """Compute the routed experts of rows sorted by expert, times their weights if down-projections are in FP8."""
        gate_RI, up_RI = self._projections(rows, w.x, offs_E)
        return self._nt(self._swiglu(gate_RI, up_RI, w.down, weight_R, offs_E), w.down, offs_E)

    def _choose(self, x: Rows, layer: int, w: MoEWeights, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row, and count them; return their weights and numbers, both [T, K].

        Shared experts that are routed are added, and not counted.
        """
        assert x.values is not None
        weights_TK, experts_TK = self._gate(x.values, w)
        if self.expert_load is not None:
            self.expert_load.count(layer, experts_TK, slots)
        if self.routes_shared:
            assert self.spread is not None
            return self.spread.add_shared(weights_TK, experts_TK)
        return weights_TK, experts_TK

    def _gate(self, x_TD: Tensor, w: MoEWeights) -> tuple[Tensor, Tensor]:
        c = self.weights.config
        choice = choice_of(c.topk_method, c.num_experts_per_tok, c.n_group, c.topk_group)
        weighting = c.scoring_func, c.norm_topk_prob, c.routed_scaling_factor
        if not self.batch_invariant:
            return gate(x_TD, w.gate, w.bias, *choice, *weighting)[:2]
        logits_TE = row_invariant_matmul_nt(x_TD[None], w.gate[None], torch.float32)[0]
        return choose_experts(logits_TE, w.bias, *choice, *weighting)

    def _norm(self, x_TK: Tensor, weight: Tensor, fp8: bool, values: bool, eps: float | None = None) -> Rows:
        """Normalize rows, and quantize them where a weight reads them in FP8."""
        eps = self._eps if eps is None else eps
        if not fp8:
            return Rows(rms_norm(x_TK, weight, eps)[0], None)
        data, scale, _, normed = rms_norm_quantize(x_TK, weight, eps, "e4m3", self.weights.power_of_2, values)
        return Rows(normed if values else None, ScaledTensor(data, scale, TILE))

    def _gathered(self, x: Rows) -> Rows:
        """Return the rows of all ranks of a group, of each rank's own ones."""
        return Rows(
            None if x.values is None else self.tp.gather(x.values),
            None if x.q is None else self.tp.gather_quantized(x.q),
        )

    def _rows(self, x_TK: Tensor, w: Weight) -> Rows:
        """Return rows as one weight reads them."""
        if not isinstance(w, ScaledTensor):
            return Rows(x_TK, None)
        data, scale = quantize(x_TK, *TILE, "e4m3", self.weights.power_of_2)
        return Rows(None, ScaledTensor(data, scale, TILE))

    def _swiglu(
        self, gate: Tensor, up: Tensor, w: Weight, weight_R: Tensor | None = None, offs_E: Tensor | None = None
    ) -> Rows:
        """Compute silu(gate) · up · weight as the down-projection reads it."""
        if not isinstance(w, ScaledTensor):
            return Rows(swiglu(gate, up), None)
        data, scale = swiglu_quantize(gate, up, "e4m3", self.weights.power_of_2, weight_R, offs_E)
        return Rows(None, ScaledTensor(data, scale, TILE))

    def _projections(
        self, x: Rows, w: Projections, offs_E: Tensor | None = None, out: Tensor | None = None
    ) -> list[Tensor]:
        """Multiply rows by all weights that read them, and split the results into their sizes; out: of the first."""
        results: list[Tensor] = []
        for i, (weight, sizes) in enumerate(zip(w.weights, w.sizes, strict=True)):
            results += self._nt(x, weight, offs_E, None if i else out).split(sizes, dim=-1)
        return results

    def _nt(self, x: Rows, w: Weight, offs_E: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply rows by a weight [N, K], or rows sorted by expert by the weights [E, N, K]: [T, N].

        Rows after the last expert's are undefined: exchanges leave room for more rows than come.
        The result is written to `out` if it is given: of a single weight, not in batch-invariant mode.
        """
        dtype = self.weights.dtype
        if out is not None:
            return self._nt_out(x, w, out)
        if isinstance(w, ScaledTensor):
            assert x.q is not None
            return self._fp8_nt(x.q, w, offs_E, dtype)
        assert x.values is not None
        if not self.batch_invariant:
            return F.linear(x.values, w) if offs_E is None else high_precision_grouped_nt(x.values, w, offs_E, dtype)
        if offs_E is None or not w.is_cuda:
            return _invariant_groups(x.values, w, offs_E, dtype)
        return high_precision_grouped_nt(x.values, w, offs_E, torch.float32, INVARIANT_ROWS).to(dtype)

    def _nt_out(self, x: Rows, w: Weight, out: Tensor) -> Tensor:
        if isinstance(w, ScaledTensor):
            assert x.q is not None
            matmul_nt_out(out, x.q.data, x.q.scale, x.q.block, w.data, w.scale, w.block, False)
            return out
        assert x.values is not None
        return torch.mm(x.values, w.mT, out=out)

    def _fp8_nt(self, x: ScaledTensor, w: ScaledTensor, offs_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        operands = x.data, x.scale, x.block, w.data, w.scale, w.block
        if not self.batch_invariant or (not w.data.is_cuda and cpu.can_multiply()):  # whose rows are independent
            return matmul_nt(*operands, dtype) if offs_E is None else _grouped_nt(*operands, offs_E, dtype)
        if not w.data.is_cuda:
            return _invariant_groups(x.dequantize(), w.dequantize(), offs_E, dtype)
        if offs_E is None:
            offs_E = torch.full((1,), len(x.data), dtype=torch.int32, device=w.device)
            operands = x.data, x.scale, x.block, w.data[None], w.scale[None], w.block
        return _grouped_nt(*operands, offs_E, dtype)

    def _heads_nt(self, x_THK: Tensor, w_HNK: Tensor, out_THN: Tensor) -> None:
        """Multiply each head of rows by its own weight, and write the results to out."""
        x_HTK = x_THK.transpose(0, 1)
        if self.batch_invariant:
            out_THN.copy_(row_invariant_matmul_nt(x_HTK, w_HNK, x_THK.dtype).transpose(0, 1))
        else:
            torch.bmm(x_HTK, w_HNK.mT, out=out_THN.transpose(0, 1))


def merge_attention(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results of attending to two parts of the keys: o [B, S, H, V] float32, and lse [B, H, S]."""
    lse_BHS = torch.logaddexp(a[1], b[1])
    shares = (torch.exp(lse - lse_BHS).transpose(1, 2).unsqueeze(-1) for _, lse in (a, b))
    o_BSHV, other_BSHV = (o.float() * share_BSH1 for (o, _), share_BSH1 in zip((a, b), shares, strict=True))
    return o_BSHV.add_(other_BSHV), lse_BHS


def _invariant_groups(x_TK: Tensor, w: Tensor, offs_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows by a weight, or each group of rows by its own, in a form that depends on no other row.

    Rows after the last group are zero.
    """
    if offs_E is None:
        return row_invariant_matmul_nt(x_TK[None], w[None], dtype)[0]
    groups = group_rows(offs_E, len(x_TK))
    out_TN = x_TK.new_zeros(len(x_TK), w.shape[1], dtype=dtype)
    for g, rows in enumerate(groups):
        out_TN[rows] = row_invariant_matmul_nt(x_TK[rows][None], w[g][None], dtype)[0]
    return out_TN


def _grouped_nt(
    a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block, offs: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply as `grouped_matmul_nt` does, without the time to set the rows after the last group to zero."""
    out = a.new_empty(len(a), b.shape[1], dtype=dtype)
    grouped_matmul_nt_out(out, a, a_scale, a_block, b, b_scale, b_block, offs)
    return out


def _reads(*weights: Weight) -> tuple[bool, bool]:
    """Whether weights read their input in FP8, and whether in high precision."""
    fp8 = [isinstance(w, ScaledTensor) for w in weights]
    return any(fp8), not all(fp8)
