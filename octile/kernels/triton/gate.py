# mypy: allow-untyped-defs
"""The expert gate after its GEMM and before those of its backward pass, as `octile.ops.gate` specifies."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import BFLOAT16_TERMS, EXACT, GATE_ELEMENTS
from octile.kernels.triton.top_experts import LEAST, choice_keys, expert_of
from octile.routing import EPS

WEIGHT_EPS = tl.constexpr(EPS)


def launch(
    products: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int, scoring_func: str,
    norm_topk_prob: bool, routed_scaling_factor: float, n_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum the parts of products [T, P·E], choose K experts → weights [T, K], experts int64 [T, K], logits [T, E]."""
    (t, columns), device = products.shape, products.device
    weights = torch.empty(t, n_chosen, dtype=torch.float32, device=device)
    experts = torch.empty(t, n_chosen, dtype=torch.int64, device=device)
    logits = products if columns == n_experts else torch.empty(t, n_experts, dtype=torch.float32, device=device)
    groups, size = triton.next_power_of_2(n_group), triton.next_power_of_2(n_experts // n_group)
    if t:
        rows = max(GATE_ELEMENTS // (groups * size), 1)
        with torch.cuda.device_of(products):
            choose_experts[(triton.cdiv(t, rows),)](
                products, products if bias is None else bias, logits, weights, experts, t, *products.stride(),
                0 if bias is None else bias.stride(0), routed_scaling_factor, K=n_chosen, E=n_experts,
                PARTS=columns // n_experts, BIASED=bias is not None, SOFTMAX=scoring_func == "softmax",
                NORMALIZE=norm_topk_prob, N_GROUP=n_group, TOPK_GROUP=topk_group, BEST=best, ROWS=rows, GROUPS=groups,
                SIZE=size, CHOSEN=triton.next_power_of_2(n_chosen), **EXACT,
            )  # fmt: skip
    return weights, experts, logits


def launch_backward(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, scoring_func: str,
    norm_topk_prob: bool, routed_scaling_factor: float, order: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of logits [T, E], or its BF16 terms in the given order, side by side: [T, len(order)·E]."""
    (t, n_experts), k = logits.shape, experts.shape[1]
    dtype, terms = (torch.float32, 1) if order is None else (torch.bfloat16, len(order))
    out = torch.empty(t, terms * n_experts, dtype=dtype, device=logits.device)
    if t:
        columns = triton.next_power_of_2(n_experts)
        rows = max(GATE_ELEMENTS // columns, 1)
        of_weights, of_logits = (logits if d is None else d for d in (dweights, dlogits))  # not read if None
        with torch.cuda.device_of(logits):
            gate_backward[(triton.cdiv(t, rows),)](
                of_weights, of_logits, logits, experts, out, t, *of_weights.stride(), *of_logits.stride(),
                *logits.stride(), *experts.stride(), routed_scaling_factor, K=k, E=n_experts, COLUMNS=columns,
                WEIGHTED=dweights is not None, ADD=dlogits is not None, SOFTMAX=scoring_func == "softmax",
                NORMALIZE=norm_topk_prob, ROWS=rows, CHOSEN=triton.next_power_of_2(k), **_order(order), **EXACT,
            )  # fmt: skip
    return out


def launch_terms(t: Tensor, order: Sequence[int]) -> Tensor:
    """The BF16 terms of t [M, N], any strides, in the given order, one below the other: [len(order)·M, N]."""
    m, n = t.shape
    out = torch.empty(len(order) * m, n, dtype=torch.bfloat16, device=t.device)
    if t.numel():
        with torch.cuda.device_of(t):
            bfloat16_terms[(triton.cdiv(m * n, BFLOAT16_TERMS["ELEMENTS"]),)](
                t.contiguous(), out, m * n, **_order(order), **BFLOAT16_TERMS, **EXACT
            )
    return out


def _order(order: Sequence[int] | None) -> dict[str, Any]:
    """The order of terms as a number in base 4, the first term in its last digit, since constants are no lists."""
    return {"TERMS": len(order or ()), "ORDER": sum(term << 2 * i for i, term in enumerate(order or ()))}


@triton.jit(do_not_specialize=["T"])
def choose_experts(
    products, bias, logits, weights, experts, T, row_stride, column_stride, bias_stride, factor,
    K: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS tokens. GROUPS, SIZE and CHOSEN are powers of two at or above N_GROUP, GROUP and K."""
    GROUP: tl.constexpr = E // N_GROUP
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)[:, None]
    i = tl.arange(0, SIZE)[None, :]
    expert = (g * GROUP + i)[None, :, :]
    exists = ((g < N_GROUP) & (i < GROUP))[None, :, :]
    row = t.to(tl.int64)[:, None, None]
    inside = exists & (t < T)[:, None, None]
    logit = _sum_parts(products + row * row_stride, expert, column_stride, inside, E, PARTS)
    if PARTS > 1:
        tl.store(logits + row * E + expert, logit, mask=inside)

    shift = tl.zeros([ROWS], tl.float32)
    total = shift
    if SOFTMAX:
        shift = tl.max(tl.max(tl.where(exists, logit, float("-inf")), axis=2), axis=1)
        exponential = tl.where(exists, tl.exp(logit - shift[:, None, None]), 0.0)
        total = tl.sum(tl.sum(exponential, axis=2), axis=1)
        score = tl.div_rn(exponential, total[:, None, None])
    else:
        score = _sigmoid(logit)
    if BIASED:
        score += tl.load(bias + expert * bias_stride, mask=exists, other=0.0)

    key = choice_keys(score, expert, exists, N_GROUP, TOPK_GROUP, BEST, GROUPS)
    key = tl.reshape(key, [ROWS, GROUPS * SIZE])
    k = tl.arange(0, CHOSEN)[None, :]
    chosen = tl.zeros([ROWS, CHOSEN], tl.int64)
    for step in tl.static_range(K):
        highest = tl.max(key, axis=1)
        chosen = tl.where(k == step, expert_of(highest)[:, None], chosen)
        key = tl.where(key == highest[:, None], LEAST, key)

    row = t.to(tl.int64)[:, None]
    inside = (k < K) & (t < T)[:, None]
    logit = _sum_parts(products + row * row_stride, chosen, column_stride, inside, E, PARTS)
    weight = tl.div_rn(tl.exp(logit - shift[:, None]), total[:, None]) if SOFTMAX else _sigmoid(logit)
    if NORMALIZE:
        weight = tl.div_rn(weight, (tl.sum(tl.where(k < K, weight, 0.0), axis=1) + WEIGHT_EPS)[:, None])
    tl.store(experts + row * K + k, chosen, mask=inside)
    tl.store(weights + row * K + k, weight * factor, mask=inside)


@triton.jit(do_not_specialize=["T"])
def gate_backward(
    dweights, dlogits, logits, experts, out, T, dweight_row, dweight_col, dlogit_row, dlogit_col, logit_row, logit_col,
    expert_row, expert_col, factor,
    K: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, CHOSEN: tl.constexpr,
    TERMS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS tokens."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = t.to(tl.int64)[:, None]
    e = tl.arange(0, COLUMNS)[None, :]
    inside = (e < E) & (t < T)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if WEIGHTED:
        k = tl.arange(0, CHOSEN)[None, :]
        is_chosen = (k < K) & (t < T)[:, None]
        chosen = tl.load(experts + row * expert_row + k * expert_col, mask=is_chosen, other=0)
        logit = tl.load(logits + row * logit_row + chosen * logit_col, mask=is_chosen, other=0.0)
        d = tl.load(dweights + row * dweight_row + k * dweight_col, mask=is_chosen, other=0.0) * factor
        affinity = total
        if SOFTMAX:
            every = tl.load(logits + row * logit_row + e * logit_col, mask=inside, other=float("-inf"))
            shift = tl.max(every, axis=1)[:, None]
            exponential = tl.where(e < E, tl.exp(every - shift), 0.0)
            exponentials = tl.sum(exponential, axis=1)[:, None]
            affinity = tl.div_rn(exponential, exponentials)
            of_chosen = tl.where(k < K, tl.div_rn(tl.exp(logit - shift), exponentials), 0.0)
        else:
            of_chosen = tl.where(k < K, _sigmoid(logit), 0.0)
        if NORMALIZE:
            weights = (tl.sum(of_chosen, axis=1) + WEIGHT_EPS)[:, None]
            of_total = tl.div_rn(tl.div_rn(of_chosen, weights), weights)
            d = tl.div_rn(d, weights) - tl.sum(d * of_total, axis=1)[:, None]
        if not SOFTMAX:
            d = d * (1.0 - of_chosen) * of_chosen
        for step in tl.static_range(K):
            is_step = k == step
            expert = tl.sum(tl.where(is_step, chosen, 0), axis=1)[:, None]
            total = tl.where(e == expert, tl.sum(tl.where(is_step, d, 0.0), axis=1)[:, None], total)
        if SOFTMAX:
            product = tl.sum(tl.where(e < E, total * affinity, 0.0), axis=1)[:, None]
            total = (total - product) * affinity
    if ADD:
        total += tl.load(dlogits + row * dlogit_row + e * dlogit_col, mask=inside, other=0.0)
    if TERMS == 0:
        tl.store(out + row * E + e, total, mask=inside)
    else:
        _store_terms(out + row * (TERMS * E) + e, E, total, inside, TERMS, ORDER)


@triton.jit(do_not_specialize=["elements"])
def bfloat16_terms(t, out, elements, TERMS: tl.constexpr, ORDER: tl.constexpr, ELEMENTS: tl.constexpr):
    """A program splits ELEMENTS elements."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < elements
    value = tl.load(t + index, mask=inside, other=0.0).to(tl.float32)
    _store_terms(out + index, elements.to(tl.int64), value, inside, TERMS, ORDER)


@triton.jit
def _store_terms(at, step, value, inside, TERMS: tl.constexpr, ORDER: tl.constexpr):
    """Store the BF16 terms of a value, `step` elements apart."""
    first = value.to(tl.bfloat16)
    rest = value - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    for i in tl.static_range(TERMS):
        term = third
        if (ORDER >> (2 * i)) % 4 == 0:
            term = first
        elif (ORDER >> (2 * i)) % 4 == 1:
            term = second
        tl.store(at + i * step, term, mask=inside)


@triton.jit
def _sum_parts(products, column, column_stride, inside, E: tl.constexpr, PARTS: tl.constexpr):
    """Add the parts of logits, in their order."""
    logit = tl.load(products + column * column_stride, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(products + (part * E + column) * column_stride, mask=inside, other=0.0)
    return logit


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))
