"""The forward pass of small-batch decode steps, with operators that fuse several of the general forward pass.

Such a step reads weights and does little else, and the general pass (`octile.serve.model.forward`) has some twenty
launches a layer, most of which take longer to start than to run. Here attention has five, and each loads its
weights before the previous one has ended:

    few_rows_nt        the norm of the block's input, and the projections to queries and latent
    latent_attention   W_UK, rotary embeddings, the norm of latents, and the cache's rows; attention by splits; their
                       merge, and W_UV: three launches
    few_rows_nt        the output's projection, and the residual
    few_rows_mixture   the norm, the gate, the experts and the shared experts, and the residual: three launches

Of a dense SwiGLU layer, few_rows_nt computes the norm and the projections to gate and up. With BF16 weights attention
is the same, with GEMMs instead of few_rows_nt; dense layers and mixtures take the general pass.

The formulas are those of the general pass, with sums in another order. In batch-invariant mode they have the same
bits, and only steps of one row take this pass; layers of SwiGLU alone take the general one.

An operator computes a call without a kernel by the operators of many rows, which takes longer. Its result does not show
it, so a server says at its start what `why_kernels_lack` returns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import TILE
from octile.kernels.cuda.few_rows import attention as attention_kernels
from octile.kernels.cuda.few_rows import launcher, mixture
from octile.kernels.cuda.few_rows.launcher import MAX_ROWS
from octile.kernels.cuda.gemm import request
from octile.ops.few_rows import few_rows_nt, latent_attention
from octile.ops.few_rows_mixture import few_rows_mixture
from octile.ops.matmul import matmul_nt
from octile.ops.norm import rms_norm
from octile.ops.swiglu import swiglu_quantize
from octile.scaled import ScaledTensor
from octile.serve.model.attention import Attention
from octile.serve.model.feed_forward import FeedForward
from octile.serve.model.gemms import Rows
from octile.serve.runner.step import Step
from octile.serve.weights.block_weights import NORM_EPS, AttentionWeights, BlockWeights, MLPWeights, MoEWeights, Weight
from octile.serve.weights.weights import ServedWeights


def is_small_batch(step: Step, batch_invariant: bool) -> bool:
    """Whether a step has up to 8 rows, or in batch-invariant mode one, which all decode."""
    return 0 < len(step.tokens) <= max_rows(batch_invariant) and step.only_decodes


def max_rows(batch_invariant: bool) -> int:
    """Return how many rows a small batch has at most."""
    return 1 if batch_invariant else MAX_ROWS


def can_take_small_batches(attention: Attention, device: torch.device) -> bool:
    """Whether a model's small-batch decode steps take this pass: on a GPU, in BF16, all heads to all positions."""
    return device.type == "cuda" and why_no_small_batch(attention) is None


def why_no_small_batch(attention: Attention) -> str | None:
    """Return why all steps of a model take the general pass on a GPU; None: small-batch decode steps do not."""
    if attention.index is not None:
        return "rows attend to top-k positions"
    if attention.tp.size > 1:
        return f"{attention.tp.size} ranks share the rows of a step"
    if attention.gemms.dtype != torch.bfloat16:
        return f"activations are {attention.gemms.dtype}, not {torch.bfloat16}"
    return None


def has_small_batch_products(w: AttentionWeights) -> bool:
    """Whether all projections are in FP8 or all in high precision, and those of the block's input are joined."""
    others = [w.o] if w.q_up is None else [w.o, w.q_up]
    are_fp8 = {isinstance(weight, ScaledTensor) for weight in (w.x.weights[0], *others)}
    return len(w.x.weights) == 1 and len(are_fp8) == 1


def add_attention(
    attention: Attention, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]
) -> Tensor:
    """Write the rows' latents of a block, and return the block's input plus its attention: [T, D]."""
    a, cache = w.attention, attention.cache.layers[layer]
    c, gemms = attention.config, attention.gemms

    def product(x_TK: Tensor, norm: Tensor | None, eps: float, weight: Weight, add: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Tensor):
            how = gemms.power_of_2, add, gemms.batch_invariant
            return few_rows_nt(x_TK, norm, eps, weight.data, weight.scale, *how)
        normed_TK = x_TK if norm is None else rms_norm(x_TK, norm, eps)[0]
        if gemms.batch_invariant:
            y_TN = gemms.nt(Rows(normed_TK, None), weight)
            return y_TN if add is None else add + y_TN
        return F.linear(normed_TK, weight) if add is None else torch.addmm(add, normed_TK, weight.mT)

    (sizes,) = a.x.sizes
    q_kv_TY = product(x_TD, w.input_norm, c.rms_norm_eps, a.x.weights[0])
    q_TX, kv_TW = q_kv_TY.split([sizes[0], c.kv_lora_rank + c.qk_rope_head_dim], dim=-1)
    if a.q_up is not None:
        q_TX = product(q_TX, a.q_norm, NORM_EPS, a.q_up)
    text = step.slots, cache, step.pages, step.lengths
    how = a.w_v, attention.softmax_scale, gemms.batch_invariant
    o_TV = latent_attention(q_TX, kv_TW, a.w_k, a.kv_norm, NORM_EPS, *cos_sin, *text, *how)
    return product(o_TV, None, 0.0, a.o, x_TD)


def has_small_batch_feed_forward(feed_forward: FeedForward, w: MLPWeights | MoEWeights) -> bool:
    """Whether all weights of a SwiGLU layer or a mixture are in FP8, and those of a mixture joined and on one GPU.

    In batch-invariant mode a SwiGLU layer's are not enough, and those of a gate have to be in BF16.
    """
    batch_invariant = feed_forward.gemms.batch_invariant
    if isinstance(w, MLPWeights):
        return not batch_invariant and all(isinstance(weight, ScaledTensor) for weight in (*w.x.weights, w.down))
    if batch_invariant and w.gate.dtype != torch.bfloat16:
        return False
    return feed_forward.expert_parallel is None and all(
        len(part.x.weights) == 1 and isinstance(part.x.weights[0], ScaledTensor) and isinstance(part.down, ScaledTensor)
        for part in (w, w.shared)
    )


def add_feed_forward(feed_forward: FeedForward, x_TD: Tensor, layer: int, w: BlockWeights, slots: Tensor) -> Tensor:
    """Return rows plus what a block's SwiGLU layer or mixture computes of them: [T, D]. x is overwritten."""
    if isinstance(w.mlp, MLPWeights):
        return _add_mlp(feed_forward, x_TD, w.post_norm, w.mlp)
    c, mlp = feed_forward.config, w.mlp
    operands = x_TD, w.post_norm, c.rms_norm_eps, mlp.gate, mlp.bias, *feed_forward.routing
    weights = *fp8_tensors(mlp), *fp8_tensors(mlp.shared)
    how = feed_forward.gemms.power_of_2, feed_forward.gemms.batch_invariant
    experts_TK = few_rows_mixture(*operands, *weights, *how)
    if feed_forward.expert_load is not None:
        feed_forward.expert_load.count(layer, experts_TK, slots)
    return x_TD


def _add_mlp(feed_forward: FeedForward, x_TD: Tensor, norm: Tensor, w: MLPWeights) -> Tensor:
    eps, power_of_2, parts = feed_forward.config.rms_norm_eps, feed_forward.gemms.power_of_2, []
    for weight, sizes in zip(w.x.weights, w.x.sizes, strict=True):
        assert isinstance(weight, ScaledTensor)  # `has_small_batch_feed_forward`
        parts += few_rows_nt(x_TD, norm, eps, weight.data, weight.scale, power_of_2).split(sizes, dim=-1)
    assert isinstance(w.down, ScaledTensor)
    h, h_scale = swiglu_quantize(*parts, "e4m3", power_of_2)
    return x_TD.add_(matmul_nt(h, h_scale, TILE, w.down.data, w.down.scale, w.down.block, x_TD.dtype))


def fp8_tensors(w: MLPWeights | MoEWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the joined projections and their scale, and the down-projections and theirs."""
    up, down = w.x.weights[0], w.down
    assert isinstance(up, ScaledTensor)  # `has_small_batch_feed_forward`
    assert isinstance(down, ScaledTensor)
    return up.data, up.scale, down.data, down.scale


def why_kernels_lack(
    weights: ServedWeights, attention: Attention, feed_forward: FeedForward, drafts: bool
) -> str | None:
    """Return why small-batch decode steps lack some of Hopper's kernels; None: they lack none, or it is no Hopper.

    Args:
        weights, attention, feed_forward: the parts of a forward pass.
        drafts: whether the multi-token prediction layer takes part.

    Returns:
        each reason once, with the first layer that it concerns.
    """
    if request.why_not_on(weights.device) is not None:
        return None
    if (why := why_no_small_batch(attention)) is not None:
        return why
    blocks, first = list(weights.blocks), dict[str, int]()
    if drafts and weights.mtp is not None:
        blocks.append(weights.mtp.block)
    for layer, block in enumerate(blocks):
        lacking = (
            *_attention_lacks(weights, attention, attention.cache.layers[layer], block),
            *_feed_forward_lacks(weights, feed_forward, block),
        )
        for why in lacking:
            first.setdefault(why, layer)
    return "; ".join(f"layer {layer}: {why}" for why, layer in first.items()) or None


def _attention_lacks(weights: ServedWeights, attention: Attention, cache: Tensor, w: BlockWeights) -> Iterator[str]:
    """Ask each kernel about a call like that of `add_attention` with the most rows, which need the most memory."""
    a, c, row_invariant = w.attention, weights.config, attention.gemms.batch_invariant
    n = max_rows(row_invariant)
    if not has_small_batch_products(a):
        yield "the projections of attention's input are not joined, or only some projections are in FP8"
        return
    (sizes,), width = a.x.sizes, c.kv_lora_rank + c.qk_rope_head_dim
    x = w.input_norm.new_empty(n, c.hidden_size, dtype=weights.dtype)
    q, kv = x.new_empty(n, sizes[0] + width).split([sizes[0], width], dim=-1)
    products: list[tuple[Tensor, Tensor | None, Weight, Tensor | None]] = [(x, w.input_norm, a.x.weights[0], None)]
    if a.q_up is not None:
        products.append((q, a.q_norm, a.q_up, None))
        q = x.new_empty(n, len(a.w_k) * c.qk_head_dim)
    products.append((x.new_empty(n, len(a.w_v) * c.v_head_dim), None, a.o, x))
    for rows, norm, weight, add in products:
        if not isinstance(weight, ScaledTensor):
            yield "the projections of attention are not in FP8"
        elif (why := launcher.why_unsupported(rows, norm, weight.data, weight.scale, add, row_invariant)) is not None:
            yield f"projections of attention: {why}"
    cos, sin = x.new_empty(2, n, c.qk_rope_head_dim // 2, dtype=torch.float32)
    slots = x.new_empty(n, dtype=torch.int64)
    why = attention_kernels.why_no_queries(q, kv, a.w_k, a.kv_norm, cos, sin, slots, cache)
    if row_invariant:
        why = why or attention_kernels.why_no_row_invariant_queries(a.w_k, a.kv_norm)
    if why is not None:
        yield f"queries and latents: {why}"
    pages = slots.new_empty(n, 1, dtype=torch.int32)
    queries = x.new_empty(n, len(a.w_k), width)
    if (why := attention_kernels.why_no_values(queries, cache, pages, a.w_v, row_invariant)) is not None:
        yield f"attention to cached positions: {why}"


def _feed_forward_lacks(weights: ServedWeights, feed_forward: FeedForward, w: BlockWeights) -> Iterator[str]:
    c, mlp, row_invariant = weights.config, w.mlp, feed_forward.gemms.batch_invariant
    if row_invariant and isinstance(mlp, MLPWeights):
        return  # whose steps take the general pass
    if not has_small_batch_feed_forward(feed_forward, mlp):
        reason = "the projections of the SwiGLU layer or of the experts are not in FP8, not joined, or on several ranks"
        yield f"{reason}, or the gate is not in BF16" if row_invariant else reason
        return
    x = w.post_norm.new_empty(max_rows(row_invariant), c.hidden_size, dtype=weights.dtype)
    if isinstance(mlp, MLPWeights):
        for weight in mlp.x.weights:
            assert isinstance(weight, ScaledTensor)  # `has_small_batch_feed_forward`
            if (why := launcher.why_unsupported(x, w.post_norm, weight.data, weight.scale, None, False)) is not None:
                yield f"the SwiGLU layer: {why}"
        return
    operands = (
        x,
        w.post_norm,
        c.rms_norm_eps,
        mlp.gate,
        mlp.bias,
        feed_forward.routing,
        fp8_tensors(mlp),
        fp8_tensors(mlp.shared),
    )
    if (why := mixture.why_unsupported(*operands, weights.power_of_2, row_invariant)) is not None:
        yield f"the mixture of experts: {why}"
