"""Multi-head latent attention (MLA): the keys and values of all heads come from one small vector per token.

    latent = RMSNorm(W_kva · x)     512 channels, and 64 more of a rotary key that all heads share
    k, v   = W_kvb · latent         128 + 128 channels a head, recomputed wherever they are needed

This module is for training: it computes keys and values, and attends as usual. `octile.serve` caches the latents of
former tokens.

With an indexer each query attends to its top-k keys (`octile.nn.indexer`), and projections are not fused. Where there
are more keys than that, attention reads the latents of the top-k keys alone, as serving does, and computes no keys and
values of heads (`octile.nn.fused.sparse_latent_attention`). It reads the weight of `kv_b_proj`. A `kv_b_proj` that has
hooks or a bias, was replaced, as by an adapter, or whose weight is sharded over ranks is called instead, and so it is
on a GPU unless latents have 512 + 64 channels and are BF16. Keys and values are computed then, and attention takes the
time of dense attention (`octile.nn.fused.top_k_attention`).

In GLM-5.2 several layers attend to the top-k keys of one indexer: the first of them has it, and passes on what it has
found (`SharingMLA`).

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, DeepSeek-V3 (arXiv 2412.19437) §2.1.1.
Shapes: B batch, S tokens, D model, H heads, C latent, R rotary key, N the rest of a head's key, V a head's value,
W = C + R, K top-k keys.
"""

import torch
from torch import Tensor, nn

from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.fusion import FusableModule, Fusion, fuse_linear
from octile.nn.fused.mla import Heads, latent_attention
from octile.nn.fused.pre_norm import norm_block_input
from octile.nn.fused.projections import projections
from octile.nn.fused.rotary import latent_keys_and_values, rotate
from octile.nn.fused.served_attention import served_attention
from octile.nn.fused.shared_quantization import shared_quantization
from octile.nn.fused.sparse_latent_attention import sparse_latent_attention, why_not_absorbed
from octile.nn.fused.text_attention import causal_attention, text_attention
from octile.nn.fused.top_k_attention import top_k_attention, top_k_weights
from octile.nn.indexer import Indexer, IndexInput, IndexReader
from octile.nn.norm import RMSNorm
from octile.nn.packed_texts import TextBorders
from octile.nn.rope import CosSin

NOT_PACKED = "texts must be None where attention is {}: it does not know the borders of packed texts"


class MLA(FusableModule):
    """Causal multi-head latent attention; parameters are named as in the published checkpoints.

    Under a recipe that says how attention's output is saved, its up-projections, attention and output projection are
    one function (`octile.nn.fused.mla`), and so are its down-projections. Otherwise, and where a layer has hooks or was
    replaced, they are called one after the other.

    Args:
        hidden_size: D.
        num_attention_heads: H.
        q_lora_rank: rank of the compressed queries; None projects them directly.
        kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim: C, R, N, V.
        softmax_factor: what YaRN multiplies the softmax scale by.
        indexer: finds the top-k keys of each query, from compressed queries, or, in a `SharingMLA`, reads those that
            an earlier layer has found; None: attention is dense.

    Raises:
        ValueError: there is an indexer, and no compressed queries.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        softmax_factor: float = 1.0,
        indexer: IndexReader | None = None,
    ):
        if indexer is not None and q_lora_rank is None:
            raise ValueError("q_lora_rank must be a number where there is an indexer, which reads compressed queries")
        super().__init__()
        self.latent_split = [kv_lora_rank, qk_rope_head_dim]
        self.q_split = [qk_nope_head_dim, qk_rope_head_dim]
        self.kv_split = [qk_nope_head_dim, v_head_dim]
        self.num_heads = num_attention_heads
        self.softmax_scale = softmax_factor * sum(self.q_split) ** -0.5
        self.has_compressed_queries = q_lora_rank is not None

        q_dim = num_attention_heads * sum(self.q_split)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, q_dim, bias=False)
            query_layers: tuple[str, ...] = ("q_proj",)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, q_dim, bias=False)
            query_layers = ("q_a_proj", "q_a_layernorm", "q_b_proj")
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, sum(self.latent_split), bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_attention_heads * sum(self.kv_split), bias=False)
        self.o_proj = nn.Linear(num_attention_heads * v_head_dim, hidden_size, bias=False)
        self.indexer = indexer
        self.fusable_layers = (*query_layers, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")

    def forward(self, x_BSD: Tensor | BlockInput, cos_sin: CosSin, texts: TextBorders | None = None) -> Tensor:
        """Attend from each token to itself and to the tokens before it: [B, S, D].

        Args:
            x_BSD: the input, or the second result of `octile.nn.pre_norm`.
            cos_sin: cosines and sines of the positions, each [S, R / 2]; with texts those of all tokens, [B·S, R / 2].
            texts: the borders of packed texts: a token attends to those of its text. None: to those of its sequence.

        Raises:
            ValueError: there are texts, and the attention is sparse or that of serving.
        """
        x = self.fused_input(x_BSD)
        if isinstance(x, BlockInput):
            return self._fused(x, cos_sin, texts)
        if texts is not None:
            return self._attend_within_texts(x, cos_sin, texts)

        return self._attended(x, cos_sin)[0]

    def decide_fusion(self) -> Fusion | None:
        """Return how projections and norms are fused, or None if they are called one after the other."""
        if self.indexer is not None:
            return None
        layers = [self._modules[name] for name in self.fusable_layers]
        norms = [layer for name, layer in zip(self.fusable_layers, layers, strict=True) if name.endswith("norm")]
        linear = [layer for layer in layers if layer is not None and layer not in norms]
        fusion = fuse_linear(*linear, can_fuse=lambda recipe: recipe.can_fuse_attention)
        return fusion if all(type(norm) is RMSNorm for norm in norms) else None

    def _fused(self, x: BlockInput, cos_sin: CosSin, texts: TextBorders | None) -> Tensor:
        recipe, dtype = x.recipe, result_dtype(x.x)
        if self.has_compressed_queries:
            weights = [self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight]
            sizes = [[len(self.q_a_proj.weight)], self.latent_split]
            q_TK, latent_TC, k_rope_TR = projections(x, weights, sizes, dtype)
            _, x_q = norm_block_input(q_TK, self.q_a_layernorm, recipe)
            w_q = self.q_b_proj.weight
        else:
            weights = [self.kv_a_proj_with_mqa.weight]
            latent_TC, k_rope_TR = projections(x, weights, [self.latent_split], dtype)
            x_q, w_q = x, self.q_proj.weight
        weights_after = (w_q, self.kv_b_proj.weight, self.o_proj.weight)
        nope_dim, rope_dim = self.q_split
        batch = x.shape[0] if texts is None else 1
        heads = Heads(batch, self.num_heads, nope_dim, rope_dim, self.kv_split[1], self.softmax_scale)
        after = k_rope_TR, cos_sin, *weights_after, heads, dtype
        if recipe.batch_invariant:
            if texts is not None:
                raise ValueError(NOT_PACKED.format("that of serving (a batch-invariant recipe)"))
            return served_attention(x_q, self.kv_a_layernorm(latent_TC), *after).view(*x.shape[:-1], -1)
        _, x_kv = norm_block_input(latent_TC, self.kv_a_layernorm, recipe)
        return latent_attention(x_q, x_kv, *after, texts).view(*x.shape[:-1], -1)

    def _attended(
        self, x_BSD: Tensor, cos_sin: CosSin, found: tuple[IndexInput | None, Tensor | None] | None = None
    ) -> tuple[Tensor, IndexInput | None, Tensor | None]:
        """Attend within sequences, by layers that are not fused.

        Args:
            x_BSD, cos_sin: as in `forward`.
            found: the inputs of the logits and the top-k keys of an indexer; None: those of its own, if it has one.

        Returns:
            the output [B, S, D], and what was found.
        """
        q_BSHX, latent_BSW, q_latent_BSL = self._projections(x_BSD)
        q_BSHX = rotate(q_BSHX, cos_sin)
        latent_BSC, k_rope_BSR = latent_BSW.split(self.latent_split, dim=-1)
        latent_BSC = self.kv_a_layernorm(latent_BSC)
        index = top_k_BSK = None
        if found is not None:
            index, top_k_BSK = found
        elif isinstance(self.indexer, Indexer) and q_latent_BSL is not None:
            index = self.indexer(x_BSD, q_latent_BSL, cos_sin)
            top_k_BSK = self.indexer.top_k_keys(*index)
        if top_k_BSK is None:
            o_BSHV = self._attend(q_BSHX, latent_BSC, k_rope_BSR, cos_sin, index)
        else:
            o_BSHV = self._attend_to_top_k(q_BSHX, latent_BSC, k_rope_BSR, cos_sin, index, top_k_BSK)
        return self.o_proj(o_BSHV.flatten(-2)), index, top_k_BSK

    def _projections(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the queries [B, S, H, N + R], the latents with the rotary key [B, S, W], and compressed queries."""
        first = self.q_a_proj if self.has_compressed_queries else self.q_proj
        q, latent_BSW = shared_quantization(x_BSD, first, self.kv_a_proj_with_mqa)
        compressed = None
        if self.has_compressed_queries:
            compressed = self.q_a_layernorm(q)
            q = self.q_b_proj(compressed)
        return q.unflatten(-1, (self.num_heads, -1)), latent_BSW, compressed

    def _attend_within_texts(self, x_BSD: Tensor, cos_sin: CosSin, texts: TextBorders) -> Tensor:
        """Attend within packed texts, whose tokens are one batch of T = B·S: [B, S, D]."""
        if self.indexer is not None:
            raise ValueError(NOT_PACKED.format("sparse"))
        q_1THX, latent_1TW, _ = self._projections(x_BSD.reshape(1, -1, x_BSD.shape[-1]))
        latent_1TC, k_rope_1TR = latent_1TW.split(self.latent_split, dim=-1)
        k_1THX, v_1THV = self._keys_and_values(self.kv_a_layernorm(latent_1TC), k_rope_1TR, cos_sin)
        o_1THV = text_attention(rotate(q_1THX, cos_sin), k_1THX, v_1THV, self.softmax_scale, texts)
        return self.o_proj(o_1THV.flatten(-2)).view(x_BSD.shape)

    def _attend(
        self, q_BSHX: Tensor, latent_BSC: Tensor, k_rope_BSR: Tensor, cos_sin: CosSin, index: IndexInput | None
    ) -> Tensor:
        """Attend to all keys up to the query's own: [B, S, H, V]."""
        k_BSHX, v_BSHV = self._keys_and_values(latent_BSC, k_rope_BSR, cos_sin)
        if self.indexer is not None and index is not None and self.training:
            q_BSHX = self.indexer.align(index, q_BSHX, k_BSHX, self.softmax_scale)
        return causal_attention(q_BSHX, k_BSHX, v_BSHV, self.softmax_scale)

    def _attend_to_top_k(
        self,
        q_BSHX: Tensor,
        latent_BSC: Tensor,
        k_rope_BSR: Tensor,
        cos_sin: CosSin,
        index: IndexInput | None,
        top_k_BSK: Tensor,
    ) -> Tensor:
        """Attend to the top-k keys of each query: [B, S, H, V]."""
        assert self.indexer is not None
        scale, nope_dim, weights_BSK = self.softmax_scale, self.kv_split[0], None
        if why_not_absorbed(self.kv_b_proj, q_BSHX, nope_dim) is None:
            k_rope_BSR = rotate(k_rope_BSR[:, :, None], cos_sin)[:, :, 0]
            rows_BSW = torch.cat((latent_BSC, k_rope_BSR), dim=-1)
            arguments = q_BSHX, rows_BSW, self.kv_b_proj, top_k_BSK, nope_dim, scale
            o_BSHV, weights_BSK = sparse_latent_attention(*arguments, with_weights=self.training)
        else:
            k_BSHX, v_BSHV = self._keys_and_values(latent_BSC, k_rope_BSR, cos_sin)
            o_BSHV = top_k_attention(q_BSHX, k_BSHX, v_BSHV, top_k_BSK, scale)
            if self.training:
                weights_BSK = top_k_weights(q_BSHX, k_BSHX, top_k_BSK, scale)
        if index is None or weights_BSK is None:
            return o_BSHV
        return self.indexer.align_top_k(index, top_k_BSK, weights_BSK, o_BSHV)

    def _keys_and_values(self, latent_BSC: Tensor, k_rope_BSR: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Compute keys [B, S, H, X], with rotary keys shared by all heads, and values [B, S, H, V]."""
        kv_BSHY = self.kv_b_proj(latent_BSC).unflatten(-1, (self.num_heads, -1))
        return latent_keys_and_values(kv_BSHY, k_rope_BSR, cos_sin, self.kv_split[0])


class SharingMLA(MLA):
    """Attention of a model in which layers share top-k keys: one with an `Indexer`, or one that reads what it found.

    Args:
        indexer: an `Indexer`, or the `IndexReader` of a layer without one.
    """

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, cos_sin: CosSin, texts: TextBorders | None = None, *found: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Attend as `MLA.forward` does, and pass on what the indexer has found.

        All results are tensors or None, and none is in a container, so that activation checkpointing of either kind
        passes gradients on.

        Args:
            x_BSD, cos_sin, texts: as in `MLA.forward`.
            found: what the layer before has returned besides its output; nothing if there is none.

        Returns:
            the output [B, S, D]; in training mode `IndexInput`'s three, with their gradients, otherwise None; the
            top-k keys, int32 [B, S, K], or None if each query attends to all keys that it sees.

        Raises:
            ValueError: there are texts, or the layer has no indexer and nothing was found.
        """
        x = self.fused_input(x_BSD)
        assert isinstance(x, Tensor)  # with an indexer nothing is fused
        if texts is not None:
            return (self._attend_within_texts(x, cos_sin, texts),)  # raises
        read = None
        if not isinstance(self.indexer, Indexer):
            if not found:
                raise ValueError("found must be what an earlier layer's indexer has found: this layer has no indexer")
            q, k, weights, top_k_BSK = found
            read = None if q is None or k is None or weights is None else IndexInput(q, k, weights), top_k_BSK
        o_BSD, index_input, top_k_BSK = self._attended(x, cos_sin, read)
        passed = index_input if self.training and index_input is not None else (None, None, None)
        return o_BSD, *passed, top_k_BSK
