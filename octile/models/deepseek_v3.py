"""The whole DeepSeek-V3 model; DeepSeek-V2 is a configuration of it.

    block      x + MLA(norm(x)), then x + MLP(norm(x)); after the first few layers the MLP is a mixture of experts
    main       embedding → blocks → norm → head, which predicts the next token
    MTP        one more block reads the main model's normalized output at t and the embedding of token t+1; the same
               head predicts token t+2: a denser signal in training, a draft in decoding

Parameters are named as in the published checkpoints, except that a layer's experts are stacked (`names.py`); the MTP
block is the layer after the last one.

Source: DeepSeek-V3 (arXiv 2412.19437) §2, figures 2 and 3.  Shapes: B batch, S sequence, D model, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.formats import TILE
from octile.models.config import ModelConfig
from octile.nn.functional import result_dtype
from octile.nn.fused.cross_entropy import can_use_kernel, cross_entropies, cross_entropy, mean_loss
from octile.nn.fused.feed_forward import can_fuse_size
from octile.nn.fused.fusion import has_hooks
from octile.nn.fused.pre_norm import pre_norm
from octile.nn.gate import Gate
from octile.nn.indexer import Indexer, IndexReader
from octile.nn.linear import BatchInvariantHead, recipe_of, with_class
from octile.nn.mla import MLA, SharingMLA
from octile.nn.mlp import MLP
from octile.nn.moe import Experts, MoE
from octile.nn.norm import RMSNorm
from octile.nn.packed_texts import PackedTexts, TextBorders
from octile.nn.precision import forward_precision
from octile.nn.rope import CosSin, Rope
from octile.ops.cross_entropy import IGNORED
from octile.recipe import Recipe


class Block(nn.Module):
    """One layer: attention, then a feed-forward layer or a mixture of experts, each with a norm before it."""

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = _mixture(c) if c.is_moe(layer) else MLP(c.hidden_size, c.intermediate_size)

    def forward(self, x_BSD: Tensor, cos_sin: CosSin, texts: TextBorders | None = None) -> Tensor:
        """Return the block's output, [B, S, D].

        Args:
            x_BSD: the input.
            cos_sin, texts: as in `MLA.forward`.
        """
        x_BSD, normed = pre_norm(x_BSD, self.input_layernorm, self.self_attn)
        x_BSD = x_BSD + self.self_attn(normed, cos_sin, texts)
        x_BSD, normed = pre_norm(x_BSD, self.post_attention_layernorm, self.mlp)
        return x_BSD + self.mlp(normed)


class SharingBlock(Block):
    """A layer of a model in which layers share top-k keys: it passes on what the last indexer has found."""

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, cos_sin: CosSin, texts: TextBorders | None = None, *found: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the block's output, [B, S, D], and what `SharingMLA.forward` passes on.

        Args:
            x_BSD: the input.
            cos_sin, texts, found: as in `SharingMLA.forward`.
        """
        x_BSD, normed = pre_norm(x_BSD, self.input_layernorm, self.self_attn)
        o_BSD, *found = self.self_attn(normed, cos_sin, texts, *found)
        x_BSD, normed = pre_norm(x_BSD + o_BSD, self.post_attention_layernorm, self.mlp)
        return x_BSD + self.mlp(normed), *found


class MTPBlock(Block):
    """The multi-token prediction layer: [embedding of t+1; h of t], 2D channels → what the head reads, normalized."""

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__(c, layer)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})

    def forward(self, x_BSD: Tensor, cos_sin: CosSin, texts: TextBorders | None = None) -> Tensor:
        """Return the normed state for the token after the next, [B, S, D].

        Args:
            x_BSD: the embedding of the next token and the main model's state, side by side, [B, S, 2·D].
            cos_sin, texts: as in `MLA.forward`.
        """
        emb_BSD, h_BSD = x_BSD.chunk(2, dim=-1)
        x_BSD = self.eh_proj(torch.cat((self.enorm(emb_BSD), self.hnorm(h_BSD)), dim=-1))
        return self.shared_head["norm"](super().forward(x_BSD, cos_sin, texts))


class Trunk(nn.Module):
    """Everything before the head; the MTP block, if there is one, is the last of `layers`."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        block = SharingBlock if c.shares_top_k else Block
        blocks = [block(c, layer) for layer in range(c.num_hidden_layers)]
        blocks += [MTPBlock(c, c.num_hidden_layers + depth) for depth in range(c.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class DeepseekV3(nn.Module):
    """A DeepSeek-V3 or V2 language model.

    Parameters are FP32 and drawn from N(0, initializer_range²); norms start at 1.

    Attributes:
        config: its `ModelConfig`.
        mtp_loss_weight: weight of the multi-token prediction's loss; the configuration's until training changes it.
        last_losses: "main", "mtp" and "balance" of the last forward pass with labels, detached, in nats; "mtp" is not
            yet weighted, "balance" is. With indexers also "indexer", the sum of their alignment losses.
        stored_scales: Hugging Face name → the scales of an FP8 weight in the checkpoint that the model was read from.
            `octile.save` gives them to the blocks that have not changed.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.mtp_loss_weight = config.mtp_loss_weight
        self.rope = rope_of(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.last_losses: dict[str, Tensor] = {}
        self.stored_scales: dict[str, Tensor] = {}
        for module in self.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, Experts):
                    module.draw_(parameter, config.initializer_range)
                elif parameter.dim() > 1:
                    nn.init.normal_(parameter, std=config.initializer_range)

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        texts: PackedTexts | None = None,
        n_labels_2: Tensor | None = None,
    ) -> Tensor:
        """Compute logits, or the loss if there are labels.

        Args:
            tokens_BS: int64 [B, S].
            labels_BS: int64 [B, S], usually the tokens themselves: the model shifts them. The loss ignores −100.
            texts: where the texts of packed sequences begin, if a sequence is not one text.
            n_labels_2: float32 [2], by what the summed losses of next tokens, and of the tokens after them, are
                divided; by their numbers of labels if not given.

        Returns:
            logits [B, S, V]; or the mean loss in nats, a scalar: the next token's cross-entropy, in training mode
            plus `mtp_loss_weight` times that of the token after it, plus the experts' balance losses, plus the
            indexers' alignment losses.

        Raises:
            TypeError: tokens or labels are no int64 tensor.
            ValueError: wrong shapes, more tokens than the model's `max_position_embeddings`, or several texts in a
                sequence for attention that does not know their borders (`MLA.forward`).
        """
        self._check(tokens_BS, labels_BS, texts)
        h_BSD, cos_sin = self._main(tokens_BS, texts)
        if labels_BS is None:
            self._pop_losses()
            return self.lm_head(h_BSD)
        return self._loss(tokens_BS, labels_BS, h_BSD, cos_sin, texts=texts, n_labels_2=n_labels_2)

    def with_drafts(self, tokens_BS: Tensor, texts: PackedTexts | None = None) -> tuple[Tensor, Tensor]:
        """Return two predictions at each position t: the logits of the next token, and, given that token, those of the
        token after it: what a decoder drafts, and what the first prediction at t + 1 accepts or rejects.

        Args:
            tokens_BS: int64 [B, S], S at least 2.
            texts: as in `forward`.

        Returns:
            logits [B, S, V], drafted logits [B, S − 1, V].

        Raises:
            TypeError: tokens are no int64 tensor.
            ValueError: the model has no multi-token prediction, or tokens have a wrong shape.
        """
        if not self.config.num_nextn_predict_layers:
            raise ValueError("the model has no multi-token prediction, so it drafts nothing")
        self._check_pairs(tokens_BS)
        h_BSD, cos_sin = self._main(tokens_BS, texts)
        drafts_BSD = self._drafts(tokens_BS, h_BSD, cos_sin, texts)
        self._pop_losses()
        return self.lm_head(h_BSD), self.lm_head(drafts_BSD)

    def log_probs(self, tokens_BS: Tensor) -> Tensor:
        """Compute the log-probability of each token but the first, given those before it; differentiable.

        The forward pass is that of a training step: on a GPU in autocast of the recipe's `compute`, as `octile train`
        has it. Under `Recipe.exact` these are the numbers that `octile serve` reports in exact mode, bit for bit:
        logarithms of the softmax of the logits, whatever temperature or top_p a token is then sampled with.

        Args:
            tokens_BS: int64 [B, S], S at least 2.

        Returns:
            float32 [B, S − 1], in nats.

        Raises:
            TypeError: tokens are no int64 tensor.
            ValueError: tokens have a wrong shape.
        """
        self._check_pairs(tokens_BS)
        with self.training_precision():
            h_BSD, _ = self._main(tokens_BS)
            self._pop_losses()
            losses_BS = self._cross_entropies(h_BSD[:, :-1], tokens_BS[:, 1:].contiguous())
            return 0.0 - losses_BS  # 0 of a loss of 0, as the engine has it, and not −0

    def training_precision(self) -> AbstractContextManager[None]:
        """Return the context of a training step's forward pass: on a GPU, autocast to the recipe's `compute` dtype."""
        weight, recipe = self.lm_head.weight, recipe_of(self)
        return forward_precision(weight.device, weight.dtype if recipe is None else recipe.compute)

    def why_not_batch_invariant(self) -> str | None:
        """Return why no batch-invariant recipe can be applied; None: one can.

        Experts of other widths are not fused: the weight of an expert then multiplies its result, and not SwiGLU's.
        """
        if self.config.has_indexer:
            return "sparse attention chooses its keys by kernels that differ between training and serving"
        size = self.config.moe_intermediate_size
        return None if can_fuse_size(size) else f"moe_intermediate_size must be a multiple of {TILE[1]}, not {size}"

    def adapt_to(self, recipe: Recipe) -> None:
        """Give the output head the form that belongs to a recipe, whose layers the blocks have by now."""
        if type(self.lm_head) in (nn.Linear, BatchInvariantHead):  # the head is on this rank
            self.lm_head = with_class(BatchInvariantHead if recipe.batch_invariant else nn.Linear, self.lm_head)

    def moe_layers(self) -> dict[str, MoE]:
        """Return the mixtures of experts by their names, such as "model.layers.3.mlp"."""
        mlps = [(i, getattr(layer, "mlp", None)) for i, layer in enumerate(self.model.layers)]
        return {f"model.layers.{i}.mlp": mlp for i, mlp in mlps if isinstance(mlp, MoE)}

    def indexers(self) -> list[Indexer]:
        """Return the indexers of all layers, that of multi-token prediction included; none where attention is dense."""
        return [reader for reader in self.index_readers() if isinstance(reader, Indexer)]

    def index_readers(self) -> list[IndexReader]:
        """Return what holds the alignment losses: the indexers, and in layers that share one its `IndexReader`."""
        attentions = [getattr(layer, "self_attn", None) for layer in self.model.layers]
        return [a.indexer for a in attentions if isinstance(a, MLA) and a.indexer is not None]

    def warm_up_indexers(self, on: bool) -> None:
        """Begin or end the first stage of training the indexers, in which they alone are trained.

        No other parameter requires a gradient, and attention is dense in training mode, sparse in evaluation mode.

        Raises:
            ValueError: the model has no indexer.
        """
        indexers = self.indexers()
        if not indexers:
            raise ValueError("the model has no indexer: index_n_heads, index_head_dim and index_topk are None")
        self.requires_grad_(not on)
        for indexer in indexers:
            indexer.warm_up = on
            indexer.requires_grad_(True)

    def stages(self) -> list[nn.Module]:
        """Return the modules that a forward pass in training mode calls one after another; they have all parameters."""
        trunk, n = self.model, self.config.num_hidden_layers
        return [trunk.embed_tokens, *trunk.layers[:n], trunk.norm, self.lm_head, *trunk.layers[n:]]

    def _main(self, tokens_BS: Tensor, texts: PackedTexts | None = None) -> tuple[Tensor, CosSin]:
        """Return what the head reads, normalized [B, S, D], and the cosines and sines of the positions."""
        cos_sin, *borders = self._positions(tokens_BS, texts)
        layers = self.model.layers[: self.config.num_hidden_layers]
        return self.model.norm(self._through(layers, self._embedded(tokens_BS), cos_sin, *borders)), cos_sin

    def _through(
        self, layers: Iterable[nn.Module], x_BSD: Tensor, cos_sin: CosSin, texts: TextBorders | None = None
    ) -> Tensor:
        """Return the output of the last of some consecutive layers, [B, S, D]."""
        if not self.config.shares_top_k:
            borders = () if texts is None else (texts,)
            for layer in layers:
                x_BSD = layer(x_BSD, cos_sin, *borders)
            return x_BSD
        found: Sequence[Tensor | None] = ()
        for layer in layers:
            x_BSD, *found = layer(x_BSD, cos_sin, texts, *found)
        return x_BSD

    def _positions(self, tokens_BS: Tensor, texts: PackedTexts | None) -> tuple[CosSin] | tuple[CosSin, TextBorders]:
        """Return what layers get besides activations: cosines and sines, and the borders of packed texts."""
        if texts is None:
            return (self.rope.table(tokens_BS.shape[1], tokens_BS.device),)
        return self.rope.cos_sin(texts.positions().flatten()), texts.borders()

    def _loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        h_BSD: Tensor,
        cos_sin: CosSin,
        balance_before: Tensor | int = 0,
        texts: PackedTexts | None = None,
        n_labels_2: Tensor | None = None,
    ) -> Tensor:
        n_main, n_mtp = (None, None) if n_labels_2 is None else n_labels_2
        main = self._cross_entropy(h_BSD, labels_BS[:, 1:] if texts is None else texts.next_labels(labels_BS), n_main)
        mtp = balance = torch.zeros_like(main)
        if self.training:
            if self.config.num_nextn_predict_layers:
                second_BS = labels_BS[:, 2:] if texts is None else texts.second_labels(labels_BS)
                mtp = self._cross_entropy(self._drafts(tokens_BS, h_BSD, cos_sin, texts), second_BS, n_mtp)
            balance = balance + self._pop_balance_loss(balance_before)
        self.last_losses = {"main": main.detach(), "mtp": mtp.detach(), "balance": balance.detach()}
        loss = main + self.mtp_loss_weight * mtp + balance
        if readers := self.index_readers():
            alignment = torch.zeros_like(main)
            for reader in readers:
                alignment = alignment + reader.pop_alignment_loss()
            self.last_losses["indexer"] = alignment.detach()
            loss = loss + alignment
        return loss

    def _drafts(self, tokens_BS: Tensor, h_BSD: Tensor, cos_sin: CosSin, texts: PackedTexts | None = None) -> Tensor:
        """Return what the head reads for the token after the next one, without the last position: [B, S − 1, D]."""
        next_BSD = self._embedded(tokens_BS[:, 1:])
        both_BSD = torch.cat((next_BSD, h_BSD[:, :-1].to(next_BSD.dtype)), dim=-1)
        if texts is not None:
            return self.model.layers[-1](both_BSD, *self._positions(tokens_BS[:, :-1], texts.without_last()))
        cos_SR, sin_SR = cos_sin
        return self.model.layers[-1](both_BSD, (cos_SR[:-1], sin_SR[:-1]))

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        """Embed tokens: [B, S, D], in autocast's dtype where autocast is on, which does not cast embeddings itself."""
        x_BSD = self.model.embed_tokens(tokens_BS)
        return x_BSD.to(result_dtype(x_BSD))

    def _pop_losses(self) -> None:
        """Forget the losses that layers have left in a forward pass without labels."""
        self._pop_balance_loss()
        for reader in self.index_readers():
            reader.pop_alignment_loss()

    def _pop_balance_loss(self, before: Tensor | int = 0) -> Tensor | float:
        return sum((moe.pop_balance_loss() for moe in self.moe_layers().values()), before)

    def _cross_entropy(self, h_BSD: Tensor, labels_BS: Tensor, n_labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of what the head reads at the positions that have a label.

        Args:
            h_BSD: [B, S, D], the last positions have no label.
            labels_BS: int64, less than S of a sequence.
            n_labels: what the sum is divided by instead of the number of labels.
        """
        n = labels_BS.shape[1]
        if h_BSD.is_cuda:  # the head reads every position: the first n of each sequence would have to be copied
            labels_BS = F.pad(labels_BS, (0, h_BSD.shape[1] - n), value=IGNORED)
        else:
            h_BSD = h_BSD[:, :n]
        if n_labels is not None:
            return self._cross_entropies(h_BSD, labels_BS.contiguous()).sum() / n_labels
        if self._has_losses_of_head(h_BSD):
            return mean_loss(self._cross_entropies(h_BSD, labels_BS), labels_BS)
        return cross_entropy(self.lm_head(h_BSD), labels_BS)

    def _cross_entropies(self, h_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the loss of each label [B, S]."""
        if self._has_losses_of_head(h_BSD):
            return self.lm_head(h_BSD, labels_BS)
        return cross_entropies(self.lm_head(h_BSD), labels_BS)

    def _has_losses_of_head(self, h_BSD: Tensor) -> bool:
        """Whether the head computes losses itself: in exact mode on a GPU, unless hooks are to see its logits."""
        return isinstance(self.lm_head, BatchInvariantHead) and can_use_kernel(h_BSD) and not has_hooks(self.lm_head)

    def _check(self, tokens_BS: Tensor, labels_BS: Tensor | None, texts: PackedTexts | None = None) -> None:
        _check_integers("tokens", tokens_BS)
        if labels_BS is not None:
            _check_integers("labels", labels_BS)
        if tokens_BS.dim() != 2 or tokens_BS.numel() == 0:
            raise ValueError(f"tokens must be [batch, sequence] with at least one token, not {list(tokens_BS.shape)}")
        length, limit = tokens_BS.shape[1], self.config.max_position_embeddings
        if length > limit:
            raise ValueError(f"{length} tokens are more than the model's max_position_embeddings, {limit}")
        if labels_BS is not None and labels_BS.shape != tokens_BS.shape:
            raise ValueError(f"labels must have the tokens' shape {list(tokens_BS.shape)}, not {list(labels_BS.shape)}")
        if texts is not None and texts.is_first_BS.shape != tokens_BS.shape:
            shape = list(texts.is_first_BS.shape)
            raise ValueError(f"texts must have the tokens' shape {list(tokens_BS.shape)}, not {shape}")
        shortest = 3 if self.training and self.config.num_nextn_predict_layers else 2
        if labels_BS is not None and tokens_BS.shape[1] < shortest:
            raise ValueError(f"a loss needs sequences of at least {shortest} tokens, not {tokens_BS.shape[1]}")

    def _check_pairs(self, tokens_BS: Tensor) -> None:
        self._check(tokens_BS, None)
        if tokens_BS.shape[1] < 2:
            raise ValueError(f"tokens must be [batch, sequence] of two tokens or more, not {list(tokens_BS.shape)}")


def _check_integers(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        given = f"{x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise TypeError(f"{name} must be a tensor of int64, not {given}")


def rope_of(c: ModelConfig) -> Rope:
    """Make the rotary embedding of a model."""
    return Rope(c.qk_rope_head_dim, c.rope_theta, **(asdict(c.rope_scaling) if c.rope_scaling else {}))


def _attention(c: ModelConfig, layer: int) -> MLA:
    attention = SharingMLA if c.shares_top_k and layer < c.num_hidden_layers else MLA
    return attention(
        c.hidden_size,
        c.num_attention_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        softmax_factor=rope_of(c).softmax_factor,
        indexer=_index_reader(c, layer),
    )


def _index_reader(c: ModelConfig, layer: int) -> IndexReader | None:
    if not (c.index_n_heads and c.index_head_dim and c.index_topk and c.q_lora_rank):
        return None
    if not c.has_own_indexer(layer):
        first = max(i for i in range(layer) if c.has_own_indexer(i))
        return IndexReader(c.top_k_readers(first))
    sizes = c.index_n_heads, c.index_head_dim, c.index_topk
    return Indexer(c.hidden_size, c.q_lora_rank, *sizes, c.indexer_rope_interleave, c.top_k_readers(layer))


def _mixture(c: ModelConfig) -> MoE:
    gate = Gate(
        c.hidden_size,
        c.n_routed_experts,
        c.num_experts_per_tok,
        n_group=c.n_group,
        topk_group=c.topk_group,
        topk_method=c.topk_method,
        scoring_func=c.scoring_func,
        norm_topk_prob=c.norm_topk_prob,
        routed_scaling_factor=c.routed_scaling_factor,
    )
    shared = c.n_shared_experts * c.moe_intermediate_size
    return MoE(gate, c.hidden_size, c.moe_intermediate_size, shared, c.aux_loss_alpha)
