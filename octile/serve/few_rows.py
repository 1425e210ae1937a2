"""The forward pass of a decode step of few rows: operators that take several of the other pass's together.

A step of few rows reads weights and does little else, and the other pass (`octile.serve.forward`) has some twenty
launches a layer, most of which take longer to start than to run. Here attention has five, whose weights are loaded
before the previous one has ended:

    few_rows_nt        the norm of the block's input, and the projections to queries and latent
    latent_attention   W_UK, rotary embeddings, the norm of latents, and the cache's rows; attention by splits; their
                       merge, and W_UV: three launches
    few_rows_nt        the output's projection, and the residual

The formulas are those of the other pass, with sums in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octile.ops.few_rows import few_rows_nt, latent_attention
from octile.scaled import ScaledTensor
from octile.serve.weights import NORM_EPS, AttentionWeights, BlockWeights

if TYPE_CHECKING:
    from octile.serve.forward import Forward, Step

MAX_ROWS = 8  # that Hopper's kernels take


def is_step_of_few_rows(forward: Forward, step: Step) -> bool:
    """Whether a step has few rows, which all decode in BF16 on a GPU, with all heads and to all positions."""
    rows = len(step.tokens)
    return (
        0 < rows <= MAX_ROWS
        and rows == len(step.lengths)
        and not forward.batch_invariant
        and forward.index is None
        and forward.tp.size == 1
        and forward.weights.dtype == torch.bfloat16
        and forward.weights.device.type == "cuda"
    )


def has_products_of_few_rows(w: AttentionWeights) -> bool:
    """Whether all projections are in FP8, and those of the block's input are joined."""
    return len(w.x.weights) == 1 and all(
        isinstance(of, ScaledTensor) for of in (w.x.weights[0], w.o, *([] if w.q_up is None else [w.q_up]))
    )


def add_attention(
    forward: Forward, x_TD: Tensor, layer: int, w: BlockWeights, step: Step, cos_sin: tuple[Tensor, Tensor]
) -> Tensor:
    """Write the rows' latents of a block, and return the block's input plus its attention: [T, D]."""
    of, cache = w.attention, forward.cache.layers[layer]
    c, power_of_2 = forward.weights.config, forward.weights.power_of_2

    def product(x_TK: Tensor, norm: Tensor | None, eps: float, weight: object, add: Tensor | None = None) -> Tensor:
        assert isinstance(weight, ScaledTensor)  # `has_products_of_few_rows`
        return few_rows_nt(x_TK, norm, eps, weight.data, weight.scale, power_of_2, add)

    (sizes,) = of.x.sizes
    both = product(x_TD, w.input_norm, c.rms_norm_eps, of.x.weights[0])
    q_TX, kv_TW = both.split([sizes[0], c.kv_lora_rank + c.qk_rope_head_dim], dim=-1)
    if of.q_up is not None:
        q_TX = product(q_TX, of.q_norm, NORM_EPS, of.q_up)
    text = step.slots, cache, step.pages, step.lengths
    o_TV = latent_attention(q_TX, kv_TW, of.w_k, of.kv_norm, NORM_EPS, *cos_sin, *text, of.w_v, forward.softmax_scale)
    return product(o_TV, None, 0.0, of.o, x_TD)
