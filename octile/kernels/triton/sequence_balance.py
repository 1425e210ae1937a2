# mypy: allow-untyped-defs
"""The balance of the experts within each sequence, as `octile.ops.sequence_balance` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import EXACT, SEQUENCE_BALANCE, SEQUENCE_BALANCE_SUM
from octile.kernels.triton.top_experts import LEAST, key_of


def launch(
    logits: Tensor, experts: Tensor | None, n_chosen: int, batch: int, scoring_func: str
) -> tuple[Tensor, Tensor]:
    """The loss [] and f [B, E] of logits [T, E], any strides, which count experts [T, K], or the K highest logits."""
    (t, n_experts), device = logits.shape, logits.device
    length, columns = t // batch, triton.next_power_of_2(n_experts)
    rows = max(SEQUENCE_BALANCE["elements"] // columns, 1)
    programs = triton.cdiv(length, rows * SEQUENCE_BALANCE["steps"])
    counts = torch.empty(batch * programs, n_experts, dtype=torch.int32, device=device)
    shares = torch.empty(batch * programs, n_experts, dtype=torch.float32, device=device)
    f = torch.empty(batch, n_experts, dtype=torch.float32, device=device)
    losses = torch.empty(batch, dtype=torch.float32, device=device)
    counted = logits if experts is None else experts  # not read if None
    parts = max(min(SEQUENCE_BALANCE_SUM["elements"] // columns, triton.next_power_of_2(programs)), 1)
    with torch.cuda.device_of(logits):
        balance_parts[(batch * programs,)](
            logits, counted, counts, shares, length, programs, *logits.stride(), *counted.stride(), K=n_chosen,
            E=n_experts, GIVEN=experts is not None, SOFTMAX=scoring_func == "softmax", COLUMNS=columns, ROWS=rows,
            STEPS=SEQUENCE_BALANCE["steps"], num_warps=SEQUENCE_BALANCE["num_warps"], **EXACT,
        )  # fmt: skip
        balance_of_sequences[(batch,)](
            counts, shares, f, losses, length, programs, E=n_experts, COLUMNS=columns, PARTS=parts,
            num_warps=SEQUENCE_BALANCE_SUM["num_warps"], **EXACT,
        )  # fmt: skip
    return losses.mean(), f


def launch_backward(dloss: Tensor, logits: Tensor, f: Tensor, scoring_func: str) -> Tensor:
    """The gradient of logits [T, E], any strides."""
    (t, n_experts), batch = logits.shape, len(f)
    dlogits = torch.empty(t, n_experts, dtype=torch.float32, device=logits.device)
    columns = triton.next_power_of_2(n_experts)
    rows = max(SEQUENCE_BALANCE["elements"] // columns, 1)
    with torch.cuda.device_of(logits):
        balance_backward[(triton.cdiv(t, rows),)](
            dloss, logits, f, dlogits, t, t // batch, batch, *logits.stride(), *f.stride(), E=n_experts,
            SOFTMAX=scoring_func == "softmax", COLUMNS=columns, ROWS=rows, num_warps=SEQUENCE_BALANCE["num_warps"],
            **EXACT,
        )  # fmt: skip
    return dlogits


@triton.jit(do_not_specialize=["S", "PROGRAMS"])
def balance_parts(
    logits, experts, counts, shares, S, PROGRAMS, row_stride, column_stride, expert_row, expert_col,
    K: tl.constexpr, E: tl.constexpr, GIVEN: tl.constexpr, SOFTMAX: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A program counts the experts, and sums the shares, of STEPS · ROWS tokens of a sequence of S."""
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
        total += tl.where(inside, _shares(logit, e < E, SOFTMAX), 0.0)
        if GIVEN:
            for k in tl.static_range(K):
                expert = tl.load(experts + row * expert_row + k * expert_col, mask=s < S, other=-1)
                count += (e == expert).to(tl.int32)
        else:
            key = tl.where(e < E, key_of(logit, e), LEAST)
            for _ in tl.static_range(K):
                is_chosen = key == tl.max(key, axis=1)[:, None]
                count += (is_chosen & (s < S)).to(tl.int32)
                key = tl.where(is_chosen, LEAST, key)
    at = tl.program_id(0).to(tl.int64) * E + tl.arange(0, COLUMNS)
    tl.store(counts + at, tl.sum(count, axis=0), mask=tl.arange(0, COLUMNS) < E)
    tl.store(shares + at, tl.sum(total, axis=0), mask=tl.arange(0, COLUMNS) < E)


@triton.jit(do_not_specialize=["S", "PROGRAMS"])
def balance_of_sequences(
    counts, shares, f, losses, S, PROGRAMS, E: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """A program sums what the programs of a sequence found: f, and the loss of the sequence."""
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
    of_experts = tl.sum(count, axis=0)
    entries = tl.sum(of_experts, axis=0).to(tl.float32)
    of_sequence = tl.div_rn((of_experts.to(tl.int64) * E).to(tl.float32), entries)
    tl.store(f + sequence * E + e, of_sequence, mask=e < E)
    loss = tl.where(e < E, of_sequence * tl.div_rn(tl.sum(total, axis=0), S.to(tl.float32)), 0.0)
    tl.store(losses + sequence, tl.sum(loss, axis=0))


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
    of_sequence = tl.load(f + (t // S).to(tl.int64) * f_row + e * f_col, mask=inside, other=0.0)
    d = tl.div_rn(tl.div_rn(tl.load(dloss), B.to(tl.float32)) * of_sequence, S.to(tl.float32))
    share = _shares(logit, e < E, SOFTMAX)
    d = share * (d - tl.sum(d * share, axis=1)[:, None])
    if not SOFTMAX:
        d = d * tl.div_rn(1.0, 1.0 + tl.exp(logit))
    tl.store(dlogits + row * E + e, d, mask=inside)


@triton.jit
def _shares(logit, exists, SOFTMAX: tl.constexpr):
    """Return the shares of the experts in the affinities of each token."""
    log = logit
    if not SOFTMAX:
        log = tl.minimum(logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logit)))
    log = tl.where(exists, log, float("-inf"))
    exponential = tl.where(exists, tl.exp(log - tl.max(log, axis=1)[:, None]), 0.0)
    return tl.div_rn(exponential, tl.sum(exponential, axis=1)[:, None])
