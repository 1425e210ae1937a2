# mypy: allow-untyped-defs
"""The balance of the experts within each sequence, as `octile.ops.sequence_balance` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import (
    EXACT,
    SEQUENCE_BALANCE,
    SEQUENCE_BALANCE_BACKWARD,
    SEQUENCE_BALANCE_SUM,
)
from octile.kernels.triton.top_experts import ABSENT, order_of, take_highest


def launch(
    logits: Tensor, experts: Tensor | None, n_chosen: int, batch: int, scoring_func: str
) -> tuple[Tensor, Tensor]:
    """The loss [] and f [B, E] of logits [T, E], any strides, which count experts [T, K], or the K highest logits."""
    (t, n_experts), device = logits.shape, logits.device
    length, columns = t // batch, triton.next_power_of_2(n_experts)
    rows = max(SEQUENCE_BALANCE["elements"] // columns, 1)
    blocks = triton.cdiv(length, rows)
    steps = triton.cdiv(batch * blocks, SEQUENCE_BALANCE["max_programs"])
    programs = triton.cdiv(blocks, steps)
    counts = torch.empty(batch * programs, n_experts, dtype=torch.int32, device=device)
    shares = torch.empty(batch * programs, n_experts, dtype=torch.float32, device=device)
    f = torch.empty(batch, n_experts, dtype=torch.float32, device=device)
    losses = torch.empty(batch, dtype=torch.float32, device=device)
    ended = torch.empty((), dtype=torch.int32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    counted = logits if experts is None else experts  # not read if None
    parts = max(min(SEQUENCE_BALANCE_SUM["elements"] // columns, triton.next_power_of_2(programs)), 1)
    with torch.cuda.device_of(logits):
        balance_parts[(batch * programs,)](
            logits, counted, counts, shares, ended, length, programs, steps, *logits.stride(), *counted.stride(),
            K=n_chosen, E=n_experts, GIVEN=experts is not None, SOFTMAX=scoring_func == "softmax", COLUMNS=columns,
            ROWS=rows, num_warps=SEQUENCE_BALANCE["num_warps"], **EXACT,
        )  # fmt: skip
        balance_of_sequences[(batch,)](
            counts, shares, f, losses, ended, loss, length, programs, batch, E=n_experts, COLUMNS=columns, PARTS=parts,
            BATCH=triton.next_power_of_2(batch), num_warps=SEQUENCE_BALANCE_SUM["num_warps"], **EXACT,
        )  # fmt: skip
    return loss, f


def launch_backward(dloss: Tensor, logits: Tensor, f: Tensor, scoring_func: str) -> Tensor:
    """The gradient of logits [T, E], any strides."""
    (t, n_experts), batch = logits.shape, len(f)
    dlogits = torch.empty(t, n_experts, dtype=torch.float32, device=logits.device)
    columns = triton.next_power_of_2(n_experts)
    rows = max(SEQUENCE_BALANCE_BACKWARD["elements"] // columns, 1)
    with torch.cuda.device_of(logits):
        balance_backward[(triton.cdiv(t, rows),)](
            dloss, logits, f, dlogits, t, t // batch, batch, *logits.stride(), *f.stride(), E=n_experts,
            SOFTMAX=scoring_func == "softmax", COLUMNS=columns, ROWS=rows,
            num_warps=SEQUENCE_BALANCE_BACKWARD["num_warps"], **EXACT,
        )  # fmt: skip
    return dlogits


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    logits, experts = cases.empty(cases.T, 256, dtype=cases.FP32), cases.empty(cases.T, 8, dtype=torch.int64)
    dloss, f = cases.empty(dtype=cases.FP32), cases.empty(2, 256, dtype=cases.FP32)
    return {
        "balance of V3": lambda: launch(logits, None, 8, 2, "sigmoid"),
        "balance of V2": lambda: launch(logits, experts, 8, 2, "softmax"),
        "balance backward": lambda: launch_backward(dloss, logits, f, "sigmoid"),
    }


@triton.jit(do_not_specialize=["S", "PROGRAMS", "STEPS"])
def balance_parts(
    logits, experts, counts, shares, ended, S, PROGRAMS, STEPS, row_stride, column_stride, expert_row, expert_col,
    K: tl.constexpr, E: tl.constexpr, GIVEN: tl.constexpr, SOFTMAX: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program counts the experts, and sums the shares, of STEPS · ROWS tokens of a sequence of S."""
    if tl.program_id(0) == 0:
        tl.store(ended, 0)
    sequence = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    first = tl.program_id(0) % PROGRAMS * (ROWS * STEPS)
    e = tl.arange(0, COLUMNS)[None, :]
    count = tl.zeros([ROWS, COLUMNS], tl.int32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        s = (first + step * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (s < S) & (e < E)
        row = sequence * S + s
        logit = tl.load(logits + row * row_stride + e * column_stride, mask=inside, other=0.0)
        share, _ = _shares(logit, e < E, SOFTMAX)
        total += tl.where(inside, share, 0.0)
        if GIVEN:
            for k in tl.static_range(K):
                expert = tl.load(experts + row * expert_row + k * expert_col, mask=s < S, other=-1)
                count += (e == expert).to(tl.int32)
        else:
            count += tl.where(s < S, _highest(logit, e, e < E, K), 0)
    at = tl.program_id(0).to(tl.int64) * E + tl.arange(0, COLUMNS)
    tl.store(counts + at, tl.sum(count, axis=0), mask=tl.arange(0, COLUMNS) < E)
    tl.store(shares + at, tl.sum(total, axis=0), mask=tl.arange(0, COLUMNS) < E)


@triton.jit
def _highest(logit, e, exists, K: tl.constexpr):
    """Return 1 for the K highest elements of each row, 0 for others; of equal ones those of lower indices e count."""
    order = tl.where(exists, order_of(logit), ABSENT)
    left = order
    highest = tl.max(left, axis=1)[:, None]
    for _ in tl.static_range(K - 1):
        left = tl.where(left < highest, left, ABSENT)
        highest = tl.max(left, axis=1)[:, None]
    chosen = ((order >= highest) & exists).to(tl.int32)
    if tl.max(tl.sum(chosen, axis=1), axis=0) > K:  # some are equal
        chosen = _highest_of_equal(order, e, K)
    return chosen


@triton.jit
def _highest_of_equal(order, e, K: tl.constexpr):
    chosen = tl.zeros_like(order)
    for _ in range(K):
        highest, order = take_highest(order, e)
        chosen += (e == highest).to(tl.int32)
    return chosen


@triton.jit(do_not_specialize=["S", "PROGRAMS", "B"])
def balance_of_sequences(
    counts, shares, f, losses, ended, loss, S, PROGRAMS, B, E: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """A program sums what the programs of a sequence found: f, and its loss. The last one to end sums the losses."""
    sequence = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, COLUMNS)
    count = tl.zeros([PARTS, COLUMNS], tl.int32)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, PROGRAMS, PARTS):
        part = (first + tl.arange(0, PARTS))[:, None]
        inside = (part < PROGRAMS) & (e[None, :] < E)
        at = (sequence * PROGRAMS + part) * E + e[None, :]
        count += tl.load(counts + at, mask=inside, other=0)
        total += tl.load(shares + at, mask=inside, other=0.0)
    expert_counts = tl.sum(count, axis=0)
    entries = tl.sum(expert_counts, axis=0).to(tl.float32)
    sequence_f = tl.div_rn((expert_counts.to(tl.int64) * E).to(tl.float32), entries)
    tl.store(f + sequence * E + e, sequence_f, mask=e < E)
    sequence_f = tl.where(e < E, sequence_f * tl.div_rn(tl.sum(total, axis=0), S.to(tl.float32)), 0.0)
    tl.store(losses + sequence, tl.sum(sequence_f, axis=0))
    tl.debug_barrier()  # the loss is stored
    if tl.atomic_add(ended, 1, sem="acq_rel") == B - 1:
        b = tl.arange(0, BATCH)
        every = tl.load(losses + b, mask=b < B, other=0.0, cache_modifier=".cg")
        tl.store(loss, tl.div_rn(tl.sum(every, axis=0), B.to(tl.float32)))


@triton.jit(do_not_specialize=["T", "S", "B"])
def balance_backward(
    dloss, logits, f, dlogits, T, S, B, row_stride, column_stride, f_row, f_col,
    E: tl.constexpr, SOFTMAX: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS tokens."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    e = tl.arange(0, COLUMNS)[None, :]
    inside = (t < T) & (e < E)
    row = t.to(tl.int64)
    logit = tl.load(logits + row * row_stride + e * column_stride, mask=inside, other=0.0)
    sequence_f = tl.load(f + (t // S).to(tl.int64) * f_row + e * f_col, mask=inside, other=0.0)
    d = tl.div_rn(tl.div_rn(tl.load(dloss), B.to(tl.float32)) * sequence_f, S.to(tl.float32))
    share, rest = _shares(logit, e < E, SOFTMAX)
    d = share * (d - tl.sum(d * share, axis=1)[:, None])
    if not SOFTMAX:
        d = d * rest
    tl.store(dlogits + row * E + e, d, mask=inside)


@triton.jit
def _shares(logit, exists, SOFTMAX: tl.constexpr):
    """Return the shares of the experts in the affinities of each token, and 1 − affinity, of sigmoids.

    A sigmoid is exp(min(x, 0)) / (1 + exp(−|x|)). If those of all experts are small, the largest one becomes 1 in the
    exponent: then no sum is 0.
    """
    rest = logit
    if SOFTMAX:
        highest = tl.max(tl.where(exists, logit, float("-inf")), axis=1)[:, None]
        affinity = tl.where(exists, tl.exp(logit - highest), 0.0)
    else:
        below = tl.where(logit < 0.0, logit, 0.0)
        highest = tl.max(tl.where(exists, below, float("-inf")), axis=1)[:, None]
        small = tl.exp(-tl.abs(logit))
        inverse = 1.0 / (1.0 + small)
        affinity = tl.where(exists, tl.exp(below - highest) * inverse, 0.0)
        rest = tl.where(logit < 0.0, inverse, small * inverse)
    return affinity * (1.0 / tl.sum(affinity, axis=1)[:, None]), rest
