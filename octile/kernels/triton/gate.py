# mypy: allow-untyped-defs
"""The expert gate and its gradients, as `octile.ops.gate` specifies.

The GEMMs of few experts are part of these kernels, so that x is read once in forward, and in backward x is read and dx
written once, at the same time. GEMMs of more experts are torch's, since they take longer than reading their operands,
and so are those of few tokens, whose sums over D it divides among the SMs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.terms import DY_TERMS, TERMS, WEIGHT_TERMS
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton import launch_config, partial_sums, row_invariant
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.launch_config import (
    BFLOAT16_TERMS,
    EXACT,
    GATE_BACKWARD_GEMMS,
    GATE_BACKWARD_ROWS,
    GATE_ELEMENTS,
    GATE_WITH_GEMM,
    GATE_WITH_GEMM_TOKENS,
)
from octile.kernels.triton.top_experts import ABSENT, choice_order, order_of, take_highest
from octile.routing import EPS

WEIGHT_EPS = tl.constexpr(EPS)
GEMM_COLUMNS = 16  # experts that kernels with GEMMs multiply; the fewest that a tensor core multiplies


def launch(
    products: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int, scoring_func: str,
    norm_topk_prob: bool, routed_scaling_factor: float, n_experts: int, row_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum the parts of products [T, P·E], choose K experts → weights [T, K], experts int64 [T, K], logits [T, E].

    A program of several tokens sums a token's affinities in another order than one of a single token: if row_invariant,
    all programs have as many tokens for any T, and if not, so few that there are GATE_PROGRAMS programs.
    """
    t, columns = products.shape
    weights, experts, logits = _results(t, n_chosen, n_experts, products.device)
    logits = products if columns == n_experts else logits
    choice = _choice(bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, n_experts)
    if t:
        rows = GATE_ELEMENTS // (choice["GROUPS"] * choice["SIZE"])
        if not row_invariant:
            rows = min(rows, triton.cdiv(t, launch_config.GATE_PROGRAMS))
        rows = triton.next_power_of_2(max(rows, 1))
        with torch.cuda.device_of(products):
            choose_experts[(triton.cdiv(t, rows),)](
                products, products if bias is None else bias, logits, weights, experts, t, *products.stride(),
                0 if bias is None else bias.stride(0), routed_scaling_factor, PARTS=columns // n_experts, ROWS=rows,
                **choice, **EXACT,
            )  # fmt: skip
    return weights, experts, logits


def launch_from_x(
    x: Tensor, weight: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply x [T, D] by the weight [E, D], here or in torch, and choose K experts as `launch` does."""
    terms = weight if weight.dtype == torch.bfloat16 else launch_terms(weight, range(TERMS))
    settings = n_chosen, n_group, *others, len(weight)
    if has_gemms(len(x), len(weight), n_group):
        return launch_with_gemm(x, terms, bias, *settings)
    return launch(torch.mm(x, terms.mT, out_dtype=torch.float32), bias, *settings)


def row_invariant_products(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply BF16 x [T, D] by the P terms of the weight [E, D], each row on its own → [T, P·E] float32.

    A weight in BF16 has one term, and as many numbers in FP32 have two more that are zero: the same bits.
    """
    terms = weight if weight.dtype == torch.bfloat16 else launch_terms(weight, range(TERMS))
    return row_invariant.launch(x[None], terms[None], torch.float32)[0]


def launch_with_gemm(
    x: Tensor, terms: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int,
    scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float, n_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Multiply x [T, D] by the terms [P·E, D] of the weight, P is 1 or 3, and choose K experts as `launch` does."""
    t, d = x.shape
    weights, experts, logits = _results(t, n_chosen, n_experts, x.device)
    choice = _choice(bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, n_experts, GEMM_COLUMNS)
    if t:
        with torch.cuda.device_of(x):
            multiply_and_choose[(triton.cdiv(t, GATE_WITH_GEMM["ROWS"]),)](
                x, terms, x if bias is None else bias, logits, weights, experts, t, d, *x.stride(), *terms.stride(),
                0 if bias is None else bias.stride(0), routed_scaling_factor, PARTS=len(terms) // n_experts,
                **choice, **GATE_WITH_GEMM, **EXACT,
            )  # fmt: skip
    return weights, experts, logits


def has_gemms(t: int, n_experts: int, n_group: int = 1) -> bool:
    """Return whether the kernels with GEMMs are faster than torch's GEMMs and those without."""
    columns = triton.next_power_of_2(n_group) * triton.next_power_of_2(n_experts // n_group)
    return columns <= GEMM_COLUMNS and t >= GATE_WITH_GEMM_TOKENS


def _results(t: int, n_chosen: int, n_experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(t, n_chosen, dtype=torch.float32, device=device),
        torch.empty(t, n_chosen, dtype=torch.int64, device=device),
        torch.empty(t, n_experts, dtype=torch.float32, device=device),
    )


def _choice(
    bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int, scoring_func: str,
    norm_topk_prob: bool, n_experts: int, min_columns: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The constants by which `_store_choice` chooses."""
    groups = triton.next_power_of_2(n_group)
    return {
        "K": n_chosen, "E": n_experts, "BIASED": bias is not None, "SOFTMAX": scoring_func == "softmax",
        "NORMALIZE": norm_topk_prob, "N_GROUP": n_group, "TOPK_GROUP": topk_group, "BEST": best, "GROUPS": groups,
        "SIZE": max(triton.next_power_of_2(n_experts // n_group), min_columns // groups),
        "CHOSEN": triton.next_power_of_2(n_chosen),
    }  # fmt: skip


def launch_backward(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, scoring_func: str,
    norm_topk_prob: bool, routed_scaling_factor: float, order: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of logits [T, E], or its BF16 terms in the given order, side by side: [T, len(order)·E]."""
    t, n_experts = logits.shape
    dtype, terms = (torch.float32, 1) if order is None else (torch.bfloat16, len(order))
    out = torch.empty(t, terms * n_experts, dtype=dtype, device=logits.device)
    if t:
        columns = triton.next_power_of_2(n_experts)
        rows = min(max(GATE_ELEMENTS // columns, 1), GATE_BACKWARD_ROWS)
        tensors, strides, constants = _gradient(dweights, dlogits, logits, experts, scoring_func, norm_topk_prob)
        with torch.cuda.device_of(logits):
            gate_backward[(triton.cdiv(t, rows),)](
                *tensors, out, t, *strides, routed_scaling_factor, COLUMNS=columns, ROWS=rows,
                num_warps=2 if columns <= 64 else 4, **constants, **_order(order), **EXACT,
            )  # fmt: skip
    return out


def launch_gradients(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, x: Tensor, weight: Tensor,
    scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of x [T, D] and of the weight [E, D], with GEMMs here or in torch.

    Returns:
        dx [T, D], dweight [E, D] float32.
    """
    arguments = dweights, dlogits, logits, experts
    settings = scoring_func, norm_topk_prob, routed_scaling_factor
    if has_gemms(len(x), len(weight)):
        return launch_backward_with_gemms(*arguments, x, weight, *settings)
    omitted, n_experts = TERMS if weight.dtype == torch.bfloat16 else 0, len(weight)
    dys = launch_backward(*arguments, *settings, DY_TERMS[omitted:])
    dx = dys @ launch_terms(weight, WEIGHT_TERMS[omitted:])
    terms_of_dy = dys[:, -TERMS * n_experts :].mT
    products_PED = torch.mm(terms_of_dy, x, out_dtype=torch.float32).unflatten(0, (TERMS, n_experts))
    return dx, partial_sums.launch(products_PED)


def launch_backward_with_gemms(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, x: Tensor, weight: Tensor,
    scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x [T, D] and of the weight [E, D], any strides: dx [T, D], dweight [E, D] float32."""
    (t, d), n_experts = x.shape, logits.shape[1]
    dys = launch_backward(
        dweights, dlogits, logits, experts, scoring_func, norm_topk_prob, routed_scaling_factor, range(TERMS)
    )
    dx = torch.empty(t, d, dtype=x.dtype, device=x.device)
    gpu, tile = device_properties(x.device), dict(GATE_BACKWARD_GEMMS)
    if gpu.shared_bytes < SHARED_BYTES:  # of Hopper, whose tensor cores read it; here registers hold operands, too
        tile["COLS"] //= 2
    programs, blocks = triton.cdiv(d, tile["COLS"]), triton.cdiv(t, tile["ROWS"])
    steps = triton.cdiv(blocks, max(2 * gpu.num_sms // max(programs, 1), 1))
    partials = torch.empty(triton.cdiv(blocks, max(steps, 1)), n_experts, d, dtype=torch.float32, device=x.device)
    if t * d:
        with torch.cuda.device_of(x):
            gate_backward_gemms[(programs, len(partials))](
                dys, weight, x, dx, partials, t, d, steps, *weight.stride(), *x.stride(), E=n_experts,
                COLUMNS=max(triton.next_power_of_2(n_experts), GEMM_COLUMNS), SPLIT=weight.dtype != torch.bfloat16,
                **tile, **EXACT,
            )  # fmt: skip
    return dx, partial_sums.launch(partials)


def _gradient(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, scoring_func: str,
    norm_topk_prob: bool,
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """The tensors, strides and constants that `_gradient_of_logits` takes."""
    gradients = (logits if d is None else d for d in (dweights, dlogits))  # not read if None
    tensors = *gradients, logits, experts
    constants = {
        "K": experts.shape[1], "E": logits.shape[1], "WEIGHTED": dweights is not None, "ADD": dlogits is not None,
        "SOFTMAX": scoring_func == "softmax", "NORMALIZE": norm_topk_prob,
        "CHOSEN": triton.next_power_of_2(experts.shape[1]),
    }  # fmt: skip
    return tensors, tuple(stride for t in tensors for stride in t.stride()), constants


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


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    logits, experts = cases.empty(cases.T, 256, dtype=cases.FP32), cases.empty(cases.T, 8, dtype=torch.int64)
    products, bias = cases.empty(cases.T, 3 * 256, dtype=cases.FP32), cases.empty(256, dtype=cases.FP32)
    dweights, few = cases.empty(cases.T, 8, dtype=cases.FP32), logits[:, :16]
    x, weight, master = cases.empty(cases.T, 768), cases.empty(16, 768), cases.empty(16, 768, dtype=cases.FP32)
    medium = cases.empty(cases.T, 2048), cases.empty(3 * 16, 2048), bias[:16]
    small = x, cases.empty(3 * 16, 768), bias[:16]
    sigmoid, softmax = ("sigmoid", True, 2.5), ("softmax", False, 16.0)
    return {
        "gate of V3": lambda: launch(products, bias, 8, 8, 4, 2, *sigmoid, 256),
        "gate of V2": lambda: launch(products, None, 8, 8, 4, 1, *softmax, 256),
        "gate in FP32": lambda: launch(logits, None, 8, 1, 1, 1, "sigmoid", True, 1.0, 256),
        "gate backward": lambda: launch_backward(dweights, logits, logits, experts, *sigmoid, [0, 1, 0, 2]),
        "gate with its GEMM": lambda: launch_with_gemm(*medium, 6, 1, 1, 1, *sigmoid, 16),
        "gate of groups with its GEMM": lambda: launch_with_gemm(*small, 4, 4, 2, 2, *sigmoid, 16),
        "gate backward with its GEMMs": lambda: launch_backward_with_gemms(
            dweights, few, few, experts, x, master, *sigmoid
        ),
        "gate backward with its GEMMs, weight in BF16": lambda: launch_backward_with_gemms(
            None, few, few, experts, x, weight, "softmax", False, 1.0
        ),
        "gate of V2 backward": lambda: launch_backward(dweights, None, logits, experts, *softmax),
        "BF16 terms": lambda: launch_terms(cases.empty(256, cases.K, dtype=cases.FP32), [1, 0, 0]),
    }


@triton.jit(do_not_specialize=["T"])
def choose_experts(
    products, bias, logits, weights, experts, T, row_stride, column_stride, bias_stride, factor,
    K: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS tokens. GROUPS, SIZE and CHOSEN are powers of two at or above N_GROUP, GROUP and K."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, exists = _experts(E, N_GROUP, GROUPS, SIZE)
    row = t.to(tl.int64)[:, None]
    inside = exists[None, :] & (t < T)[:, None]
    at = products + row * row_stride + expert[None, :] * column_stride
    logit = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(at + part * E * column_stride, mask=inside, other=0.0)
    if PARTS > 1:
        tl.store(logits + row * E + expert[None, :], logit, mask=inside)
    _store_choice(
        logit, expert, exists, bias, weights, experts, t, T, bias_stride, factor,
        K, BIASED, SOFTMAX, NORMALIZE, N_GROUP, TOPK_GROUP, BEST, ROWS, GROUPS, SIZE, CHOSEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def multiply_and_choose(
    x, terms, bias, logits, weights, experts, T, D, x_row, x_col, term_row, term_col, bias_stride, factor,
    K: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS tokens as in `choose_experts`, and multiplies them by the terms of the weight before it."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, exists = _experts(E, N_GROUP, GROUPS, SIZE)
    row = t.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, GROUPS * SIZE], tl.float32)
    rest = total  # of the products with the second and the third term, 2⁻⁸ of the others
    for begin in range(0, D, COLS):
        d = begin + tl.arange(0, COLS)
        values = tl.load(x + row * x_row + d[None, :] * x_col, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
        at = terms + expert[None, :] * term_row + d[:, None] * term_col
        inside = exists[None, :] & (d < D)[:, None]
        total = tl.dot(values, tl.load(at, mask=inside, other=0.0), total)
        if PARTS > 1:
            rest = tl.dot(values, tl.load(at + E * term_row, mask=inside, other=0.0), rest)
            rest = tl.dot(values, tl.load(at + 2 * E * term_row, mask=inside, other=0.0), rest)
    logit = total + rest
    tl.store(logits + row * E + expert[None, :], logit, mask=exists[None, :] & (t < T)[:, None])
    _store_choice(
        logit, expert, exists, bias, weights, experts, t, T, bias_stride, factor,
        K, BIASED, SOFTMAX, NORMALIZE, N_GROUP, TOPK_GROUP, BEST, ROWS, GROUPS, SIZE, CHOSEN,
    )  # fmt: skip


@triton.jit
def _experts(E: tl.constexpr, N_GROUP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The experts of the columns of a tile, whose GROUPS groups have SIZE columns each, and whether they exist."""
    GROUP: tl.constexpr = E // N_GROUP
    column = tl.arange(0, GROUPS * SIZE)
    expert = column
    exists = column < E
    if GROUP < SIZE:
        expert = column // SIZE * GROUP + column % SIZE
        exists = (column // SIZE < N_GROUP) & (column % SIZE < GROUP)
    return expert, exists


@triton.jit
def _store_choice(
    logit, expert, exists, bias, weights, experts, t, T, bias_stride, factor,
    K: tl.constexpr, BIASED: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Choose K experts for the tokens t by logits [ROWS, GROUPS · SIZE], and store them and their weights."""
    COLUMNS: tl.constexpr = GROUPS * SIZE
    shift = tl.zeros([ROWS], tl.float32)
    total = shift
    if SOFTMAX:
        shift = tl.max(tl.where(exists[None, :], logit, float("-inf")), axis=1)
        exponential = tl.where(exists[None, :], tl.exp(logit - shift[:, None]), 0.0)
        total = tl.sum(exponential, axis=1)
        score = tl.div_rn(exponential, total[:, None])
    else:
        score = _sigmoid(logit)
    if BIASED:
        score += tl.load(bias + expert * bias_stride, mask=exists, other=0.0)[None, :]

    if TOPK_GROUP < N_GROUP:
        groups, group_exists = tl.reshape(expert, [1, GROUPS, SIZE]), tl.reshape(exists, [1, GROUPS, SIZE])
        tile = tl.reshape(score, [ROWS, GROUPS, SIZE])
        order = tl.reshape(choice_order(tile, groups, group_exists, N_GROUP, TOPK_GROUP, BEST, GROUPS), [ROWS, COLUMNS])
    else:
        order = tl.where(exists[None, :], order_of(score), ABSENT)
    k = tl.arange(0, CHOSEN)[None, :]
    chosen = tl.zeros([ROWS, CHOSEN], tl.int32)
    own = tl.zeros([ROWS, CHOSEN], tl.float32)
    for step in tl.static_range(K):
        highest, order = take_highest(order, expert[None, :])
        chosen = tl.where(k == step, highest, chosen)
        highest_logit = tl.sum(tl.where(expert[None, :] == highest, logit, 0.0), axis=1)[:, None]
        own = tl.where(k == step, highest_logit, own)

    weight = tl.div_rn(tl.exp(own - shift[:, None]), total[:, None]) if SOFTMAX else _sigmoid(own)
    if NORMALIZE:
        weight = tl.div_rn(weight, (tl.sum(tl.where(k < K, weight, 0.0), axis=1) + WEIGHT_EPS)[:, None])
    at = t.to(tl.int64)[:, None] * K + k
    inside = (k < K) & (t < T)[:, None]
    tl.store(experts + at, chosen.to(tl.int64), mask=inside)
    tl.store(weights + at, weight * factor, mask=inside)


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
    e = tl.arange(0, COLUMNS)[None, :]
    row = t.to(tl.int64)[:, None]
    total = _gradient_of_logits(
        dweights, dlogits, logits, experts, t, T, dweight_row, dweight_col, dlogit_row, dlogit_col, logit_row,
        logit_col, expert_row, expert_col, factor,
        K, E, COLUMNS, WEIGHTED, ADD, SOFTMAX, NORMALIZE, ROWS, CHOSEN,
    )  # fmt: skip
    inside = (e < E) & (t < T)[:, None]
    if TERMS == 0:
        tl.store(out + row * E + e, total, mask=inside)
    else:
        _store_terms(out + row * (TERMS * E) + e, E, total, inside, TERMS, ORDER)


@triton.jit(do_not_specialize=["T", "STEPS"])
def gate_backward_gemms(
    dys, weight, x, dx, partials, T, D, STEPS, w_row, w_col, x_row, x_col,
    E: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes COLS columns of STEPS · ROWS tokens.

    It multiplies the terms of their gradients of the logits by those of the weight, and x by the former.
    """
    d = tl.program_id(0) * COLS + tl.arange(0, COLS)
    e = tl.arange(0, COLUMNS)
    at = weight + e[:, None] * w_row + d.to(tl.int64)[None, :] * w_col
    value = tl.load(at, mask=(e < E)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    w_1, w_2, w_3 = _terms(value)
    total = tl.zeros([COLS, COLUMNS], tl.float32)
    rest = total  # of the products with the second and the third term, 2⁻⁸ of the others
    for step in range(STEPS):
        t = (tl.program_id(1) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        row = t.to(tl.int64)[:, None]
        inside = (t < T)[:, None] & (d < D)[None, :]
        values = tl.trans(tl.load(x + row * x_row + d[None, :] * x_col, mask=inside, other=0.0))
        dy_row = dys + row * (3 * E) + e[None, :]
        own = (t < T)[:, None] & (e < E)[None, :]
        dy_1 = tl.load(dy_row, mask=own, other=0.0)
        dy_2 = tl.load(dy_row + E, mask=own, other=0.0)
        dy_3 = tl.load(dy_row + 2 * E, mask=own, other=0.0)
        total = tl.dot(values, dy_1, total)
        rest = tl.dot(values, dy_2, tl.dot(values, dy_3, rest))
        dx_tile = tl.dot(dy_3, w_1)  # the smallest products first
        if SPLIT:
            dx_tile = tl.dot(dy_1, w_2, tl.dot(dy_2, w_2, tl.dot(dy_1, w_3, dx_tile)))
        dx_tile = tl.dot(dy_1, w_1, tl.dot(dy_2, w_1, dx_tile))
        dx_tile = dx_tile.to(dx.dtype.element_ty)
        tl.store(dx + row * D + d[None, :], dx_tile, mask=inside, eviction_policy="evict_first")
    to = partials + (tl.program_id(1) * E + e[None, :]).to(tl.int64) * D + d[:, None]
    tl.store(to, total + rest, mask=(d < D)[:, None] & (e < E)[None, :])


@triton.jit
def _gradient_of_logits(
    dweights, dlogits, logits, experts, t, T, dweight_row, dweight_col, dlogit_row, dlogit_col, logit_row, logit_col,
    expert_row, expert_col, factor,
    K: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the logits of the tokens t, [ROWS, COLUMNS] float32."""
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
            score = tl.where(k < K, tl.div_rn(tl.exp(logit - shift), exponentials), 0.0)
        else:
            score = tl.where(k < K, _sigmoid(logit), 0.0)
        if NORMALIZE:
            weights = (tl.sum(score, axis=1) + WEIGHT_EPS)[:, None]
            score_gradient = tl.div_rn(tl.div_rn(score, weights), weights)
            d = tl.div_rn(d, weights) - tl.sum(d * score_gradient, axis=1)[:, None]
        if not SOFTMAX:
            d = d * (1.0 - score) * score
        for step in tl.static_range(K):
            is_step = k == step
            expert = tl.sum(tl.where(is_step, chosen, 0), axis=1)[:, None]
            total = tl.where(e == expert, tl.sum(tl.where(is_step, d, 0.0), axis=1)[:, None], total)
        if SOFTMAX:
            product = tl.sum(tl.where(e < E, total * affinity, 0.0), axis=1)[:, None]
            total = (total - product) * affinity
    if ADD:
        total += tl.load(dlogits + row * dlogit_row + e * dlogit_col, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["elements"])
def bfloat16_terms(t, out, elements, TERMS: tl.constexpr, ORDER: tl.constexpr, ELEMENTS: tl.constexpr):
    """A program splits ELEMENTS elements."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < elements
    value = tl.load(t + index, mask=inside, other=0.0).to(tl.float32)
    _store_terms(out + index, elements.to(tl.int64), value, inside, TERMS, ORDER)


@triton.jit
def _terms(value):
    """Return the three BF16 terms whose sum is a value."""
    first = value.to(tl.bfloat16)
    rest = value - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _store_terms(at, step, value, inside, TERMS: tl.constexpr, ORDER: tl.constexpr):
    """Store the BF16 terms of a value, `step` elements apart."""
    first, second, third = _terms(value)
    for i in tl.static_range(TERMS):
        term = third
        if (ORDER >> (2 * i)) % 4 == 0:
            term = first
        elif (ORDER >> (2 * i)) % 4 == 1:
            term = second
        tl.store(at + i * step, term, mask=inside)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))
