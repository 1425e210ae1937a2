"""Why a model's decode steps of few rows do not have all of Hopper's kernels that `octile.serve.model.small_batch`
calls.

An operator computes a call without a kernel by the operators of many rows, which takes longer. Its result does not show
it, so a server says it when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octile.kernels.cuda.few_rows import attention, launcher, mixture
from octile.kernels.cuda.few_rows.launcher import MAX_ROWS
from octile.kernels.cuda.gemm import request
from octile.routing import choice_of
from octile.scaled import ScaledTensor
from octile.serve.model.forward import Forward
from octile.serve.model.small_batch import (
    fp8_tensors,
    has_feed_forward_of_few_rows,
    has_products_of_few_rows,
    why_no_step_of_few_rows,
)
from octile.serve.weights.block_weights import BlockWeights, MLPWeights, Weight


def why_not_few_rows(forward: Forward, drafts: bool) -> str | None:
    """Return why decode steps of up to 8 rows lack some of Hopper's kernels; None: they lack none, or it is no Hopper.

    Args:
        forward: the pass of a model.
        drafts: whether the multi-token prediction layer takes part.

    Returns:
        each reason once, with the first layer that it concerns.
    """
    weights = forward.weights
    if request.why_not_on(weights.device) is not None:
        return None
    if (why := why_no_step_of_few_rows(forward.attention)) is not None:
        return why
    blocks, first = list(weights.blocks), dict[str, int]()
    if drafts and weights.mtp is not None:
        blocks.append(weights.mtp.block)
    for layer, block in enumerate(blocks):
        for why in (*_of_attention(forward, layer, block), *_of_feed_forward(forward, block)):
            first.setdefault(why, layer)
    return "; ".join(f"layer {layer}: {why}" for why, layer in first.items()) or None


def _of_attention(forward: Forward, layer: int, w: BlockWeights) -> Iterator[str]:
    """Ask each kernel about a call like that of `few_rows.add_attention` with 8 rows, which need the most memory."""
    of, c, cache = w.attention, forward.weights.config, forward.attention.cache.layers[layer]
    if not has_products_of_few_rows(of):
        yield "the projections of attention's input are not joined, or only some projections are in FP8"
        return
    (sizes,), width = of.x.sizes, c.kv_lora_rank + c.qk_rope_head_dim
    x = w.input_norm.new_empty(MAX_ROWS, c.hidden_size, dtype=forward.weights.dtype)
    q, kv = x.new_empty(MAX_ROWS, sizes[0] + width).split([sizes[0], width], dim=-1)
    products: list[tuple[Tensor, Tensor | None, Weight, Tensor | None]] = [(x, w.input_norm, of.x.weights[0], None)]
    if of.q_up is not None:
        products.append((q, of.q_norm, of.q_up, None))
        q = x.new_empty(MAX_ROWS, len(of.w_k) * c.qk_head_dim)
    products.append((x.new_empty(MAX_ROWS, len(of.w_v) * c.v_head_dim), None, of.o, x))
    for rows, norm, weight, add in products:
        if not isinstance(weight, ScaledTensor):
            yield "the projections of attention are not in FP8"
        elif (why := launcher.why_unsupported(rows, norm, weight.data, weight.scale, add)) is not None:
            yield f"projections of attention: {why}"
    cos, sin = x.new_empty(2, MAX_ROWS, c.qk_rope_head_dim // 2, dtype=torch.float32)
    slots = x.new_empty(MAX_ROWS, dtype=torch.int64)
    if (why := attention.why_no_queries(q, kv, of.w_k, of.kv_norm, cos, sin, slots, cache)) is not None:
        yield f"queries and latents: {why}"
    pages = slots.new_empty(MAX_ROWS, 1, dtype=torch.int32)
    queries = x.new_empty(MAX_ROWS, len(of.w_k), width)
    if (why := attention.why_no_values(queries, cache, pages, of.w_v)) is not None:
        yield f"attention to cached positions: {why}"


def _of_feed_forward(forward: Forward, w: BlockWeights) -> Iterator[str]:
    c, mlp = forward.weights.config, w.mlp
    if not has_feed_forward_of_few_rows(forward.feed_forward, mlp):
        yield "the projections of the SwiGLU layer or of the experts are not in FP8, not joined, or on several ranks"
        return
    x = w.post_norm.new_empty(MAX_ROWS, c.hidden_size, dtype=forward.weights.dtype)
    if isinstance(mlp, MLPWeights):
        for weight in mlp.x.weights:
            assert isinstance(weight, ScaledTensor)  # `has_feed_forward_of_few_rows`
            if (why := launcher.why_unsupported(x, w.post_norm, weight.data, weight.scale, None)) is not None:
                yield f"the SwiGLU layer: {why}"
        return
    choice = choice_of(c.topk_method, c.num_experts_per_tok, c.n_group, c.topk_group)
    choose = *choice, c.scoring_func, c.norm_topk_prob, c.routed_scaling_factor
    operands = x, w.post_norm, c.rms_norm_eps, mlp.gate, mlp.bias, choose, fp8_tensors(mlp), fp8_tensors(mlp.shared)
    if (why := mixture.why_unsupported(*operands, forward.weights.power_of_2)) is not None:
        yield f"the mixture of experts: {why}"
