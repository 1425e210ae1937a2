"""The forward pass of serving: flat rows of several requests, each row one position, over a paged latent cache.

    embedding
    blocks       attention (`attention.py`), then a SwiGLU layer or a mixture (`feed_forward.py`)
    norm, head   logits, or tokens that are chosen by them

Everything but attention treats the rows of prompts and those that decode alike. Small-batch decode steps take another
pass (`octile.serve.model.small_batch`), whose operators take several of these together.

With `batch_invariant` a row's bits depend on its request alone: attention and each GEMM (`octile.serve.model.gemms`)
sum a row in one order for any number of rows.

Source: DeepSeek-V3 (arXiv 2412.19437) §2.1 and §2.2.
Ranks of a group may share the rows and the heads (`octile.serve.ranks.tensor_parallel`); then D-wide rows are a rank's
own.

Shapes: T rows, D model, H heads of this rank, V vocabulary, or a head's value; R rotary key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.models.deepseek_v3 import rope_of
from octile.ops.cross_entropy import cross_entropy
from octile.ops.norm import rms_norm
from octile.ops.row_invariant import row_invariant_matmul_nt
from octile.ops.sample_tokens import sample_tokens
from octile.serve.model import small_batch
from octile.serve.model.attention import Attention, NaiveAttention
from octile.serve.model.feed_forward import ExpertLoad, FeedForward
from octile.serve.model.gemms import Gemms, Rows
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.tensor_parallel import ALONE, TensorParallel
from octile.serve.runner.kv_cache import IndexCache, KVCache
from octile.serve.runner.step import Step
from octile.serve.weights.block_weights import BlockWeights, MTPWeights
from octile.serve.weights.weights import ServedWeights

BlockObserver = Callable[[int, Tensor], None]
_observer: ContextVar[BlockObserver | None] = ContextVar("octile_block_observer", default=None)


@contextmanager
def observe_blocks(observer: BlockObserver) -> Iterator[None]:
    """Call an observer with each block's number and its output [T, D], which the next block may overwrite.

    Rows after those of the batch are padding. Replays of CUDA graphs call nothing.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@dataclass(frozen=True)
class Forward:
    """A model's forward pass.

    Attributes:
        weights: weights of the model.
        cos, sin: [max_position, R/2] float32, of all positions.
        gemms, attention, feed_forward: the parts of all blocks.
        tp: the ranks that share the rows of a step and the heads of attention.
        small_batches: whether small-batch decode steps take `octile.serve.model.small_batch`.
    """

    weights: ServedWeights
    cos: Tensor
    sin: Tensor
    gemms: Gemms
    attention: Attention
    feed_forward: FeedForward
    tp: TensorParallel
    small_batches: bool

    @classmethod
    def make(
        cls,
        weights: ServedWeights,
        cache: KVCache,
        max_position: int,
        batch_invariant: bool,
        expert_load: ExpertLoad | None = None,
        expert_parallel: ExpertParallelWeights | None = None,
        index: IndexCache | None = None,
    ) -> Forward:
        """Make a model's forward pass.

        Args:
            weights: weights of the model.
            cache: the layers' pages; that of multi-token prediction is the last.
            max_position: positions are below it.
            batch_invariant: see the head of this file.
            expert_load: counts the tokens of each expert; None: nothing does.
            expert_parallel: weights with the experts of all ranks, if these share them.
            index: the pages of the indexer's keys; None: rows attend to all positions.
        """
        c, rope = weights.config, rope_of(weights.config)
        cos, sin = rope.cos_sin(torch.arange(max_position, device=weights.device))
        unrotated = torch.ones_like(cos[:1]), torch.zeros_like(sin[:1])
        scale = rope.softmax_factor * c.qk_head_dim**-0.5
        gemms = Gemms(weights.dtype, weights.power_of_2, batch_invariant)
        dispatcher, tp = None, ALONE
        if expert_parallel is not None:
            dispatcher, tp = expert_parallel.dispatcher, expert_parallel.tp
        naive = NaiveAttention(c, weights.n_heads, gemms, cache, unrotated, scale)
        attention = Attention(c, weights.n_heads, gemms, cache, index, naive, scale, tp)
        feed_forward = FeedForward(c, gemms, dispatcher, tp, expert_load, expert_parallel)
        small_batches = small_batch.can_take_small_batches(attention, weights.device)
        return cls(weights, cos, sin, gemms, attention, feed_forward, tp, small_batches)

    def with_feed_forward(self, **changes: Any) -> Forward:
        """Return this pass with other attributes of `FeedForward`."""
        return replace(self, feed_forward=replace(self.feed_forward, **changes))

    def for_rows(self, rows: int) -> Forward:
        """Return this pass for steps of at most so many rows on any rank, or on any group of ranks."""
        return replace(self, feed_forward=self.feed_forward.for_rows(rows))

    def hidden(self, step: Step) -> Tensor:
        """Compute what the head reads, [T, D], and write the rows' latents of all layers but the prediction layer."""
        n_rows, step = len(step.tokens), self._padded(self.attention.with_schedule(step))
        x_TD = self.weights.embedding[self.tp.own(step.tokens)]
        cos_sin = self.cos[step.positions], self.sin[step.positions]
        observe = _observer.get()
        for layer, block in enumerate(self.weights.blocks):
            x_TD = self._block(x_TD, layer, block, step, cos_sin)
            if observe is not None:
                observe(layer, x_TD)
        return self.last_norm(x_TD, n_rows)

    def last_norm(self, x_TD: Tensor, n_rows: int) -> Tensor:
        """Normalize the last block's output: what the head reads, the first n_rows of all ranks of a group."""
        return self.tp.gather(rms_norm(x_TD, self.weights.norm, self._eps)[0])[:n_rows]

    def draft(self, step: Step, hidden_TD: Tensor) -> Tensor:
        """Compute what the head reads for the token after next, [T, D]; see `Runner.draft`."""
        mtp = self._mtp
        n_rows, step = len(step.tokens), self._padded(self.attention.with_schedule(step))
        x_TD = self._draft_input(mtp, step, hidden_TD)
        cos_sin = self.cos[step.positions], self.sin[step.positions]
        x_TD = self._block(x_TD, len(self.weights.blocks), mtp.block, step, cos_sin)
        return self.tp.gather(rms_norm(x_TD, mtp.norm, self._eps)[0])[:n_rows]

    def write_draft_latents(self, step: Step, hidden_TD: Tensor) -> None:
        """Write the latents that `draft` writes, which depend on its input alone, and compute nothing else of it."""
        mtp, step = self._mtp, self._padded(step)
        x_TD = self._draft_input(mtp, step, hidden_TD)
        cos_sin = self.cos[step.positions], self.sin[step.positions]
        self.attention.queries(x_TD, len(self.weights.blocks), mtp.block, step.slots, cos_sin)

    @property
    def _mtp(self) -> MTPWeights:
        assert self.weights.mtp is not None  # `ModelRunner` has checked it
        return self.weights.mtp

    def _draft_input(self, mtp: MTPWeights, step: Step, hidden_TD: Tensor) -> Tensor:
        """Compute the input of the multi-token prediction layer's block, a rank's own rows: [T, D]."""
        normed = (
            rms_norm(x_TD, weight, self._eps)[0]
            for x_TD, weight in (
                (self.weights.embedding[self.tp.own(step.tokens)], mtp.embedding_norm),
                (self.tp.own(hidden_TD), mtp.hidden_norm),
            )
        )
        both_TD = torch.cat((*normed,), dim=-1)
        return self.gemms.nt(self.gemms.rows_for(both_TD, mtp.projection), mtp.projection)

    def _padded(self, step: Step) -> Step:
        """Return a step with as many rows for each rank of a group; what fills them is written nowhere."""
        if len(step.tokens) == self.tp.n_padded(len(step.tokens)):
            return step
        tokens, positions, slots = (self.tp.pad(t, fill) for t, fill in zip(step[:3], (0, 0, -1), strict=True))
        return step._replace(tokens=tokens, positions=positions, slots=slots)

    def _block(self, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        takes_small_batch = self.small_batches and small_batch.is_small_batch(step, self.gemms.batch_invariant)
        if takes_small_batch and small_batch.has_small_batch_products(w.attention):
            x_TD = small_batch.add_attention(self.attention, x_TD, layer, w, step, cos_sin)
            if small_batch.has_small_batch_feed_forward(self.feed_forward, w.mlp):
                return small_batch.add_feed_forward(self.feed_forward, x_TD, layer, w, step.slots)
            return self.feed_forward.add(x_TD, layer, w, step.slots)
        o = self.attention.write_and_attend(x_TD, layer, w, step, cos_sin)
        return self.after_attention(x_TD, o, layer, w, step.slots)

    def after_attention(self, x_TD: Tensor, o: Rows, layer: int, w: BlockWeights, slots: Tensor) -> Tensor:
        """Add to a block's input what it computes, of what attention has returned, and return it: [T, D].

        Args:
            x_TD: the block's input, a rank's own rows.
            o, slots: what attention has returned, and where the rows are cached: those of all ranks of a group.
            layer, w: which block it is, and its weights.
        """
        self.attention.add_output_(x_TD, o, w.attention)
        return self.feed_forward.add(x_TD, layer, w, slots)

    def logits(self, h_TD: Tensor) -> Tensor:
        """Compute the logits of rows that the head reads, float32 [T, V]; each rank of a group computes some rows."""
        return self.tp.gather(self._logits(self.tp.own(h_TD)))[: len(h_TD)].float()

    def sample(self, h_TD: Tensor, how: Sequence[Tensor], log_probs_T: Tensor | None = None) -> Tensor:
        """Choose tokens by the logits of rows that the head reads: int64 [T]; see `octile.ops.sample_tokens`.

        Args:
            h_TD: the rows.
            how: arguments of `sample_tokens` after the logits, [T] each.
            log_probs_T: float32 [T], becomes the log-probabilities of the tokens before temperature, with the bits that
                `cross_entropy.log_probabilities` gives them of `logits`. A row that chooses no token gets any number.
        """
        logits = self._logits(self.tp.own(h_TD))
        tokens = sample_tokens(logits, *map(self.tp.own, how))
        if log_probs_T is not None:
            # in FP32 as `logits` returns them: the order of sums depends on the dtype on a GPU
            losses, _ = cross_entropy(logits.float(), tokens.clamp(min=0))
            log_probs_T.copy_(self.tp.gather(0.0 - losses)[: len(h_TD)])
        return self.tp.gather(tokens)[: len(h_TD)]

    def _logits(self, h_TD: Tensor) -> Tensor:
        """Compute the logits of rows, in FP32 in batch-invariant mode, otherwise in the dtype of activations."""
        if self.gemms.batch_invariant:
            return row_invariant_matmul_nt(h_TD[None], self.weights.head[None], torch.float32)[0]
        return F.linear(h_TD, self.weights.head)

    @property
    def _eps(self) -> float:
        return self.weights.config.rms_norm_eps
