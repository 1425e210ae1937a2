# mypy: allow-untyped-defs
"""Causal attention within each of several texts that follow each other, and its gradients.

The forward kernel is `ragged_attention`'s. Three kernels compute the gradients, with p = exp(s − lse) computed again:

    output_products   δ = Σ_v o·do of each row and head
    key_gradients     a block of a text's keys: dv = pᵀ·do and dk = dsᵀ·q over the rows that see it, ds = p·(do·vᵀ − δ)
    query_gradients   a block of a text's rows: dq = ds·k over the keys that they see

Each gradient is summed by one program in a fixed order, so the same operands give the same bits; FlashAttention's own
kernels add parts of dq in any order, or wait for each other.

Source: FlashAttention-2 (arXiv 2307.08691).
Shapes: T rows, N texts, H heads, X channels of a query and a key, V of a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton import ragged_attention
from octile.kernels.triton.launch_config import (
    GRADIENTS_LEAST,
    KEY_GRADIENTS,
    KEY_GRADIENTS_SMALL,
    OUTPUT_PRODUCTS,
    QUERY_GRADIENTS,
    QUERY_GRADIENTS_SMALL,
)
from octile.kernels.triton.ragged_attention import (
    LOG2E,
    choose_blocks,
    constants,
    count_programs,
    find_block,
    load,
    span,
)


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return o [T, H, V], contiguous, and lse [H, T] float32."""
    o, lse = q.new_empty(v.shape), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    ragged_attention.launch(o, q, k, v, cu_seqlens, cu_seqlens, scale, lse)
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk [T, H, X] and dv [T, H, V], contiguous."""
    rows, heads, texts = *q.shape[:2], len(cu_seqlens) - 1
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    delta = torch.empty_like(lse)
    strides = [stride for t in (q, k, v, do) for stride in t.stride()[:2]]
    given = q, k, v, do, lse, delta
    sizes = constants(q, v)
    key_blocks = choose_blocks(q, v, KEY_GRADIENTS, KEY_GRADIENTS_SMALL, GRADIENTS_LEAST)
    query_blocks = choose_blocks(q, v, QUERY_GRADIENTS, QUERY_GRADIENTS_SMALL, GRADIENTS_LEAST)
    with torch.cuda.device_of(q):
        output_products[(triton.cdiv(rows, OUTPUT_PRODUCTS["ROWS"]), heads)](
            o, do, delta, rows, *o.stride()[:2], *do.stride()[:2], V=sizes["V"], VS=sizes["VS"], **OUTPUT_PRODUCTS
        )
        key_gradients[count_programs(rows, texts, key_blocks["KEYS"]), heads](
            *given, dk, dv, cu_seqlens, texts, scale, *strides, *dk.stride()[:2], *dv.stride()[:2], rows,
            **sizes, **key_blocks,
        )  # fmt: skip
        query_gradients[count_programs(rows, texts, query_blocks["ROWS"]), heads](
            *given, dq, cu_seqlens, texts, scale, *strides, *dq.stride()[:2], rows, **sizes, **query_blocks
        )
    return dq, dk, dv


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    q, v = cases.empty(cases.T, 16, 192), cases.empty(cases.T, 16, 256)[..., 128:]
    o, lse = cases.empty(cases.T, 16, 128), cases.empty(16, cases.T, dtype=cases.FP32)
    ends = cases.empty(33, dtype=torch.int32)
    return {
        "attention of packed texts": lambda: forward(q, q, v, ends, 0.1),
        "attention of packed texts, backward": lambda: backward(o, q, q, v, o, lse, ends, 0.1),
    }


@triton.jit
def output_products(
    o, do, delta, rows, o_row, o_head, do_row, do_head, V: tl.constexpr, VS: tl.constexpr, ROWS: tl.constexpr
):
    """Write δ = Σ_v o·do of a block of rows of one head."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value = tl.arange(0, VS)[None, :]
    inside = (row < rows)[:, None] & (value < V)
    a = tl.load(o + row[:, None] * o_row + head * o_head + value, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(do + row[:, None] * do_row + head * do_head + value, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head * rows + row, tl.sum(a * b, axis=1), mask=row < rows)


@triton.jit
def key_gradients(
    q, k, v, do, lse, delta, dk, dv, starts, texts, scale, q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head,
    dk_row, dk_head, dv_row, dv_head, lse_head, X: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    V: tl.constexpr, VS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values: first over rows that all see it, then over the others."""
    head = tl.program_id(1).to(tl.int64)
    text, block = find_block(starts, texts, KEYS)
    first_row, rows = span(starts, text)
    begin = block * KEYS
    if begin >= rows:
        return
    own = tl.arange(0, KEYS)[:, None]
    row = tl.arange(0, ROWS)
    c = tl.arange(0, FIRST)[None, :]
    value = tl.arange(0, VS)[None, :]
    here = begin + own < rows
    first_key = first_row + begin
    k_at = k + first_key * k_row + head * k_head + own * k_row
    v_at = v + first_key * v_row + head * v_head + own * v_row
    q_at = q + first_row * q_row + head * q_head
    do_at = do + first_row * do_row + head * do_head
    row_at = head * lse_head + first_row
    k_1 = tl.load(k_at + c, mask=here & (c < X), other=0.0)
    values = tl.load(v_at + value, mask=here & (value < V), other=0.0)
    dk_1 = tl.zeros([KEYS, FIRST], tl.float32)
    dvalues = tl.zeros([KEYS, VS], tl.float32)
    if SECOND:
        d = FIRST + tl.arange(0, SECOND)[None, :]
        k_2 = tl.load(k_at + d, mask=here & (d < X), other=0.0)
        dk_2 = tl.zeros([KEYS, SECOND], tl.float32)
    first = begin // ROWS * ROWS
    some_see = tl.minimum(tl.cdiv(begin + KEYS, ROWS), tl.cdiv(rows, ROWS)) * ROWS  # rows before do not see all keys
    full = tl.maximum(rows // ROWS * ROWS, some_see)
    before = (some_see - first) // ROWS
    masked = before + (full < rows).to(tl.int32)
    for phase in tl.static_range(2):
        for i in range((full - some_see) // ROWS if phase == 0 else masked):
            start = some_see + i * ROWS if phase == 0 else tl.where(i < before, first + i * ROWS, full)
            at = tl.cast(start, tl.int64)
            inside = (start + row < rows)[:, None]
            q_1 = load(q_at + at * q_row + (row[:, None] * q_row + c), inside, c < X, phase == 1 or X < FIRST)
            score = tl.dot(k_1, tl.trans(q_1), input_precision=PRECISION)
            if SECOND:
                q_2 = load(
                    q_at + at * q_row + (row[:, None] * q_row + d), inside, d < X, phase == 1 or X < FIRST + SECOND
                )
                score += tl.dot(k_2, tl.trans(q_2), input_precision=PRECISION)
            row_lse = tl.load(lse + (row_at + start) + row, mask=start + row < rows, other=float("inf"))
            weight = tl.exp2(score * (scale * LOG2E) - (row_lse * LOG2E)[None, :])
            if phase == 1:
                weight = tl.where(begin + own <= (start + row)[None, :], weight, 0.0)
            gradient = load(
                do_at + at * do_row + (row[:, None] * do_row + value), inside, value < V, phase == 1 or V < VS
            )
            row_delta = tl.load(delta + (row_at + start) + row, mask=start + row < rows, other=0.0)
            dscore = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
            dscore = (weight * (dscore - row_delta[None, :])).to(q_1.dtype)
            dvalues = tl.dot(weight.to(gradient.dtype), gradient, dvalues, input_precision=PRECISION)
            dk_1 = tl.dot(dscore, q_1, dk_1, input_precision=PRECISION)
            if SECOND:
                dk_2 = tl.dot(dscore, q_2, dk_2, input_precision=PRECISION)
    dk_at = dk + first_key * dk_row + head * dk_head + own * dk_row
    tl.store(dk_at + c, (dk_1 * scale).to(dk.dtype.element_ty), mask=here & (c < X))
    if SECOND:
        tl.store(dk_at + d, (dk_2 * scale).to(dk.dtype.element_ty), mask=here & (d < X))
    dv_at = dv + first_key * dv_row + head * dv_head + own * dv_row
    tl.store(dv_at + value, dvalues.to(dv.dtype.element_ty), mask=here & (value < V))


@triton.jit
def query_gradients(
    q, k, v, do, lse, delta, dq, starts, texts, scale, q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head,
    dq_row, dq_head, lse_head, X: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, V: tl.constexpr,
    VS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries, the last rows of a text first, which see the most keys."""
    head = tl.program_id(1).to(tl.int64)
    text, block = find_block(starts, texts, ROWS)
    first_row, rows = span(starts, text)
    begin = (tl.cdiv(rows, ROWS) - 1 - block) * ROWS
    if begin < 0:
        return
    own = tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, KEYS)
    c = tl.arange(0, FIRST)[None, :]
    value = tl.arange(0, VS)[None, :]
    inside = begin + own < rows
    begin_row = first_row + begin
    q_at = q + begin_row * q_row + head * q_head + own * q_row
    do_at = do + begin_row * do_row + head * do_head + own * do_row
    k_at = k + first_row * k_row + head * k_head
    v_at = v + first_row * v_row + head * v_head
    row_at = head * lse_head + begin_row
    q_1 = tl.load(q_at + c, mask=inside & (c < X), other=0.0)
    gradient = tl.load(do_at + value, mask=inside & (value < V), other=0.0)
    row_lse = tl.load(lse + row_at + own, mask=inside, other=float("inf")) * LOG2E
    row_delta = tl.load(delta + row_at + own, mask=inside, other=0.0)
    dq_1 = tl.zeros([ROWS, FIRST], tl.float32)
    if SECOND:
        d = FIRST + tl.arange(0, SECOND)[None, :]
        q_2 = tl.load(q_at + d, mask=inside & (d < X), other=0.0)
        dq_2 = tl.zeros([ROWS, SECOND], tl.float32)
    seen_by_all = (begin + 1) // KEYS * KEYS
    end = tl.minimum(begin + ROWS, rows)
    for phase in tl.static_range(2):
        for start in range(0 if phase == 0 else seen_by_all, seen_by_all if phase == 0 else end, KEYS):
            here = (start + key < rows)[:, None]
            at = tl.cast(start, tl.int64)
            k_1 = load(k_at + at * k_row + (key[:, None] * k_row + c), here, c < X, phase == 1 or X < FIRST)
            score = tl.dot(q_1, tl.trans(k_1), input_precision=PRECISION)
            if SECOND:
                k_2 = load(
                    k_at + at * k_row + (key[:, None] * k_row + d), here, d < X, phase == 1 or X < FIRST + SECOND
                )
                score += tl.dot(q_2, tl.trans(k_2), input_precision=PRECISION)
            weight = tl.exp2(score * (scale * LOG2E) - row_lse)
            if phase == 1:
                weight = tl.where((start + key)[None, :] <= begin + own, weight, 0.0)
            values = load(v_at + at * v_row + (key[:, None] * v_row + value), here, value < V, phase == 1 or V < VS)
            dscore = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
            dscore = (weight * (dscore - row_delta)).to(k_1.dtype)
            dq_1 = tl.dot(dscore, k_1, dq_1, input_precision=PRECISION)
            if SECOND:
                dq_2 = tl.dot(dscore, k_2, dq_2, input_precision=PRECISION)
    dq_at = dq + begin_row * dq_row + head * dq_head + own * dq_row
    tl.store(dq_at + c, (dq_1 * scale).to(dq.dtype.element_ty), mask=inside & (c < X))
    if SECOND:
        tl.store(dq_at + d, (dq_2 * scale).to(dq.dtype.element_ty), mask=inside & (d < X))
