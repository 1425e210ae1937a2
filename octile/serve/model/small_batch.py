"""The forward pass of a decode step of few rows, with operators that fuse several of the other pass.

A step of few rows reads weights and does little else, and the other pass (`octile.serve.model.forward`) has some twenty
launches a layer, most of which take longer to start than to run. Here attention has five, and each loads its
weights before the previous one has ended:

    few_rows_nt        the norm of the block's input, and the projections to queries and latent
    latent_attention   W_UK, rotary embeddings, the norm of latents, and the cache's rows; attention by splits; their
                       merge, and W_UV: three launches
    few_rows_nt        the output's projection, and the residual
    few_rows_mixture   the norm, the gate, the experts and the shared experts, and the residual: three launches

Of a dense SwiGLU layer, few_rows_nt computes the norm and the projections to gate and up. With BF16 weights attention
is the same, with GEMMs in the place of few_rows_nt; dense layers and mixtures take the other pass.

The formulas are those of the other pass, with sums in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import TILE
from octile.kernels.cuda.few_rows.launcher import MAX_ROWS
from octile.ops.few_rows import few_rows_nt, latent_attention
from octile.ops.few_rows_mixture import few_rows_mixture
from octile.ops.matmul import matmul_nt
from octile.ops.norm import rms_norm
from octile.ops.swiglu import swiglu_quantize
from octile.routing import choice_of
from octile.scaled import ScaledTensor
from octile.serve.model.attention import Attention
from octile.serve.model.feed_forward import FeedForward
from octile.serve.runner.step import Step
from octile.serve.weights.block_weights import NORM_EPS, AttentionWeights, BlockWeights, MLPWeights, MoEWeights, Weight


def is_step_of_few_rows(attention: Attention, step: Step) -> bool:
    """Whether a step has few rows, which all decode in BF16 on a GPU, with all heads and to all positions."""
    return (
        0 < len(step.tokens) <= MAX_ROWS
        and step.only_decodes
        and why_no_step_of_few_rows(attention) is None
        and step.tokens.is_cuda
    )


def why_no_step_of_few_rows(attention: Attention) -> str | None:
    """Return why all steps of a model take the other pass on a GPU; None: decode steps of few rows do not."""
    if attention.gemms.batch_invariant:
        return "in batch-invariant mode steps of all sizes sum in the same order"
    if attention.index is not None:
        return "rows attend to chosen positions"
    if attention.tp.size > 1:
        return f"{attention.tp.size} ranks share the rows of a step"
    if attention.gemms.dtype != torch.bfloat16:
        return f"activations are {attention.gemms.dtype}, not {torch.bfloat16}"
    return None


def has_products_of_few_rows(w: AttentionWeights) -> bool:
    """Whether all projections are in FP8 or all in high precision, and those of the block's input are joined."""
    others = [w.o] if w.q_up is None else [w.o, w.q_up]
    return len(w.x.weights) == 1 and len({isinstance(of, ScaledTensor) for of in (w.x.weights[0], *others)}) == 1


def add_attention(
    attention: Attention, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]
) -> Tensor:
    """Write the rows' latents of a block, and return the block's input plus its attention: [T, D]."""
    of, cache = w.attention, attention.cache.layers[layer]
    c, power_of_2 = attention.config, attention.gemms.power_of_2

    def product(x_TK: Tensor, norm: Tensor | None, eps: float, weight: Weight, add: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            normed_TK = x_TK if norm is None else rms_norm(x_TK, norm, eps)[0]
            return F.linear(normed_TK, weight) if add is None else torch.addmm(add, normed_TK, weight.mT)
        return few_rows_nt(x_TK, norm, eps, weight.data, weight.scale, power_of_2, add)

    (sizes,) = of.x.sizes
    q_kv_TY = product(x_TD, w.input_norm, c.rms_norm_eps, of.x.weights[0])
    q_TX, kv_TW = q_kv_TY.split([sizes[0], c.kv_lora_rank + c.qk_rope_head_dim], dim=-1)
    if of.q_up is not None:
        q_TX = product(q_TX, of.q_norm, NORM_EPS, of.q_up)
    text = step.slots, cache, step.pages, step.lengths
    o_TV = latent_attention(q_TX, kv_TW, of.w_k, of.kv_norm, NORM_EPS, *cos_sin, *text, of.w_v, attention.softmax_scale)
    return product(o_TV, None, 0.0, of.o, x_TD)


def has_feed_forward_of_few_rows(feed_forward: FeedForward, w: MLPWeights | MoEWeights) -> bool:
    """Whether all weights of a SwiGLU layer or a mixture are in FP8, and those of a mixture joined and on one GPU."""
    if isinstance(w, MLPWeights):
        return all(isinstance(of, ScaledTensor) for of in (*w.x.weights, w.down))
    return feed_forward.spread is None and all(
        len(part.x.weights) == 1 and isinstance(part.x.weights[0], ScaledTensor) and isinstance(part.down, ScaledTensor)
        for part in (w, w.shared)
    )


def add_feed_forward(feed_forward: FeedForward, x_TD: Tensor, layer: int, w: BlockWeights, slots: Tensor) -> Tensor:
    """Return rows plus what a block's SwiGLU layer or mixture computes of them: [T, D]. x is overwritten."""
    if isinstance(w.mlp, MLPWeights):
        return _add_mlp(feed_forward, x_TD, w.post_norm, w.mlp)
    c, mlp = feed_forward.config, w.mlp
    choice = choice_of(c.topk_method, c.num_experts_per_tok, c.n_group, c.topk_group)
    weighting = c.scoring_func, c.norm_topk_prob, c.routed_scaling_factor
    of_gate = x_TD, w.post_norm, c.rms_norm_eps, mlp.gate, mlp.bias, *choice, *weighting
    weights = *fp8_tensors(mlp), *fp8_tensors(mlp.shared)
    experts_TK = few_rows_mixture(*of_gate, *weights, feed_forward.gemms.power_of_2)
    if feed_forward.expert_load is not None:
        feed_forward.expert_load.count(layer, experts_TK, slots)
    return x_TD


def _add_mlp(feed_forward: FeedForward, x_TD: Tensor, norm: Tensor, w: MLPWeights) -> Tensor:
    eps, power_of_2, parts = feed_forward.config.rms_norm_eps, feed_forward.gemms.power_of_2, []
    for weight, sizes in zip(w.x.weights, w.x.sizes, strict=True):
        assert isinstance(weight, ScaledTensor)  # `has_feed_forward_of_few_rows`
        parts += few_rows_nt(x_TD, norm, eps, weight.data, weight.scale, power_of_2).split(sizes, dim=-1)
    assert isinstance(w.down, ScaledTensor)
    h, h_scale = swiglu_quantize(*parts, "e4m3", power_of_2)
    return x_TD.add_(matmul_nt(h, h_scale, TILE, w.down.data, w.down.scale, w.down.block, x_TD.dtype))


def fp8_tensors(w: MLPWeights | MoEWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the joined projections and their scale, and the down-projections and theirs."""
    up, down = w.x.weights[0], w.down
    assert isinstance(up, ScaledTensor)  # `has_feed_forward_of_few_rows`
    assert isinstance(down, ScaledTensor)
    return up.data, up.scale, down.data, down.scale
